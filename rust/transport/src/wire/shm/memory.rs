//! Sealed memory that two processes share, and the only code that touches it.
//!
//! The other process may write anything at any time. So no reference to a ring's bytes is ever made: they
//! are copied in and out, each read once, and checked in the copy. The counters are atomics, checked by
//! `ring`. Lent values are read in place: a process that writes to them meanwhile garbles numbers, and
//! nothing is decided by them.
#![allow(unsafe_code)]

use super::sync::{AtomicU32, AtomicU64, Ordering};
use fastps_core::shard::EXPOSED_TAIL_BYTES;
use memmap2::{MmapOptions, MmapRaw};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::copy_nonoverlapping;
use std::sync::Arc;
use tokio::io::ReadBuf;

/// Bytes of one direction's ring: both, and the memory copied to and from them, fit a cache.
const RING_BYTES: usize = 1 << 20;
/// The same until a message of more than half of it: much more than a step of small tensors, and little beside
/// what a connection takes anyway.
const FIRST_RING_BYTES: usize = 64 << 10;
/// The largest ring that a client maps.
const MAX_RING_BYTES: usize = 64 << 20;
/// Bytes of the counters of both rings, before the rings.
const CONTROL_BYTES: usize = 4096;
/// Memory of the rings of one connection whose client lets them grow, until they do.
pub const FIRST_SHARED_BYTES: u64 = (CONTROL_BYTES + 2 * FIRST_RING_BYTES) as u64;
/// Memory of larger rings, beside that of the first.
pub const LARGER_SHARED_BYTES: u64 = 2 * RING_BYTES as u64;
/// Memory of the rings of a connection whose client does not let them grow.
pub const SHARED_BYTES: u64 = (CONTROL_BYTES + 2 * RING_BYTES) as u64;

/// A separate cache line, with the next one, which CPUs fetch with it.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Line<T>(T);

impl<T> std::ops::Deref for Line<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// Counters that the two ends of a ring share; see `ring`. All zero at first.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Control {
    /// Bytes written so far, by the writer, and read so far, by the reader.
    pub(super) written: Line<AtomicU64>,
    pub(super) read: Line<AtomicU64>,
    /// 1 while that end sleeps.
    pub(super) reader_sleeps: Line<AtomicU32>,
    pub(super) writer_sleeps: Line<AtomicU32>,
}

/// What the two ends of a ring share for its move to larger memory; see `ring`. All zero at first.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Growth {
    /// Bytes written before the move, and 1 more; 0: the ring has not moved.
    pub(super) moved: Line<AtomicU64>,
    /// 1 once the writer has had more to write than half the ring.
    pub(super) is_wanted: Line<AtomicU32>,
}

/// Most values lent at a time. A counter for each follows those of the rings.
pub const MAX_BORROWED_PAGES: usize = 4;
/// Where what concerns the growth of the rings begins, behind the counters.
const GROWTH_AT: usize = 2 * size_of::<Control>() + MAX_BORROWED_PAGES * size_of::<Line<AtomicU32>>();
const _: () = assert!(GROWTH_AT + 2 * size_of::<Growth>() <= CONTROL_BYTES);

/// One direction's ring.
#[derive(Clone, Debug)]
pub(super) struct Half {
    /// The counters.
    control: Arc<MmapRaw>,
    /// The bytes, after the counters or in memory of their own.
    memory: Arc<MmapRaw>,
    /// Where the two rings begin.
    first: usize,
    /// Index of the ring, 0 or 1.
    index: usize,
    /// Size in bytes, a power of two.
    size: usize,
}

/// New memory for two rings, which grow later or not.
pub(super) fn make(grows: bool) -> Result<OwnedFd> {
    new(if grows { FIRST_SHARED_BYTES } else { SHARED_BYTES })
}

/// New memory that two rings move to.
pub(super) fn make_larger() -> Result<OwnedFd> {
    new(LARGER_SHARED_BYTES)
}

#[cfg(target_os = "linux")]
fn new(bytes: u64) -> Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let memory = memfd_create(c"fastps", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, bytes)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

#[cfg(target_os = "linux")]
fn is_sealed(memory: &OwnedFd) -> Result<bool> {
    use rustix::fs::{SealFlags, fcntl_get_seals};
    Ok(fcntl_get_seals(memory)?.contains(SealFlags::SHRINK))
}

#[cfg(not(target_os = "linux"))]
fn new(_: u64) -> Result<OwnedFd> {
    Err(Error::new(ErrorKind::Unsupported, "this system has no sealed memory"))
}

#[cfg(not(target_os = "linux"))]
fn is_sealed(_: &OwnedFd) -> Result<bool> {
    Ok(false)
}

/// Maps both rings: the one from client to server, and the other.
pub(super) fn map(memory: OwnedFd) -> Result<[Half; 2]> {
    let (memory, size) = map_rings(memory, CONTROL_BYTES)?;
    let first = CONTROL_BYTES;
    Ok([0, 1].map(|index| Half { control: memory.clone(), memory: memory.clone(), first, index, size }))
}

/// Maps larger memory for these rings.
pub(super) fn map_larger(memory: OwnedFd, rings: [&Half; 2]) -> Result<[Half; 2]> {
    let (memory, size) = map_rings(memory, 0)?;
    if size < rings[0].size.max(rings[1].size) || size > RING_BYTES {
        return Err(Error::new(ErrorKind::InvalidData, "this is no memory that rings move to"));
    }
    Ok(rings.map(|ring| Half { memory: memory.clone(), first: 0, size, ..ring.clone() }))
}

/// Maps memory with two rings behind so many other bytes; also returns the size of one.
fn map_rings(memory: OwnedFd, first: usize) -> Result<(Arc<MmapRaw>, usize)> {
    let bytes = rustix::fs::fstat(memory.as_fd())?.st_size as usize;
    let size = bytes.saturating_sub(first) / 2;
    if !is_sealed(&memory)? || !size.is_power_of_two() || size > MAX_RING_BYTES || bytes != first + 2 * size {
        return Err(Error::new(ErrorKind::InvalidData, "this is no memory of two rings"));
    }
    Ok((Arc::new(MmapOptions::new().len(bytes).map_raw(memory.as_raw_fd())?), size))
}

/// A file with values of a server, which this process reads in the server's memory.
#[derive(Debug)]
pub(super) struct Values(MmapRaw);

impl Values {
    pub(super) fn map(memory: &OwnedFd) -> Result<Self> {
        let bytes = rustix::fs::fstat(memory.as_fd())?.st_size as usize;
        if bytes < EXPOSED_TAIL_BYTES || !bytes.is_multiple_of(EXPOSED_TAIL_BYTES) || !is_sealed(memory)? {
            return Err(Error::new(ErrorKind::InvalidData, "values in memory that may shrink"));
        }
        let values = MmapOptions::new().len(bytes).map_raw_read_only(memory.as_raw_fd())?;
        // A dump of this process need not contain pages that it never read.
        #[cfg(target_os = "linux")]
        let _ = values.advise(memmap2::Advice::DontDump);
        Ok(Self(values))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len() - EXPOSED_TAIL_BYTES
    }

    #[allow(clippy::cast_ptr_alignment, reason = "the tail begins with a page")]
    fn tail(&self) -> &[AtomicU64; 2] {
        // SAFETY: the last bytes of the mapping, at a multiple of a page; it lives as long as `self`, cannot
        // shrink, and is initialised. The server changes them with atomic stores alone, and nobody else can.
        unsafe { &*self.0.as_ptr().add(self.len()).cast() }
    }

    /// Offset of the first byte in the server's memory.
    pub(super) fn offset(&self) -> u64 {
        self.tail()[0].load(Ordering::Relaxed)
    }

    /// Returns whether the server has given the file back.
    pub(super) fn is_gone(&self) -> bool {
        self.tail()[1].load(Ordering::Relaxed) != 0
    }

    /// Values that the server has lent.
    pub(super) fn bytes(&self, at: usize, len: usize) -> &[u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len()), "values outside their memory");
        // SAFETY: inside the mapping, which lives as long as `self`, cannot shrink, and is initialised as all
        // memory of the system is. The server changes nothing there until it has it back, or until this end's
        // socket is closed, which a reader keeps open. One of the same user that does all the same
        // garbles the values that it sent, as any writer to a mapped file does.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().add(at), len) }
    }
}

impl Half {
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Size in bytes after the ring has moved to larger memory; `None`: it does not.
    pub(super) fn larger_size(&self) -> Option<usize> {
        (self.size < RING_BYTES).then_some(RING_BYTES)
    }

    #[allow(clippy::cast_ptr_alignment, reason = "a mapping begins with a page")]
    pub(super) fn growth(&self) -> &Growth {
        // SAFETY: as in `control`: the two fit behind the counters, which end at a multiple of their alignment.
        unsafe { &*self.control.as_ptr().add(GROWTH_AT).cast::<Growth>().add(self.index) }
    }

    #[allow(clippy::cast_ptr_alignment, reason = "a mapping begins with a page")]
    pub(super) fn control(&self) -> &Control {
        // SAFETY: `index` is 0 or 1, and both fit before the rings, on a separate page, so aligned; the
        // mapping lives as long as `self`, cannot shrink (it is sealed), and holds only atomics there.
        unsafe { &*self.control.as_ptr().cast::<Control>().add(self.index) }
    }

    /// 1 while values are lent, 0 once they are returned.
    #[allow(clippy::cast_ptr_alignment, reason = "a mapping begins with a page")]
    pub(super) fn borrowed(&self, slot: usize) -> &AtomicU32 {
        assert!(slot < MAX_BORROWED_PAGES, "no such page");
        // SAFETY: as above: `MAX_BORROWED_PAGES` counters fit behind the two controls, with the same
        // alignment.
        unsafe { &*self.control.as_ptr().cast::<Control>().add(2).cast::<Line<AtomicU32>>().add(slot) }
    }

    fn bytes(&self) -> *mut u8 {
        // Within the mapping: see `map_rings`.
        self.memory.as_mut_ptr().wrapping_add(self.first + self.index * self.size)
    }

    /// Offset of a position, and how many of `n` bytes fit before the end of the ring.
    fn place(&self, position: u64, n: usize) -> (usize, usize) {
        assert!(n <= self.size, "more than a ring");
        let at = position as usize & (self.size - 1);
        (at, n.min(self.size - at))
    }

    /// Copies bytes into the ring, around its end if need be.
    pub(super) fn put(&self, position: u64, bytes: &[u8]) {
        let (at, first) = self.place(position, bytes.len());
        let (ring, from) = (self.bytes(), bytes.as_ptr());
        // SAFETY: `at + first` is at most the ring's size, and so is the rest; the mapping is this process's
        // memory for as long as `self` lives, and contains no Rust object. That the peer may access the same
        // bytes at the same time, against the rules of `ring`, garbles those bytes and nothing else.
        unsafe {
            copy_nonoverlapping(from, ring.add(at), first);
            copy_nonoverlapping(from.add(first), ring, bytes.len() - first);
        }
    }

    /// Copies `n` bytes out of the ring, or as many as the buffer takes.
    pub(super) fn get(&self, position: u64, n: usize, into: &mut ReadBuf<'_>) {
        let n = n.min(into.remaining());
        let (at, first) = self.place(position, n);
        let ring = self.bytes();
        // SAFETY: as in `put`; the buffer has room for `n` bytes, all of which are written before its
        // length grows.
        unsafe {
            let to = into.unfilled_mut().as_mut_ptr().cast::<u8>();
            copy_nonoverlapping(ring.add(at), to, first);
            copy_nonoverlapping(ring, to.add(first), n - first);
            into.assume_init(n);
        }
        into.advance(n);
    }
}
