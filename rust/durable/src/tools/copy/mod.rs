//! What a copy of snapshots in another place needs of a shard's directory, and a data directory made of such a copy. How
//! bytes get there is not known here.

mod described;
mod fetched;
mod held;
mod latest;

pub use described::{Described, Part};
pub use fetched::Fetched;
pub use held::{Held, lock};
pub use latest::{Latest, new_folder, number_of};

use crate::files::io::{failed, sync_directory};
use crate::files::names::shards_in;
use crate::files::output::Output;
use crate::files::removal::remove;
use crate::snapshot::manifest::MANIFEST;
use fastps_core::error::Result;
use std::io::ErrorKind;
use std::path::Path;

/// The file of a copied snapshot that speaks for the others.
pub const MANIFEST_NAME: &str = MANIFEST;
/// In a shard's directory: the folders that were made of its snapshots elsewhere, a line each, the newest last.
const COPIED: &str = "copied";
/// So many of them are remembered.
const REMEMBERED: usize = 16;

/// The shards that a data directory has.
pub fn shards(data_dir: &Path) -> Result<Vec<u32>> {
    shards_in(data_dir)
}

/// The folders that were made elsewhere of a directory's snapshots, or that it was made of.
pub fn copied(directory: &Path) -> Result<Vec<String>> {
    let path = directory.join(COPIED);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed("read", &path, &error)),
    }
}

/// Remembers such a folder. It is durable before the folder can be the latest, so that a server that is started again knows
/// its own.
pub fn note_copied(directory: &Path, folder: &str) -> Result<()> {
    let mut known = copied(directory)?;
    known.retain(|other| other != folder);
    known.push(folder.to_owned());
    let text = known[known.len().saturating_sub(REMEMBERED)..].join("\n") + "\n";
    let (path, unfinished) = (directory.join(COPIED), directory.join(format!("{COPIED}.tmp")));
    remove(&unfinished)?;
    let mut file = Output::create(&unfinished)?;
    file.write(text.as_bytes())?;
    file.finish()?;
    std::fs::rename(&unfinished, &path).map_err(|error| failed("rename", &unfinished, &error))?;
    sync_directory(directory)
}
