//! The directory of one shard: the names in it, and what is removed whole or not at all.

use crate::files::lock::{LOCK, Lock};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::{fail, reach};
use rustix::fs::FlockOperation;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

const SHARD: &str = "shard-";
const GENERATION: &str = "generation-";
const SEGMENT: &str = "log-";
/// Begins the names of what was put out of the way.
pub(crate) const DAMAGED: &str = "damaged-";
/// So much of a file is freed at a time.
const STEP: u64 = 8 << 20;
/// The disk is left to others for so many times what that took.
const PAUSE: u32 = 3;
/// Ends the names of what is not complete.
pub(crate) const UNFINISHED: &str = ".tmp";

/// The directory of one shard, while this process has it.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    lock: Arc<Lock>,
    /// It was made when it was opened.
    fresh: bool,
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.release();
    }
}

/// An error about a file, with what was to be done.
pub(crate) fn failed(what: &str, path: &Path, error: &std::io::Error) -> Error {
    let kind = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Kind::Unavailable,
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem | ErrorKind::NotADirectory => {
            Kind::Config
        }
        _ => Kind::Internal,
    };
    Error::new(kind, format!("cannot {what} {}: {error}", path.display()))
}

/// Makes the names in a directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    let opened = fail("directory_sync").and_then(|()| File::open(path));
    let synced = opened.and_then(|directory| directory.sync_all());
    synced.map_err(|error| failed("sync", path, &error))
}

impl Directory {
    /// Makes it if need be, and takes its lock.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // What a model has learned is its owner's.
        let fresh = !path.exists();
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|error| failed("make", path, &error))?;
        let lock = Arc::new(Lock::take(path)?);
        let directory = Self { path: path.to_owned(), lock, fresh };
        for unfinished in directory.names()?.iter().filter(|name| name.ends_with(UNFINISHED)) {
            remove(&directory.path.join(unfinished))?;
        }
        Ok(directory)
    }

    /// Takes the lock of one that is there, and changes nothing in it.
    pub(crate) fn look(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), lock: Arc::new(Lock::look(path)?), fresh: false })
    }

    /// One that a server may be using.
    pub(crate) fn beside(path: &Path) -> Self {
        Self { path: path.to_owned(), lock: Arc::new(Lock::none(path)), fresh: false }
    }

    /// Lets others have it. A start that failed leaves no folder behind that looks like a shard's.
    pub(crate) fn release(&self) {
        self.lock.release(|| {
            if self.fresh && self.names().is_ok_and(|names| names == [LOCK]) {
                let removed = std::fs::remove_file(self.path.join(LOCK));
                let _ = removed.and_then(|()| std::fs::remove_dir(&self.path));
            }
        });
    }

    /// What says whether this process still has the directory.
    pub(crate) fn lock(&self) -> &Arc<Lock> {
        &self.lock
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn names(&self) -> Result<Vec<String>> {
        list(&self.path)
    }

    pub(crate) fn segment(&self, number: u64) -> PathBuf {
        self.path.join(format!("{SEGMENT}{number:08}"))
    }

    pub(crate) fn unfinished_segment(&self, number: u64) -> PathBuf {
        self.path.join(format!("{SEGMENT}{number:08}{UNFINISHED}"))
    }

    /// The numbers of the segments that are here, ascending.
    pub(crate) fn segments(&self) -> Result<Vec<u64>> {
        Ok(numbered(&self.names()?, SEGMENT))
    }

    pub(crate) fn generation(&self, number: u64) -> PathBuf {
        generation_in(&self.path, number)
    }

    pub(crate) fn unfinished(&self, number: u64) -> PathBuf {
        self.path.join(format!("{GENERATION}{number:08}{UNFINISHED}"))
    }

    /// The numbers of the generations that are here, ascending.
    pub(crate) fn generations(&self) -> Result<Vec<u64>> {
        generations_in(&self.path)
    }

    /// Removes a generation; one that is removed in part has not its name any more.
    pub(crate) fn discard(&self, number: u64) -> Result<()> {
        let to = self.unfinished(number);
        self.rename(&self.generation(number), &to)?;
        reach("snapshot_delete");
        remove(&to)
    }

    /// Removes a segment, in the same way.
    pub(crate) fn discard_segment(&self, number: u64) -> Result<()> {
        let to = self.unfinished_segment(number);
        self.rename(&self.segment(number), &to)?;
        reach("segment_delete");
        shrink(&to);
        remove(&to)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        std::fs::rename(from, to).map_err(|error| failed("rename", from, &error))?;
        sync_directory(&self.path)
    }

    /// Puts a generation out of the way, and keeps it.
    pub(crate) fn set_aside(&self, number: u64) -> Result<PathBuf> {
        self.set_aside_as(&self.generation(number), &format!("{number:08}"))
    }

    /// The same with a segment.
    pub(crate) fn set_segment_aside(&self, number: u64) -> Result<PathBuf> {
        self.set_aside_as(&self.segment(number), &format!("{SEGMENT}{number:08}"))
    }

    fn set_aside_as(&self, from: &Path, name: &str) -> Result<PathBuf> {
        let (mut k, mut to) = (0, self.path.join(format!("{DAMAGED}{name}")));
        while to.exists() {
            k += 1;
            to = self.path.join(format!("{DAMAGED}{name}.{k}"));
        }
        self.rename(from, &to)?;
        Ok(to)
    }
}

/// The directory of a shard in a data directory.
pub fn shard_folder(data_dir: &Path, shard: u32) -> PathBuf {
    data_dir.join(format!("{SHARD}{shard}"))
}

/// The shards that a data directory has folders of, ascending.
pub(crate) fn shards_in(data_dir: &Path) -> Result<Vec<u32>> {
    let is_shard = |shard: &u64| shard_folder(data_dir, *shard as u32).is_dir();
    let shards = numbered(&list(data_dir)?, SHARD).into_iter().filter(is_shard);
    let shards: Vec<_> = shards.filter_map(|shard| u32::try_from(shard).ok()).collect();
    if shards.is_empty() {
        let message = format!("{} has no shard-0, shard-1, ... in it", data_dir.display());
        return Err(Error::new(Kind::Config, message)
            .expected("what a server is told by --data-dir", data_dir.display()));
    }
    Ok(shards)
}

/// Where a generation lies in a shard's directory.
pub(crate) fn generation_in(path: &Path, number: u64) -> PathBuf {
    path.join(format!("{GENERATION}{number:08}"))
}

/// The numbers of the generations in a shard's directory, ascending.
pub(crate) fn generations_in(path: &Path) -> Result<Vec<u64>> {
    Ok(numbered(&list(path)?, GENERATION))
}

fn list(path: &Path) -> Result<Vec<String>> {
    let fail = |error: std::io::Error| failed("read", path, &error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(fail)? {
        // No name of ours is anything but ASCII.
        names.extend(entry.map_err(fail)?.file_name().into_string().ok());
    }
    Ok(names)
}

fn numbered(names: &[String], prefix: &str) -> Vec<u64> {
    let number = |name: &String| {
        let digits = name.strip_prefix(prefix)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
    };
    // There is always a next one.
    let mut numbers: Vec<u64> = names.iter().filter_map(number).filter(|number| *number < 1 << 62).collect();
    numbers.sort_unstable();
    numbers
}

/// A segment that is not removed part by part while this is open; one that somebody else has locked is an error.
pub(crate) fn open_segment(path: &Path) -> std::io::Result<File> {
    let file = File::open(path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(std::io::Error::new(
            ErrorKind::ResourceBusy,
            "it is being removed, or another program has locked it",
        )),
        // A file system without locks: there nothing is shrunk.
        _ => Ok(file),
    }
}

/// Frees most of a segment that is to be removed, unless it is read, or has another name: a system that frees all at once may keep
/// syncs of others waiting meanwhile, as the log's. Not for snapshots, which anybody may have mapped.
fn shrink(path: &Path) {
    let Ok(file) = OpenOptions::new().write(true).open(path) else { return };
    let Ok(found) = file.metadata() else { return };
    if found.nlink() > 1 || rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return;
    }
    let mut left = found.len();
    while left > STEP {
        left -= STEP;
        let began = Instant::now();
        if file.set_len(left).is_err() {
            return;
        }
        std::thread::sleep(PAUSE * began.elapsed());
    }
}

/// Removes a file or a folder; one that is not there is no error.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", path, &error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_folder_that_got_nothing_goes_with_whoever_made_it() {
        let path = std::env::temp_dir().join(format!("fastps-fresh-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        drop(Directory::open(&path).unwrap());
        assert!(!path.exists());
        std::fs::create_dir(&path).unwrap();
        drop(Directory::open(&path).unwrap());
        assert!(path.exists());
        std::fs::remove_dir_all(&path).unwrap();
        let directory = Directory::open(&path).unwrap();
        std::fs::write(path.join("log-1"), "a change").unwrap();
        drop(directory);
        assert!(path.join("log-1").exists());
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn a_segment_is_removed_and_whoever_has_it_keeps_it() {
        let path = std::env::temp_dir().join(format!("fastps-directory-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let directory = Directory::open(&path).unwrap();
        let bytes: Vec<u8> = (0..3 * STEP).map(|at| at as u8).collect();
        for number in 1..4 {
            std::fs::write(directory.segment(number), &bytes).unwrap();
        }
        let mut kept = open_segment(&directory.segment(1)).unwrap();
        let other = path.join("other");
        std::fs::hard_link(directory.segment(2), &other).unwrap();
        let late = File::open(directory.segment(3)).unwrap();
        for number in 1..4 {
            directory.discard_segment(number).unwrap();
        }
        assert_eq!(directory.segments().unwrap(), [0; 0]);
        let mut read = Vec::new();
        kept.read_to_end(&mut read).unwrap();
        assert!(read == bytes && std::fs::read(other).unwrap() == bytes);
        assert_eq!(late.metadata().unwrap().len(), STEP);
        drop(directory);
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_segment_that_is_being_removed_is_not_opened() {
        let path = std::env::temp_dir().join(format!("fastps-shrunk-{}", std::process::id()));
        std::fs::write(&path, b"something").unwrap();
        let removing = File::open(&path).unwrap();
        rustix::fs::flock(&removing, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert_eq!(open_segment(&path).unwrap_err().kind(), ErrorKind::ResourceBusy);
        drop(removing);
        open_segment(&path).unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
