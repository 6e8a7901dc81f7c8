//! The directory of one shard. Files appear in it and disappear from it as a whole, by rename.

use crate::files::io::{failed, sync_directory};
use crate::files::lock::{LOCK_FILE, Lock};
use crate::files::names::{
    DAMAGED_PREFIX, GENERATION_PREFIX, SEGMENT_PREFIX, UNFINISHED_SUFFIX, generation_in, generations_in,
    list, numbered,
};
use crate::files::removal::{remove, shrink};
use fastps_core::error::Result;
use fastps_core::failpoint::reach;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The directory of one shard, locked by this process unless [`Directory::unlocked`] opened it.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    lock: Arc<Lock>,
    /// Set if [`Directory::open`] created it.
    fresh: bool,
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.release();
    }
}

impl Directory {
    /// Creates the directory if needed, takes its lock and removes unfinished files.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // Model parameters are private to their owner.
        let fresh = !path.exists();
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|error| failed("create", path, &error))?;
        let lock = Arc::new(Lock::take(path)?);
        let directory = Self { path: path.to_owned(), lock, fresh };
        for unfinished in directory.names()?.iter().filter(|name| name.ends_with(UNFINISHED_SUFFIX)) {
            remove(&directory.path.join(unfinished))?;
        }
        Ok(directory)
    }

    /// Takes the lock of an existing directory and changes nothing in it.
    pub(crate) fn lock_existing(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), lock: Arc::new(Lock::take_existing(path)?), fresh: false })
    }

    /// Opens a directory without its lock: a server may be using it.
    pub(crate) fn unlocked(path: &Path) -> Self {
        Self { path: path.to_owned(), lock: Arc::new(Lock::unlocked(path)), fresh: false }
    }

    /// Releases the lock. Removes the directory if this process created it and left it empty.
    pub(crate) fn release(&self) {
        self.lock.release(|| {
            if self.fresh && self.names().is_ok_and(|names| names == [LOCK_FILE]) {
                let removed = std::fs::remove_file(self.path.join(LOCK_FILE));
                let _ = removed.and_then(|()| std::fs::remove_dir(&self.path));
            }
        });
    }

    /// The lock, which tells whether this process still owns the directory.
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
        self.path.join(format!("{SEGMENT_PREFIX}{number:08}"))
    }

    pub(crate) fn unfinished_segment(&self, number: u64) -> PathBuf {
        self.path.join(format!("{SEGMENT_PREFIX}{number:08}{UNFINISHED_SUFFIX}"))
    }

    /// The numbers of the segments in the directory, ascending.
    pub(crate) fn segments(&self) -> Result<Vec<u64>> {
        Ok(numbered(&self.names()?, SEGMENT_PREFIX))
    }

    pub(crate) fn generation(&self, number: u64) -> PathBuf {
        generation_in(&self.path, number)
    }

    pub(crate) fn unfinished(&self, number: u64) -> PathBuf {
        self.path.join(format!("{GENERATION_PREFIX}{number:08}{UNFINISHED_SUFFIX}"))
    }

    /// The numbers of the snapshots in the directory, ascending.
    pub(crate) fn generations(&self) -> Result<Vec<u64>> {
        generations_in(&self.path)
    }

    /// Removes a snapshot. It is renamed first, so a partly removed snapshot is never loaded.
    pub(crate) fn discard(&self, number: u64) -> Result<()> {
        let to = self.unfinished(number);
        self.rename(&self.generation(number), &to)?;
        reach("snapshot_delete");
        remove(&to)
    }

    /// Removes a segment in the same way.
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

    /// Renames a snapshot that cannot be used, and keeps it.
    pub(crate) fn set_aside(&self, number: u64) -> Result<PathBuf> {
        self.set_aside_as(&self.generation(number), &format!("{number:08}"))
    }

    /// Renames a segment that must not be used, and keeps it.
    pub(crate) fn set_segment_aside(&self, number: u64) -> Result<PathBuf> {
        self.set_aside_as(&self.segment(number), &format!("{SEGMENT_PREFIX}{number:08}"))
    }

    fn set_aside_as(&self, from: &Path, name: &str) -> Result<PathBuf> {
        let (mut k, mut to) = (0, self.path.join(format!("{DAMAGED_PREFIX}{name}")));
        while to.exists() {
            k += 1;
            to = self.path.join(format!("{DAMAGED_PREFIX}{name}.{k}"));
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
    fn an_empty_folder_is_removed_by_its_creator() {
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
