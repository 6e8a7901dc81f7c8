//! Memory whose values other processes may read in place: pieces of one length, each with the values of one
//! full slice. The memory is an unnamed file; the whole address range is reserved at once, and pages are
//! allocated on first touch.
//!
//! Only this process writes to it. Other processes get a read-only file descriptor, and the file is sealed
//! against shrinking. They read pieces that are pinned for them, and nothing here depends on what else they
//! read. A process of the same user that circumvents this and writes corrupts values, and nothing else.
#![allow(unsafe_code)]

use crate::base::sync::{Arc, Mutex, lock};
use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut, Range};

/// Bytes of a piece: a full slice and its buffer's overhead.
const PIECE: usize = 1 << 20;

/// Memory that is divided into pieces.
#[derive(Debug)]
pub struct Exposed {
    file: File,
    /// A read-only descriptor of the same file, for readers.
    readable: File,
    memory: MmapRaw,
    free: Mutex<Free>,
    /// The owner. A forked child inherits the mapping, but must not free any of it.
    process: u32,
}

#[derive(Debug)]
struct Free {
    /// Pieces that were used and returned.
    returned: Vec<usize>,
    /// Pieces that were never used.
    fresh: Range<usize>,
}

impl Exposed {
    /// Reserves addresses for pieces of `bytes` in total, or of the machine's memory if that is less. Fails
    /// if the system cannot share such memory, or if it could kill this process for touching a page that it
    /// cannot provide.
    pub fn new(bytes: u64) -> io::Result<Arc<Self>> {
        let count = (bytes.min(system::memory()) / PIECE as u64).max(1) as usize;
        let file = system::make((count * PIECE) as u64)?;
        let readable = system::readable(&file)?;
        let memory = MmapOptions::new().len(count * PIECE).map_raw(&file)?;
        system::advise(&memory);
        let free = Mutex::new(Free { returned: Vec::new(), fresh: 0..count });
        Ok(Arc::new(Self { file, readable, memory, free, process: std::process::id() }))
    }

    /// The file that a reader maps.
    pub fn readable(&self) -> &File {
        &self.readable
    }

    /// A piece for a buffer of `len` bytes. Spares, which are rarely touched, come from the far end.
    pub(super) fn take(self: &Arc<Self>, len: usize, spare: bool) -> Option<ExposedPiece> {
        if !(PIECE / 2..=PIECE).contains(&len) {
            return None;
        }
        let mut free = lock(&self.free);
        let index = match free.returned.pop() {
            Some(index) => index,
            None if spare => free.fresh.next_back()?,
            None => free.fresh.next()?,
        };
        Some(ExposedPiece { memory: self.clone(), index, len })
    }
}

/// A piece that one buffer owns.
#[derive(Debug)]
pub(super) struct ExposedPiece {
    pub(super) memory: Arc<Exposed>,
    index: usize,
    len: usize,
}

impl ExposedPiece {
    /// The offset of its first byte.
    pub(super) fn offset(&self) -> usize {
        PIECE * self.index
    }
}

impl Deref for ExposedPiece {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `index` is below the number of pieces and `len` is at most a piece, so this is inside the
        // mapping, which lives as long as `memory` and cannot shrink. The system initialises all memory. One
        // piece at a time owns each index, and only this process writes, so nothing changes the bytes while
        // they are borrowed.
        unsafe { std::slice::from_raw_parts(self.memory.memory.as_ptr().add(self.offset()), self.len) }
    }
}

impl DerefMut for ExposedPiece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive. Other processes may map the bytes at the same time,
        // but they may read them only while a reader has the buffer pinned, and then no such borrow exists.
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.memory.as_mut_ptr().add(self.offset()), self.len)
        }
    }
}

impl Drop for ExposedPiece {
    fn drop(&mut self) {
        if self.memory.process != std::process::id() {
            return;
        }
        // If this fails, the piece is reused with its present pages.
        let _ = system::free(&self.memory.file, self.offset() as u64, PIECE as u64);
        lock(&self.memory.free).returned.push(self.index);
    }
}

#[cfg(all(target_os = "linux", not(any(miri, loom))))]
mod system {
    use memmap2::{Advice, MmapRaw};
    use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
    use rustix::process::{Resource, getrlimit};
    use std::fs::File;
    use std::io::{Error, ErrorKind, Result};
    use std::os::fd::AsRawFd;

    pub(super) fn memory() -> u64 {
        let system = rustix::system::sysinfo();
        system.totalram.saturating_mul(system.mem_unit.into())
    }

    pub(super) fn make(bytes: u64) -> Result<File> {
        // Writing to a file beyond this limit would kill the process.
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < bytes) {
            return Err(Error::new(ErrorKind::FileTooLarge, "files of this process are limited (ulimit -f)"));
        }
        // Under strict overcommit, the system may refuse a page when it is touched.
        if std::fs::read_to_string("/proc/sys/vm/overcommit_memory")?.trim() == "2" {
            return Err(Error::new(ErrorKind::Unsupported, "the system commits memory strictly"));
        }
        let file =
            rustix::fs::memfd_create("fastps-values", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file.into())
    }

    /// Asks for huge pages, if the system supports them for such memory, and leaves it out of core dumps,
    /// which need not contain values that the process never touched.
    pub(super) fn advise(memory: &MmapRaw) {
        let _ = memory.advise(Advice::HugePage);
        let _ = memory.advise(Advice::DontDump);
    }

    pub(super) fn readable(file: &File) -> Result<File> {
        File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
    }

    pub(super) fn free(file: &File, offset: u64, len: u64) -> Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(file, hole, offset, len)?)
    }
}

#[cfg(not(all(target_os = "linux", not(any(miri, loom)))))]
mod system {
    use std::fs::File;
    use std::io::{ErrorKind, Result};

    pub(super) fn memory() -> u64 {
        u64::MAX
    }

    pub(super) fn make(_bytes: u64) -> Result<File> {
        Err(ErrorKind::Unsupported.into())
    }

    pub(super) fn advise(_memory: &memmap2::MmapRaw) {}

    pub(super) fn readable(_file: &File) -> Result<File> {
        Err(ErrorKind::Unsupported.into())
    }

    pub(super) fn free(_file: &File, _offset: u64, _len: u64) -> Result<()> {
        Err(ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
#[cfg(all(target_os = "linux", not(any(miri, loom))))]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn read(memory: &Exposed, at: usize) -> u8 {
        let mut byte = [0];
        memory.readable().read_exact_at(&mut byte, at as u64).unwrap();
        byte[0]
    }

    #[test]
    fn a_reader_sees_what_is_written_and_can_write_nothing() {
        let memory = Exposed::new(4 << 20).unwrap();
        let (mut first, mut spare) = (memory.take(PIECE, false).unwrap(), memory.take(PIECE, true).unwrap());
        assert_eq!((first.offset(), spare.offset()), (0, 3 * PIECE));
        (first[5], spare[7]) = (17, 23);
        assert_eq!((read(&memory, 5), read(&memory, 3 * PIECE + 7)), (17, 23));
        let readable = memory.readable();
        assert!(readable.write_at(&[1], 0).is_err());
        assert!(MmapOptions::new().len(PIECE).map_raw(readable).is_err());
        assert!(MmapOptions::new().len(PIECE).map_raw_read_only(readable).is_ok());
        assert!(memory.file.set_len(0).is_err() && memory.file.set_len(8 << 20).is_err());
    }

    #[test]
    fn pieces_are_freed_and_used_again() {
        let memory = Exposed::new(2 << 20).unwrap();
        let mut both: Vec<_> = (0..2).map(|_| memory.take(PIECE - 64, false).unwrap()).collect();
        assert_eq!(both[1].len(), PIECE - 64);
        assert!(memory.take(PIECE, false).is_none() && memory.take(PIECE, true).is_none());
        both[1][0] = 9;
        both.pop();
        assert_eq!(read(&memory, PIECE), 0, "its pages are free");
        let mut again = memory.take(PIECE, false).unwrap();
        assert_eq!(again.offset(), PIECE);
        again[0] = 8;
        assert_eq!(read(&memory, PIECE), 8);
    }

    #[test]
    fn other_lengths_get_none() {
        let memory = Exposed::new(1 << 20).unwrap();
        assert!(memory.take(PIECE + 1, false).is_none() && memory.take(PIECE / 4, false).is_none());
    }
}
