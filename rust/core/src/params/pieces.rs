//! Memory of large tensors, for which the system may use huge pages: a step over gigabytes then waits less for addresses
//! to be translated. Pieces are mapped before the first of them is touched; the system lays them side by side, so that
//! huge pages span them. Each is freed for itself, as its buffer goes.

pub(super) use memmap2::MmapMut as Piece;

/// Bytes below which a huge page is not worth its while.
const WORTHWHILE: usize = 1 << 22;

/// Pieces of memory of one length, for buffers to come.
#[derive(Debug)]
pub(crate) struct Pieces {
    len: usize,
    free: Vec<Piece>,
}

impl Pieces {
    /// No pieces: buffers are made of ordinary memory.
    pub(crate) fn none() -> Self {
        Self { len: 0, free: Vec::new() }
    }

    /// `count` pieces of `len` bytes each, or none where that is little memory or the system has none to give.
    pub(crate) fn new(len: usize, count: usize) -> Self {
        let count = if len.saturating_mul(count) < WORTHWHILE { 0 } else { count };
        Self { len, free: (0..count).map_while(|_| map(len)).collect() }
    }

    /// A piece of exactly `len` bytes, all zero.
    pub(super) fn take(&mut self, len: usize) -> Option<Piece> {
        if len == self.len { self.free.pop() } else { None }
    }
}

#[cfg(all(target_os = "linux", not(any(miri, loom))))]
fn map(len: usize) -> Option<Piece> {
    let piece = Piece::map_anon(len).ok()?;
    // A kernel without huge pages says no; then these are ordinary pages.
    let _ = piece.advise(memmap2::Advice::HugePage);
    Some(piece)
}

#[cfg(not(all(target_os = "linux", not(any(miri, loom)))))]
fn map(_len: usize) -> Option<Piece> {
    None
}
