//! Memory whose values other processes may read in place: pieces of one length, each with the values of one
//! full slice. It consists of unnamed files of equal length, made as they are needed; pages are allocated on
//! first touch. A file whose last piece is returned is given back whole.
//!
//! Only this process writes to it, through mappings that it made before it sealed the file: the seal forbids
//! every later one, however the file is opened again, and any change of length. It also forbids punching
//! holes, so nothing smaller than a file is given back. Other processes get a read-only descriptor. They read
//! pieces that are pinned for them, and nothing here depends on what else they read.
//!
//! All files together are one range of offsets, of which each has its part. Behind its pieces a file has two
//! numbers of 64 bits for its readers: its first offset, and 1 once it is given back. Its memory returns to
//! the system when its readers have unmapped it, too.
#![allow(unsafe_code)]

use crate::base::sync::{Arc, AtomicU64, Mutex, Ordering, lock};
use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};

/// Bytes of a piece: a full slice and its buffer's overhead.
const PIECE: usize = 1 << 20;
/// Bytes of a file's pieces, unless that would make more than `MAX_FILES`, which take a descriptor each.
const FILE_BYTES: u64 = 64 << 20;
const MAX_FILES: u64 = 512;
/// Bytes behind the pieces of a file, for the two numbers.
pub const EXPOSED_TAIL_BYTES: usize = 4096;

/// Memory that is divided into pieces.
#[derive(Debug)]
pub struct Exposed {
    /// Pieces of each file.
    pieces: usize,
    table: Mutex<ExposedTable>,
}

#[derive(Debug, Default)]
struct ExposedTable {
    /// The files and their free pieces, by offset.
    files: Vec<(Arc<ExposedFile>, Vec<usize>)>,
    /// Offset of the next file.
    next: u64,
}

/// One file of the memory.
#[derive(Debug)]
pub struct ExposedFile {
    /// A read-only descriptor, for readers.
    readable: File,
    memory: MmapRaw,
    offset: u64,
    /// The owner. A forked child inherits the mapping, but must not give it back.
    process: u32,
}

impl Exposed {
    /// Memory for pieces of `bytes` in total, or of the machine's memory if that is less. Fails if the system
    /// cannot seal such memory, or if it could kill this process for touching a page that it cannot provide.
    pub fn new(bytes: u64) -> io::Result<Arc<Self>> {
        let file = (bytes.min(system::memory()) / MAX_FILES).next_power_of_two().max(FILE_BYTES);
        let (pieces, table) = (file as usize / PIECE, Mutex::new(ExposedTable::default()));
        ExposedFile::make(pieces, 0)?;
        Ok(Arc::new(Self { pieces, table }))
    }

    /// A piece for a buffer of `len` bytes, of the fullest file that has one, so that others empty.
    pub(super) fn take(self: &Arc<Self>, len: usize) -> Option<ExposedPiece> {
        if !(PIECE / 2..=PIECE).contains(&len) {
            return None;
        }
        let mut table = lock(&self.table);
        let with_room = table.files.iter_mut().filter(|(_, free)| !free.is_empty());
        let (file, index) = if let Some((file, free)) = with_room.min_by_key(|(_, free)| free.len()) {
            (file.clone(), free.pop()?)
        } else {
            let file = Arc::new(ExposedFile::make(self.pieces, table.next).ok()?);
            table.next += file.memory.len() as u64;
            table.files.push((file.clone(), (1..self.pieces).rev().collect()));
            (file, 0)
        };
        Some(ExposedPiece { from: self.clone(), file, index, len })
    }

    /// Returns a piece, and the file if it was the last one.
    fn give_back(&self, offset: u64, index: usize) {
        let mut table = lock(&self.table);
        let Ok(at) = table.files.binary_search_by_key(&offset, |(file, _)| file.offset) else { return };
        table.files[at].1.push(index);
        let gone = (table.files[at].1.len() == self.pieces).then(|| table.files.remove(at));
        drop(table);
        drop(gone);
    }
}

impl ExposedFile {
    fn make(pieces: usize, offset: u64) -> io::Result<Self> {
        let len = pieces * PIECE + EXPOSED_TAIL_BYTES;
        let file = system::make(len as u64)?;
        let memory = MmapOptions::new().len(len).map_raw(&file)?;
        system::advise(&memory, pieces * PIECE);
        system::seal(&file)?;
        let readable = system::readable(&file)?;
        let file = Self { readable, memory, offset, process: std::process::id() };
        file.tail()[0].store(offset, Ordering::Relaxed);
        Ok(file)
    }

    /// The file that a reader maps.
    pub fn readable(&self) -> &File {
        &self.readable
    }

    /// Offset of its first byte.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    #[allow(clippy::cast_ptr_alignment, reason = "the tail begins with a page")]
    fn tail(&self) -> &[AtomicU64; 2] {
        // SAFETY: the last bytes of the mapping, which lives as long as `self` and cannot shrink; aligned, and
        // initialised as all memory of the system is. Nothing else accesses them.
        unsafe { &*self.memory.as_ptr().add(self.memory.len() - EXPOSED_TAIL_BYTES).cast() }
    }
}

impl Drop for ExposedFile {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.tail()[1].store(1, Ordering::Relaxed);
        }
    }
}

/// A piece that one buffer owns.
#[derive(Debug)]
pub(super) struct ExposedPiece {
    pub(super) from: Arc<Exposed>,
    pub(super) file: Arc<ExposedFile>,
    index: usize,
    len: usize,
}

impl ExposedPiece {
    /// The offset of its first byte.
    pub(super) fn offset(&self) -> u64 {
        self.file.offset + (PIECE * self.index) as u64
    }
}

impl Deref for ExposedPiece {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `index` is below the number of the file's pieces and `len` is at most a piece, so this is
        // inside the mapping, which lives as long as `file` and cannot shrink. The system initialises all
        // memory. One piece at a time owns each index, and only this process writes, so nothing changes the
        // bytes while they are borrowed.
        unsafe { std::slice::from_raw_parts(self.file.memory.as_ptr().add(PIECE * self.index), self.len) }
    }
}

impl DerefMut for ExposedPiece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive. Other processes may map the bytes at the same time,
        // but they may read them only while a reader has the buffer pinned, and then no such borrow exists.
        unsafe {
            std::slice::from_raw_parts_mut(self.file.memory.as_mut_ptr().add(PIECE * self.index), self.len)
        }
    }
}

impl Drop for ExposedPiece {
    fn drop(&mut self) {
        self.from.give_back(self.file.offset, self.index);
    }
}

#[cfg(all(target_os = "linux", not(any(miri, loom))))]
mod system {
    use memmap2::{Advice, MmapRaw};
    use rustix::fs::{MemfdFlags, SealFlags};
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
        Ok(file.into())
    }

    /// Forbids new writable mappings, writing and changes of length. Linux before 5.1 cannot.
    pub(super) fn seal(file: &File) -> Result<()> {
        let all = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(file, all)
            .map_err(|error| Error::other(format!("memory cannot be sealed against writing: {error}")))
    }

    /// Asks for huge pages for the first `len` bytes, if the system supports them for such memory, and leaves
    /// it out of core dumps, which need not contain values that the process never touched.
    pub(super) fn advise(memory: &MmapRaw, len: usize) {
        let _ = memory.advise_range(Advice::HugePage, 0, len);
        let _ = memory.advise(Advice::DontDump);
    }

    pub(super) fn readable(file: &File) -> Result<File> {
        File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
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

    pub(super) fn seal(_file: &File) -> Result<()> {
        Err(ErrorKind::Unsupported.into())
    }

    pub(super) fn advise(_memory: &memmap2::MmapRaw, _len: usize) {}

    pub(super) fn readable(_file: &File) -> Result<File> {
        Err(ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
#[cfg(all(target_os = "linux", not(any(miri, loom))))]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    fn read(file: &File, at: usize) -> u8 {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at as u64).unwrap();
        byte[0]
    }

    #[test]
    fn a_reader_sees_what_is_written_and_can_write_nothing() {
        let memory = Exposed::new(4 << 20).unwrap();
        let (mut first, mut second) = (memory.take(PIECE).unwrap(), memory.take(PIECE).unwrap());
        assert_eq!((first.offset(), second.offset()), (0, PIECE as u64));
        (first[5], second[7]) = (17, 23);
        let readable = first.file.readable();
        assert_eq!((read(readable, 5), read(readable, PIECE + 7)), (17, 23));
        assert!(MmapOptions::new().len(PIECE).map_raw_read_only(readable).is_ok());
        // Opened again it is writable by its mode, but not by its seals.
        let again = format!("/proc/self/fd/{}", readable.as_raw_fd());
        for file in [readable.try_clone(), OpenOptions::new().read(true).write(true).open(again)] {
            let file = file.unwrap();
            assert!(file.write_at(&[1], 0).is_err());
            assert!(MmapOptions::new().len(PIECE).map_raw(&file).is_err());
            assert!(file.set_len(0).is_err() && file.set_len(1 << 30).is_err());
        }
        assert_eq!(first[5], 17);
    }

    #[test]
    fn a_file_is_given_back_with_its_last_piece() {
        let memory = Exposed::new(2 << 20).unwrap();
        let count = memory.pieces;
        let mut pieces: Vec<_> = (0..count + 2).map(|_| memory.take(PIECE - 64).unwrap()).collect();
        let kept = pieces.pop().unwrap();
        let readers = [&pieces[0], &kept].map(|piece| piece.file.readable().try_clone().unwrap());
        let tail = |file: &File| [0, 8].map(|at| read(file, count * PIECE + at));
        let gone = || readers.each_ref().map(|file| tail(file)[1]);
        assert_eq!(kept.offset(), (count * PIECE + EXPOSED_TAIL_BYTES + PIECE) as u64);
        // A free piece of the fullest file is used first.
        drop(pieces.remove(3));
        let mut again = memory.take(PIECE).unwrap();
        assert_eq!((again.offset(), gone()), (3 * PIECE as u64, [0, 0]));
        again[0] = 8;
        assert_eq!(read(&readers[0], 3 * PIECE), 8);
        pieces.clear();
        assert_eq!(gone(), [0, 0]);
        drop(again);
        assert_eq!(gone(), [1, 0]);
        assert_eq!(lock(&memory.table).files.len(), 1);
        drop(kept);
        assert_eq!(gone(), [1, 1]);
        assert_eq!(memory.take(PIECE).unwrap().offset(), 2 * (count * PIECE + EXPOSED_TAIL_BYTES) as u64);
    }

    #[test]
    fn other_lengths_get_none() {
        let memory = Exposed::new(1 << 20).unwrap();
        assert!(memory.take(PIECE + 1).is_none() && memory.take(PIECE / 4).is_none());
    }
}
