//! A ring of bytes with one writer and one reader that do not trust each other's counts.
//!
//! Both count bytes from the beginning: equal counts mean an empty ring, and counts that differ by its size
//! a full one. An end with nothing to do announces that it sleeps, looks once more, and sleeps; the other
//! end moves its count and then looks for a sleeper. A fence between the two steps of each makes one of
//! them see the other. Each end keeps its own count private and checks the peer's whenever it reads it.
//!
//! A small ring moves once to larger memory, which both ends have by then: the writer says how many bytes it
//! had written before, and the reader follows when it has read them. The counts go on.

use super::memory::Half;
use super::sync::{AtomicU32, AtomicU64, Ordering, fence};
use std::io::{Error, ErrorKind, Result};
use tokio::io::ReadBuf;

/// Bytes between announcements: the peer works on them while the next are copied.
const MAX_COPY_BYTES: usize = 32 << 10;

/// The end that writes.
#[derive(Debug)]
pub(super) struct Writer {
    half: Half,
    written: u64,
    /// The reader's count, as last seen.
    read: u64,
}

/// The end that reads.
#[derive(Debug)]
pub(super) struct Reader {
    half: Half,
    read: u64,
    /// The writer's count, as last seen.
    written: u64,
    /// The writer's count when it moved, until this end does.
    moves_at: Option<u64>,
    /// Memory to move to.
    larger: Option<Half>,
}

impl Writer {
    pub(super) fn new(half: Half) -> Self {
        Self { half, written: 0, read: 0 }
    }

    /// Notes that larger memory is wanted, if so many bytes are more than half the ring.
    pub(super) fn want(&self, bytes: usize) {
        if bytes > self.half.size() / 2 && self.half.larger_size().is_some() {
            self.half.growth().is_wanted.store(1, Ordering::Relaxed);
        }
    }

    /// Writes to larger memory from here on, which the reader has got.
    pub(super) fn move_to(&mut self, larger: Half) {
        self.half.growth().moved.store(self.written + 1, Ordering::Release);
        self.half = larger;
    }

    pub(super) fn half(&self) -> &Half {
        &self.half
    }

    /// Bytes that fit; reads the reader's count if fewer are known than wanted.
    fn free(&mut self, wanted: usize) -> Result<usize> {
        let size = self.half.size() as u64;
        if size - (self.written - self.read) < wanted as u64 {
            self.read = seen(&self.half.control().read, self.read, self.written)?;
        }
        Ok((size - (self.written - self.read)) as usize)
    }

    /// Writes the bytes that fit and returns their number; calls `wake` if the reader must be woken. Small
    /// pieces are announced together.
    pub(super) fn write<'a>(
        &mut self,
        all: impl IntoIterator<Item = &'a [u8]>,
        mut wake: impl FnMut(),
    ) -> Result<usize> {
        let (mut sum, mut untold) = (0, 0);
        for bytes in all {
            let n = self.free(bytes.len())?.min(bytes.len());
            for piece in bytes[..n].chunks(MAX_COPY_BYTES) {
                self.half.put(self.written, piece);
                self.written += piece.len() as u64;
                untold += piece.len();
                if untold >= MAX_COPY_BYTES {
                    untold = 0;
                    self.tell(&mut wake);
                }
            }
            sum += n;
            if n < bytes.len() {
                break;
            }
        }
        if untold > 0 {
            self.tell(&mut wake);
        }
        Ok(sum)
    }

    /// Announces all written bytes to the reader.
    fn tell(&self, wake: &mut impl FnMut()) {
        let control = self.half.control();
        control.written.store(self.written, Ordering::Release);
        if is_roused(&control.reader_sleeps) {
            wake();
        }
    }

    /// Returns whether there is room.
    pub(super) fn is_ready(&mut self) -> Result<bool> {
        Ok(self.free(1)? > 0)
    }

    /// Announces sleep. Returns whether there still is no room: otherwise this end must not sleep.
    pub(super) fn may_sleep(&mut self) -> Result<bool> {
        announce(&self.half.control().writer_sleeps);
        let full = self.free(1)? == 0;
        if !full {
            self.awake();
        }
        Ok(full)
    }

    /// Ends the announcement of sleep.
    pub(super) fn awake(&self) {
        self.half.control().writer_sleeps.store(0, Ordering::Relaxed);
    }
}

impl Reader {
    pub(super) fn new(half: Half) -> Self {
        Self { half, read: 0, written: 0, moves_at: None, larger: None }
    }

    pub(super) fn half(&self) -> &Half {
        &self.half
    }

    /// Gives this end the memory that it moves to when the writer has.
    pub(super) fn may_move_to(&mut self, larger: Half) {
        self.larger = Some(larger);
    }

    /// Returns whether the writer has moved to memory that this end does not have.
    pub(super) fn lacks_memory(&self) -> bool {
        self.larger.is_none()
            && self.half.larger_size().is_some()
            && self.half.growth().moved.load(Ordering::Acquire) != 0
    }

    /// Bytes to read; reads the writer's count if none are known.
    fn waiting(&mut self) -> Result<usize> {
        if self.known() == 0 {
            let now = self.half.control().written.load(Ordering::Acquire);
            // Looked for after the count: whoever sees a later one sees the move, too.
            self.look_for_move()?;
            let size = self.moves_at.and(self.half.larger_size()).unwrap_or(self.half.size());
            self.written = checked(now, self.written, self.read + size as u64)?;
            if self.moves_at == Some(self.read)
                && let Some(larger) = self.larger.take()
            {
                (self.half, self.moves_at) = (larger, None);
            }
        }
        Ok(self.known())
    }

    /// Bytes that are known to wait where this end reads.
    fn known(&self) -> usize {
        (self.moves_at.map_or(self.written, |at| at.min(self.written)) - self.read) as usize
    }

    fn look_for_move(&mut self) -> Result<()> {
        if self.moves_at.is_some() || self.half.larger_size().is_none() {
            return Ok(());
        }
        let moved = self.half.growth().moved.load(Ordering::Acquire);
        if let Some(at) = moved.checked_sub(1) {
            self.moves_at = Some(checked(at, self.read, self.read + self.half.size() as u64)?);
        }
        Ok(())
    }

    /// Reads the bytes that fit the buffer; calls `wake` if the writer must be woken.
    pub(super) fn read(&mut self, into: &mut ReadBuf<'_>, mut wake: impl FnMut()) -> Result<()> {
        let mut left = self.waiting()?.min(into.remaining());
        while left > 0 {
            let n = left.min(MAX_COPY_BYTES);
            self.half.get(self.read, n, into);
            self.read += n as u64;
            left -= n;
            let control = self.half.control();
            control.read.store(self.read, Ordering::Release);
            if is_roused(&control.writer_sleeps) {
                wake();
            }
        }
        Ok(())
    }

    /// Returns whether there are bytes.
    pub(super) fn is_ready(&mut self) -> Result<bool> {
        Ok(self.waiting()? > 0)
    }

    /// Announces sleep. Returns whether there still are no bytes: otherwise this end must not sleep.
    pub(super) fn may_sleep(&mut self) -> Result<bool> {
        announce(&self.half.control().reader_sleeps);
        let empty = self.waiting()? == 0;
        if !empty {
            self.awake();
        }
        Ok(empty)
    }

    /// Ends the announcement of sleep.
    pub(super) fn awake(&self) {
        self.half.control().reader_sleeps.store(0, Ordering::Relaxed);
    }
}

/// Returns a page that the reader of this ring borrowed; calls `wake` if the lender must be woken.
pub(super) fn give_back(half: &Half, slot: usize, wake: impl FnOnce()) {
    half.borrowed(slot).store(0, Ordering::Release);
    if is_roused(&half.control().reader_sleeps) {
        wake();
    }
}

/// Returns whether the page was returned. The ring's reader checks whenever it finds nothing else, and once
/// more after announcing sleep.
pub(super) fn is_back(half: &Half, slot: usize) -> bool {
    half.borrowed(slot).load(Ordering::Acquire) == 0
}

/// The peer's count, which may neither fall nor pass a limit.
fn seen(count: &AtomicU64, before: u64, most: u64) -> Result<u64> {
    checked(count.load(Ordering::Acquire), before, most)
}

fn checked(now: u64, before: u64, most: u64) -> Result<u64> {
    if (before..=most).contains(&now) {
        return Ok(now);
    }
    let why = format!("the peer's count in shared memory is {now}: expected {before} to {most}");
    Err(Error::new(ErrorKind::InvalidData, why))
}

fn announce(sleeps: &AtomicU32) {
    sleeps.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Returns whether the other end sleeps, after a count was moved. Only one of several callers gets true.
fn is_roused(sleeps: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    let taken = || sleeps.compare_exchange(1, 0, Ordering::Relaxed, Ordering::Relaxed);
    sleeps.load(Ordering::Relaxed) != 0 && taken().is_ok()
}
