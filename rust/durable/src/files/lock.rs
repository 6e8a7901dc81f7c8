//! The lock of a shard's directory, held on a file inside it. If the directory is removed and recreated, the
//! lock protects nothing: it must be retaken before anything is written there.

use crate::files::io::failed;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The locked file. It contains the process identifier of the owner.
pub(crate) const LOCK_FILE: &str = "lock";

/// The lock of a directory, as long as this process holds it.
#[derive(Debug)]
pub(crate) struct Lock {
    folder: PathBuf,
    held: Mutex<Option<LockedFile>>,
}

/// A locked file. The system releases the lock when the process ends.
#[derive(Debug)]
struct LockedFile {
    _file: File,
    inode: (u64, u64),
}

impl Lock {
    /// Locks an existing directory.
    pub(crate) fn take(folder: &Path) -> Result<Self> {
        let held = LockedFile::take(folder)?;
        Ok(Self { folder: folder.to_owned(), held: Mutex::new(Some(held)) })
    }

    /// Locks an existing directory without changing it. A copied directory may lack the lock file; then no
    /// other process can hold the lock.
    pub(crate) fn take_existing(folder: &Path) -> Result<Self> {
        let name = folder.join(LOCK_FILE);
        let held = match File::open(&name) {
            Ok(file) => Some(LockedFile::lock(file, folder)?),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(failed("lock", &name, &error)),
        };
        Ok(Self { folder: folder.to_owned(), held: Mutex::new(held) })
    }

    /// Holds no lock: a server may be using the directory.
    pub(crate) fn unlocked(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), held: Mutex::default() }
    }

    fn held(&self) -> MutexGuard<'_, Option<LockedFile>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Device and inode of the locked file.
    pub(crate) fn inode(&self) -> Option<(u64, u64)> {
        self.held().as_ref().map(|held| held.inode)
    }

    /// Fails if the locked file is no longer the one in the directory: another process may hold that one.
    pub(crate) fn check(&self) -> io::Result<()> {
        if fault("lock_not_retaken") {
            return Ok(());
        }
        match &*self.held() {
            None => Ok(()),
            Some(held) if held.is_in(&self.folder)? => Ok(()),
            Some(_) => Err(io::Error::new(
                ErrorKind::NotFound,
                format!("{} was removed or replaced", self.folder.display()),
            )),
        }
    }

    /// Takes the lock again if the directory was removed and recreated. `check` is called before and after
    /// the lock is taken, and may refuse.
    pub(crate) fn retake(&self, check: impl Fn() -> Result<()>) -> Result<()> {
        if !self.folder.is_dir() {
            let message = format!("{} was removed: create it again", self.folder.display());
            return Err(Error::new(Kind::Unavailable, message));
        }
        check()?;
        if self.check().is_ok() {
            return Ok(());
        }
        let held = LockedFile::take(&self.folder)?;
        check()?;
        *self.held() = Some(held);
        Ok(())
    }

    /// Releases the lock. `last` is called first if the locked file is still in the directory.
    pub(crate) fn release(&self, last: impl FnOnce()) {
        let mut held = self.held();
        if held.as_ref().is_some_and(|held| held.is_in(&self.folder).unwrap_or(false)) {
            last();
        }
        *held = None;
    }
}

impl LockedFile {
    fn take(folder: &Path) -> Result<Self> {
        let name = folder.join(LOCK_FILE);
        let fail = |error: &io::Error| failed("lock", &name, error);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&name).map_err(|error| fail(&error))?;
        let mut note = file.try_clone().map_err(|error| fail(&error))?;
        let held = Self::lock(file, folder)?;
        if !held.is_in(folder).map_err(|error| fail(&error))? {
            return Err(Error::new(Kind::Unavailable, format!("{} is being removed", folder.display())));
        }
        // For human readers: the lock itself is the system's.
        let noted = note.set_len(0).and_then(|()| writeln!(note, "{}", std::process::id()));
        match noted.map_err(|error| fail(&error)) {
            Err(error) if error.kind != Kind::Unavailable => Err(error),
            _ => Ok(held),
        }
    }

    fn lock(mut file: File, folder: &Path) -> Result<Self> {
        let fail = |error: &io::Error| failed("lock", &folder.join(LOCK_FILE), error);
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let found = file.metadata().map_err(|error| fail(&error))?;
                Ok(Self { _file: file, inode: (found.dev(), found.ino()) })
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut owner = String::new();
                let _ = (&mut file).take(32).read_to_string(&mut owner);
                let message = format!("another server (process {}) uses {}", owner.trim(), folder.display());
                Err(Error::new(Kind::Config, message))
            }
            Err(error) => Err(fail(&error.into())),
        }
    }

    fn is_in(&self, folder: &Path) -> io::Result<bool> {
        match std::fs::metadata(folder.join(LOCK_FILE)) {
            Ok(found) => Ok((found.dev(), found.ino()) == self.inode),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("fastps-lock-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        path
    }

    #[test]
    fn a_lock_is_lost_with_its_folder_and_retaken_when_the_folder_returns() {
        let path = folder("again");
        let lock = Lock::take(&path).unwrap();
        lock.check().unwrap();
        std::fs::remove_dir_all(&path).unwrap();
        assert!(lock.check().unwrap_err().to_string().contains("was removed"));
        // The lock never creates the directory: it may be the mount point of a disk that is not mounted.
        assert!(lock.retake(|| Ok(())).unwrap_err().message.contains("was removed"));
        std::fs::create_dir(&path).unwrap();
        assert!(lock.check().is_err());
        lock.retake(|| Ok(())).unwrap();
        lock.check().unwrap();
        let error = Lock::take(&path).unwrap_err();
        assert!(error.message.contains(&format!("process {}", std::process::id())), "{error}");
        drop(lock);
        Lock::take(&path).unwrap();
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn a_folder_locked_by_another_process_is_left_alone() {
        let path = folder("taken");
        let first = Lock::take(&path).unwrap();
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let second = Lock::take(&path).unwrap();
        let error = first.retake(|| Ok(())).unwrap_err();
        assert!(error.kind == Kind::Config && error.message.contains("another server"), "{error}");
        // A server that exits removes nothing that belongs to another.
        first.release(|| panic!("the lock there is another's"));
        second.check().unwrap();
        drop(second);
        // A lock that was refused by `check` does not keep others out.
        let refuse = || Err(Error::new(Kind::Config, "the files belong to another server"));
        assert!(first.retake(refuse).is_err());
        Lock::take(&path).unwrap();
        std::fs::remove_dir_all(&path).unwrap();
    }
}
