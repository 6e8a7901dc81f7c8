//! Copies of snapshots outside the data directory: what to copy, and how to build a data directory from
//! copies. The caller transfers the bytes.

mod described;
mod fetched;
mod held;
mod latest;
pub(crate) mod past;
mod taken;

pub use described::{Described, Part};
pub use fetched::Fetched;
pub use held::{Held, lock};
pub use latest::{Latest, new_folder, number_of};
pub use past::{CopiedSnapshot, PastFolder, Sealed, Unfinished, chain};
pub use taken::{Taken, Vacancy, vacancy};

use crate::files::io::{failed, sync_directory};
use crate::files::names::shards_in;
use crate::files::output::Output;
use crate::files::removal::remove;
use crate::snapshot::manifest::MANIFEST;
use fastps_core::error::{Error, Kind, Result};
use std::io::ErrorKind;
use std::path::Path;

/// The manifest's file name. It is uploaded last.
pub const MANIFEST_NAME: &str = MANIFEST;
/// A file in a shard's directory: the folders of its copies, one per line, newest last.
const COPIED_FILE: &str = "copied";
/// A file in a shard's directory: the newest term in which its server owned the shard.
const SERVED_FILE: &str = "term";
/// Maximum number of folders in that file.
const MAX_COPIED_FOLDERS: usize = 16;

/// The shards in a data directory.
pub fn shards(data_dir: &Path) -> Result<Vec<u32>> {
    shards_in(data_dir)
}

/// The folders that a directory's snapshots were copied to, or that it was fetched from.
pub fn copied(directory: &Path) -> Result<Vec<String>> {
    let path = directory.join(COPIED_FILE);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed("read", &path, &error)),
    }
}

/// Remembers a folder. The entry is durable before the folder can become `latest`, so that a restarted server
/// recognizes its own copies.
pub fn note_copied(directory: &Path, folder: &str) -> Result<()> {
    let mut known = copied(directory)?;
    known.retain(|other| other != folder);
    known.push(folder.to_owned());
    let text = known[known.len().saturating_sub(MAX_COPIED_FOLDERS)..].join("\n") + "\n";
    replace(directory, COPIED_FILE, &text)
}

/// The newest term in which a server has opened this directory; `None`: none with an owner's lease has.
pub fn served(directory: &Path) -> Result<Option<u64>> {
    let path = directory.join(SERVED_FILE);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", &path, &error)),
    };
    let damaged = |_| Error::new(Kind::Internal, format!("{} is damaged: it names no term", path.display()));
    text.trim().parse().map(Some).map_err(damaged)
}

/// Remembers the term, durably, before a server opens the directory in it.
pub fn note_served(directory: &Path, term: u64) -> Result<()> {
    replace(directory, SERVED_FILE, &format!("{term}\n"))
}

/// Replaces a small file, durably.
fn replace(directory: &Path, name: &str, text: &str) -> Result<()> {
    let (path, unfinished) = (directory.join(name), directory.join(format!("{name}.tmp")));
    remove(&unfinished)?;
    let mut file = Output::create(&unfinished)?;
    file.write(text.as_bytes())?;
    file.finish()?;
    std::fs::rename(&unfinished, &path).map_err(|error| failed("rename", &unfinished, &error))?;
    sync_directory(directory)
}
