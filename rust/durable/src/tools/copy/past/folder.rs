//! A data directory for reading, built from the copies of a history. Of its snapshots it has what says where a
//! moment is; their values follow when a moment needs them.

use crate::files::directory::Directory;
use crate::files::io::failed;
use crate::files::names::{UNFINISHED_SUFFIX, shard_folder};
use crate::files::removal::remove;
use crate::frame::{Author, Origin};
use crate::log::read::beginning;
use crate::log::segment::Segment;
use crate::recovery::moment::{Moment, first_segment};
use crate::snapshot::manifest::{MANIFEST, SLICES};
use crate::tools::copy::described::{Described, Part};
use crate::tools::copy::latest::Latest;
use crate::tools::copy::past::Sealed;
use fastps_core::error::{Error, Kind, Result};
use std::fs::{DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// In the folder of all shards: where they were copied from.
const SOURCE_FILE: &str = "copied-from";
/// In a shard's folder: when the log that was copied ends, in milliseconds since 1970.
const END_FILE: &str = "copied-until";
/// In a snapshot's folder: its values are there.
const WHOLE_FILE: &str = "whole";

/// A shard's part of such a directory.
#[derive(Debug)]
pub struct PastFolder {
    directory: Directory,
    origin: Origin,
}

/// A file that is being fetched.
#[derive(Debug)]
pub struct Unfinished {
    /// Where to write it.
    pub path: PathBuf,
    to: PathBuf,
}

/// Where a directory was copied from; `None`: it is a server's, or was rewound.
pub(crate) fn source(data_dir: &Path) -> Option<PathBuf> {
    std::fs::read_to_string(data_dir.join(SOURCE_FILE)).ok().map(PathBuf::from)
}

/// When the log of a copied directory ends, in milliseconds since 1970; `None`: it is not a copy, and goes on.
pub(crate) fn copied_until(directory: &Directory) -> Option<u64> {
    std::fs::read_to_string(directory.path().join(END_FILE)).ok()?.trim().parse().ok()
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).map_err(|error| failed("write", path, &error))
}

fn create(path: &Path) -> Result<()> {
    // A model's values are private to their owner.
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| failed("create", path, &error))
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    std::fs::rename(from, to).map_err(|error| failed("rename", from, &error))
}

impl Unfinished {
    fn new(to: PathBuf) -> Self {
        let mut path = to.clone().into_os_string();
        path.push(UNFINISHED_SUFFIX);
        Self { path: path.into(), to }
    }
}

impl PastFolder {
    /// The folder of the shard that this `latest` is of.
    pub fn open(data_dir: &Path, latest: &Latest) -> Result<Self> {
        let id = u64::from_str_radix(&latest.directory, 16).map_err(|_| {
            Error::new(Kind::Internal, "latest is damaged: it names no directory").shard(latest.shard)
        })?;
        let path = shard_folder(data_dir, latest.shard);
        create(&path)?;
        let origin = Origin { id, shard: latest.shard, shards: latest.shards };
        Ok(Self { directory: Directory::unlocked(&path), origin })
    }

    /// Notes where a directory is copied from.
    pub fn note_source(data_dir: &Path, url: &str) -> Result<()> {
        write(&data_dir.join(SOURCE_FILE), url.as_bytes())
    }

    /// A segment to fetch. `None`: it is there.
    pub fn segment(&self, sealed: &Sealed) -> Result<Option<Unfinished>> {
        let path = self.directory.segment(sealed.number);
        if std::fs::metadata(&path).is_ok_and(|found| found.len() == sealed.bytes) {
            return Ok(None);
        }
        Ok(Some(Unfinished::new(path)))
    }

    /// Adds a segment whose bytes were compared with its name. Fails if it is not this shard's; `place` appears in
    /// errors.
    pub fn add_segment(&self, file: &Unfinished, sealed: &Sealed, place: &str) -> Result<()> {
        let begun = beginning(&file.path)?;
        if !begun.is_some_and(|begun| begun.number == sealed.number && begun.origin == self.origin) {
            let message = format!("{place} is misplaced: it is not a part of this shard's log");
            let got = begun.map_or("another file".to_owned(), |begun| {
                let Origin { id, shard, shards } = begun.origin;
                format!("segment {} of shard {shard} of {shards} in directory {id:016x}", begun.number)
            });
            let Origin { id, shard, shards } = self.origin;
            let expected =
                format!("segment {} of shard {shard} of {shards} in directory {id:016x}", sealed.number);
            return Err(Error::new(Kind::Internal, message).expected(expected, got));
        }
        rename(&file.path, &file.to)
    }

    /// A snapshot to fetch: its list of slices is written into the folder. `None`: it is there.
    pub fn snapshot(&self, number: u64) -> Result<Option<Unfinished>> {
        let path = self.directory.generation(number);
        if path.exists() {
            return Ok(None);
        }
        let unfinished = Unfinished::new(path);
        remove(&unfinished.path)?;
        create(&unfinished.path)?;
        Ok(Some(unfinished))
    }

    /// The file of a snapshot that says which version each slice has. The others are its values.
    pub fn is_list(part: Part) -> bool {
        part.name == SLICES
    }

    /// Adds a snapshot whose list of slices is in the folder, without values. Fails if it is not this shard's.
    pub fn add_snapshot(&self, folder: &Unfinished, described: &Described, place: &str) -> Result<()> {
        if described.manifest.origin() != self.origin {
            let message = format!("{place} is misplaced: it is not a snapshot of this shard");
            let say = |Origin { id, shard, shards }: Origin| {
                format!("shard {shard} of {shards} in directory {id:016x}")
            };
            let (expected, got) = (say(self.origin), say(described.manifest.origin()));
            return Err(Error::new(Kind::Internal, message).expected(expected, got));
        }
        for part in described.parts().filter(|part| !Self::is_list(*part)) {
            // Its length is checked before its bytes are read.
            let path = folder.path.join(part.name);
            let made = File::create(&path).and_then(|file| file.set_len(part.bytes));
            made.map_err(|error| failed("write", &path, &error))?;
        }
        write(&folder.path.join(MANIFEST), described.text())?;
        rename(&folder.path, &folder.to)
    }

    /// The folder of a snapshot that lacks its values. `None`: they are there.
    pub fn without_values(&self, number: u64) -> Option<PathBuf> {
        let path = self.directory.generation(number);
        (!path.join(WHOLE_FILE).exists()).then_some(path)
    }

    /// Notes that the values of a snapshot are there.
    pub fn has_values(&self, number: u64) -> Result<()> {
        write(&self.directory.generation(number).join(WHOLE_FILE), b"")
    }

    /// The segment from which the log is needed for a moment, or for all (`None`); `begins`: it is kept from the
    /// beginning of the shard on. `None`: the moment is before all that is kept.
    pub fn first_segment(&self, moment: Option<&Moment>, begins: bool) -> Result<Option<u64>> {
        first_segment(&self.directory, moment, begins)
    }

    /// Completes the folder: its log ends with this segment.
    pub fn end(&self, last: &Sealed) -> Result<()> {
        write(&self.directory.path().join(END_FILE), last.time.to_string().as_bytes())?;
        // The segment that continues the log is empty.
        let path = self.directory.segment(last.next);
        let last_path = self.directory.segment(last.number);
        if last.next > 0 && last_path.exists() && !path.exists() {
            let author = beginning(&last_path)?.map_or_else(Author::default, |begun| begun.author);
            Segment::create(&self.directory, last.next, false, self.origin, author)?;
        }
        self.remove_older()
    }

    /// Removes snapshots before the log: no moment is reached from them.
    fn remove_older(&self) -> Result<()> {
        let Some(first) = self.directory.segments()?.first().copied() else { return Ok(()) };
        for number in self.directory.generations()? {
            let path = self.directory.generation(number);
            let text = std::fs::read(path.join(MANIFEST));
            let text = text.map_err(|error| failed("read", &path, &error))?;
            if Described::parse(text, &path.display().to_string())?.log().segment < first {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// Removes everything, to begin again.
    pub fn clear(&self) -> Result<()> {
        let path = self.directory.path();
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", path, &error)),
            _ => create(path),
        }
    }
}
