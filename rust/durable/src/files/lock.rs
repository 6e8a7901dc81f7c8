//! The lock of a shard's folder. It lies on a file in the folder: once the folder is removed and made again, the lock holds
//! nothing, and must be taken again before anything is written there.

use crate::files::io::failed;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The file that its owner has locked.
pub(crate) const LOCK: &str = "lock";

/// The lock of a folder, while this process has it.
#[derive(Debug)]
pub(crate) struct Lock {
    folder: PathBuf,
    held: Mutex<Option<Held>>,
}

/// A locked file; the system lets go of it when the process ends, however it does.
#[derive(Debug)]
struct Held {
    _file: File,
    inode: (u64, u64),
}

impl Lock {
    /// Locks a folder that is there.
    pub(crate) fn take(folder: &Path) -> Result<Self> {
        let held = Held::take(folder)?;
        Ok(Self { folder: folder.to_owned(), held: Mutex::new(Some(held)) })
    }

    /// The same, changing nothing. A copy of a folder may lack the lock's file; then no other process has it.
    pub(crate) fn look(folder: &Path) -> Result<Self> {
        let name = folder.join(LOCK);
        let held = match File::open(&name) {
            Ok(file) => Some(Held::lock(file, folder)?),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(failed("lock", &name, &error)),
        };
        Ok(Self { folder: folder.to_owned(), held: Mutex::new(held) })
    }

    /// Of a folder that a server may be using.
    pub(crate) fn none(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), held: Mutex::default() }
    }

    fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails where the locked file is no longer the one in the folder: another process may have locked that one.
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

    /// Takes the lock again where the folder has been removed and made again. `check` looks for a reason not to, with the
    /// lock and before.
    pub(crate) fn retake(&self, check: impl Fn() -> Result<()>) -> Result<()> {
        if !self.folder.is_dir() {
            let message = format!("{} was removed, and is to be made again", self.folder.display());
            return Err(Error::new(Kind::Unavailable, message));
        }
        check()?;
        if self.check().is_ok() {
            return Ok(());
        }
        let held = Held::take(&self.folder)?;
        check()?;
        *self.held() = Some(held);
        Ok(())
    }

    /// Lets others have the folder. `last` is called before, if the locked file is still there.
    pub(crate) fn release(&self, last: impl FnOnce()) {
        let mut held = self.held();
        if held.as_ref().is_some_and(|held| held.is_in(&self.folder).unwrap_or(false)) {
            last();
        }
        *held = None;
    }
}

impl Held {
    fn take(folder: &Path) -> Result<Self> {
        let name = folder.join(LOCK);
        let fail = |error: &io::Error| failed("lock", &name, error);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&name).map_err(|error| fail(&error))?;
        let mut note = file.try_clone().map_err(|error| fail(&error))?;
        let held = Self::lock(file, folder)?;
        if !held.is_in(folder).map_err(|error| fail(&error))? {
            return Err(Error::new(Kind::Unavailable, format!("{} was being removed", folder.display())));
        }
        // For people; the lock itself is the system's.
        let noted = note.set_len(0).and_then(|()| writeln!(note, "{}", std::process::id()));
        noted.map_err(|error| fail(&error))?;
        Ok(held)
    }

    fn lock(mut file: File, folder: &Path) -> Result<Self> {
        let fail = |error: &io::Error| failed("lock", &folder.join(LOCK), error);
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
        match std::fs::metadata(folder.join(LOCK)) {
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
    fn a_lock_is_missed_when_its_folder_goes_and_taken_again_when_it_comes_back() {
        let path = folder("again");
        let lock = Lock::take(&path).unwrap();
        lock.check().unwrap();
        std::fs::remove_dir_all(&path).unwrap();
        assert!(lock.check().unwrap_err().to_string().contains("was removed"));
        // It is not this lock's to make the folder: it may lie on a disk that is not mounted.
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
    fn a_folder_that_another_process_has_taken_is_left_alone() {
        let path = folder("taken");
        let first = Lock::take(&path).unwrap();
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let second = Lock::take(&path).unwrap();
        let error = first.retake(|| Ok(())).unwrap_err();
        assert!(error.kind == Kind::Config && error.message.contains("another server"), "{error}");
        // A server that leaves removes nothing that belongs to another.
        first.release(|| panic!("the lock there is another's"));
        second.check().unwrap();
        drop(second);
        // Nor does a lock that finds a reason not to be taken keep others away.
        let refuse = || Err(Error::new(Kind::Config, "another server's files are there"));
        assert!(first.retake(refuse).is_err());
        Lock::take(&path).unwrap();
        std::fs::remove_dir_all(&path).unwrap();
    }
}
