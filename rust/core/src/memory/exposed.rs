//! Memory of values that other processes may read where they lie: pieces of one length, each the values of
//! one whole slice. It has no name, all of its addresses are taken at once, and its pages as they are
//! touched.
//!
//! This process alone writes it. The others get an opening of it that cannot be written, and it is sealed
//! against shrinking; they read pieces that are pinned for them, and nothing here depends on what else they
//! look at. A process of the same user that goes out of its way to write there garbles values, and nothing
//! else.
#![allow(unsafe_code)]

use crate::base::sync::{Arc, Mutex, lock};
use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut, Range};

/// Bytes of a piece: a whole slice with what its buffer takes beside the values.
const PIECE: usize = 1 << 20;

/// Memory of pieces.
#[derive(Debug)]
pub struct Exposed {
    file: File,
    /// The same for those who may read.
    readable: File,
    memory: MmapRaw,
    free: Mutex<Free>,
    /// A forked child has the mapping, too, and must free nothing of it.
    process: u32,
}

#[derive(Debug)]
struct Free {
    /// Pieces that were used and given back.
    returned: Vec<usize>,
    /// Pieces that never were.
    fresh: Range<usize>,
}

impl Exposed {
    /// Addresses for pieces of `bytes` in all, or of what the machine has if that is less. Fails where the
    /// system cannot pass such memory on, and where it would end this process for touching a page that it
    /// does not have.
    pub fn new(bytes: u64) -> io::Result<Arc<Self>> {
        let count = (bytes.min(system::memory()) / PIECE as u64).max(1) as usize;
        let file = system::make((count * PIECE) as u64)?;
        let readable = system::readable(&file)?;
        let memory = MmapOptions::new().len(count * PIECE).map_raw(&file)?;
        system::advise(&memory);
        let free = Mutex::new(Free { returned: Vec::new(), fresh: 0..count });
        Ok(Arc::new(Self { file, readable, memory, free, process: std::process::id() }))
    }

    /// What a reader maps.
    pub fn readable(&self) -> &File {
        &self.readable
    }

    /// A piece for a buffer of `len` bytes. Spares, which are seldom touched, come from the other end.
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

/// A piece that one buffer has.
#[derive(Debug)]
pub(super) struct ExposedPiece {
    pub(super) memory: Arc<Exposed>,
    index: usize,
    len: usize,
}

impl ExposedPiece {
    /// Where it begins.
    pub(super) fn offset(&self) -> usize {
        PIECE * self.index
    }
}

impl Deref for ExposedPiece {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `index` is below the count of pieces and `len` at most a piece, so this is inside the
        // mapping, which lives as long as `memory` and cannot shrink. All memory of the system is
        // initialised. Each index is had by one piece at a time, and nobody but this process writes, so
        // nobody changes it while it is borrowed.
        unsafe { std::slice::from_raw_parts(self.memory.memory.as_ptr().add(self.offset()), self.len) }
    }
}

impl DerefMut for ExposedPiece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed alone. Other processes may look at the bytes meanwhile; they are
        // told to only while somebody has the buffer pinned, when there is no such borrow.
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
        // Where that fails, the pages are used again as they are.
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
        // A file beyond the limit would end the process.
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < bytes) {
            return Err(Error::new(ErrorKind::FileTooLarge, "files of this process are limited (ulimit -f)"));
        }
        // Where the system promises no more than it has, a page may be refused when it is touched.
        if std::fs::read_to_string("/proc/sys/vm/overcommit_memory")?.trim() == "2" {
            return Err(Error::new(ErrorKind::Unsupported, "the system commits memory strictly"));
        }
        let file =
            rustix::fs::memfd_create("fastps-values", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file.into())
    }

    /// Huge pages, if the system gives such memory any; and a dump of the process need not have values that
    /// it has not touched.
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
