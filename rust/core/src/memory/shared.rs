//! The memory of a shared store, which several processes map and step in place. It is an unnamed file without
//! an owner: the system frees it when the last process that holds it exits, killed or not. It is sealed
//! against shrinking, so that no process can remove what another has mapped, and it grows before it is
//! mapped, so that a lack of memory fails the registration.
//!
//! The other processes belong to the same user and may write anything at any time. So no reference to plain
//! bytes is ever made: racing memory is accessed through atomics, for which every bit pattern is a valid
//! value, and everything else is copied out by a system call.
#![allow(unsafe_code)]

use super::cell::Line;
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::AtomicU64;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

const NAME: &str = "fastps-store";
/// Time between two attempts to take the registration lock.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// The memory, as an unnamed file.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    file: File,
}

impl SharedMemory {
    pub(crate) fn create() -> Result<Self> {
        let file = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|error| failed("cannot make shared memory", error.into()))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)
            .map_err(|error| failed("cannot seal shared memory", error.into()))?;
        Ok(Self { file: file.into() })
    }

    /// Opens descriptor `fd` of process `pid`; the system allows that to the same user.
    pub(crate) fn open(pid: u32, fd: i32) -> Result<Self> {
        Self::open_path(Path::new(&format!("/proc/{pid}/fd/{fd}")))
    }

    fn open_path(path: &Path) -> Result<Self> {
        let gone = |error| failed("the shared store cannot be opened; is its process still there?", error);
        // Another process may have this number by now, or the descriptor may be another file.
        let target = std::fs::read_link(path).map_err(gone)?;
        let other = || Error::new(Kind::Unavailable, "this is not the memory of a shared store");
        if !target.to_string_lossy().starts_with(&format!("/memfd:{NAME}")) {
            return Err(other().expected("the memory of a store", target.display()));
        }
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open(path).map_err(gone)?;
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|_| other())?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(other().expected("sealed memory", "memory that may shrink"));
        }
        Ok(Self { file })
    }

    /// The descriptor's number in this process.
    pub(crate) fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Acquires the registration lock. The system releases it when a process dies.
    pub(crate) fn lock(&self, timeout: Duration) -> Result<File> {
        // The lock belongs to an open file description, so each call opens its own, in any thread or forked
        // child.
        let own = Self::open(std::process::id(), self.fd())?.file;
        let mut waited = Duration::ZERO;
        loop {
            match own.try_lock() {
                Ok(()) => return Ok(own),
                Err(TryLockError::WouldBlock) if waited < timeout => {
                    std::thread::sleep(LOCK_RETRY_INTERVAL);
                    waited += LOCK_RETRY_INTERVAL;
                }
                Err(TryLockError::WouldBlock) => {
                    let message = "another process is registering a tensor in the shared store";
                    return Err(Error::new(Kind::Deadline, message));
                }
                Err(TryLockError::Error(error)) => {
                    return Err(failed("the shared store cannot be locked", error));
                }
            }
        }
    }

    /// Allocates memory up to `end`.
    pub(crate) fn grow(&self, end: u64) -> Result<()> {
        let taken =
            rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, end));
        taken.map_err(|error| {
            Error::new(Kind::Capacity, format!("the system has no memory for the shared store: {error}"))
        })
    }

    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(bytes, at).map_err(|error| failed("the shared store cannot be read", error))
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, at).map_err(|error| failed("the shared store cannot be written", error))
    }

    /// Maps `len` bytes, which must exist, from a page boundary on. All their pages are present afterwards.
    pub(crate) fn map(&self, at: u64, len: usize) -> Result<Region> {
        let fail = |error| failed("the shared store cannot be mapped", error);
        let there = self.file.metadata().map_err(fail)?.len();
        if at.checked_add(len as u64).is_none_or(|end| end > there) {
            let bytes = format!("{at} + {len} bytes");
            return Err(
                Error::new(Kind::Internal, "a shared store with a broken list").expected(bytes, there)
            );
        }
        let raw = MmapOptions::new().offset(at).len(len).populate().map_raw(&self.file).map_err(fail)?;
        Ok(Region { raw })
    }
}

fn failed(what: &str, error: io::Error) -> Error {
    Error::new(Kind::Unavailable, format!("{what}: {error}"))
}

/// A mapped part of the memory.
#[derive(Debug)]
pub(crate) struct Region {
    raw: MmapRaw,
}

impl Region {
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.raw.as_ptr()
    }

    /// `count` lines of lanes from byte `at`.
    pub(super) fn lines(&self, at: usize, count: usize) -> &[Line] {
        self.check(at, count * size_of::<Line>(), align_of::<Line>());
        // SAFETY: inside the mapping, which `self` keeps alive; aligned; and initialised, as all memory of
        // the system is. Lines are atomics: other processes may change them at any time, and no code of this
        // crate makes a plain access to them.
        unsafe { std::slice::from_raw_parts(self.raw.as_ptr().add(at).cast(), count) }
    }

    /// `count` counters from byte `at`.
    pub(crate) fn counters(&self, at: usize, count: usize) -> &[AtomicU64] {
        self.check(at, count * size_of::<AtomicU64>(), align_of::<AtomicU64>());
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.raw.as_ptr().add(at).cast(), count) }
    }

    fn check(&self, at: usize, bytes: usize, align: usize) {
        let inside = at.checked_add(bytes).is_some_and(|end| end <= self.raw.len());
        assert!(inside && at.is_multiple_of(align), "a part outside its region");
    }
}
