//! The directory of one shard: the names in it, and what is removed whole or not at all.

use crate::files::io::{failed, sync_directory};
use crate::files::lock::{LOCK, Lock};
use crate::files::names::{
    DAMAGED, GENERATION, SEGMENT, UNFINISHED, generation_in, generations_in, list, numbered,
};
use crate::files::removal::{remove, shrink};
use fastps_core::error::Result;
use fastps_core::failpoint::reach;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

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
}
