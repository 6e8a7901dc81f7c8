//! Memory of large tensors, for which the system may use huge pages: a step over gigabytes then waits less
//! for addresses to be translated. Pieces are mapped before the first of them is touched; the system lays
//! them side by side, so that huge pages span them. Each is freed for itself, as its buffer goes.
//!
//! The values of a shard whose clients may read them where they lie come out of its `exposed` memory.

use super::exposed::{Exposed, ExposedPiece};
use crate::base::sync::Arc;
use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// Bytes below which a huge page is not worth its while.
const WORTHWHILE: usize = 1 << 22;

/// The memory of one buffer.
pub(super) enum Piece {
    Own(MmapMut),
    Exposed(ExposedPiece),
}

impl Deref for Piece {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(piece) => piece,
            Self::Exposed(piece) => piece,
        }
    }
}

impl DerefMut for Piece {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Own(piece) => piece,
            Self::Exposed(piece) => piece,
        }
    }
}

/// Pieces of memory of one length, for buffers to come.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    len: usize,
    free: Vec<MmapMut>,
    /// Where values, which come first, are taken from.
    exposed: Option<Arc<Exposed>>,
}

impl Pieces {
    /// No pieces: buffers are made of ordinary memory.
    pub(crate) fn none() -> Self {
        Self::default()
    }

    /// Pieces of `len` bytes each for `slices` of so many `arrays`; none where that is little memory or the
    /// system has none to give.
    pub(crate) fn new(len: usize, slices: usize, arrays: usize, exposed: Option<&Arc<Exposed>>) -> Self {
        let count = slices * (arrays - usize::from(exposed.is_some()));
        let count = if len.saturating_mul(count) < WORTHWHILE { 0 } else { count };
        Self { len, free: (0..count).map_while(|_| map(len)).collect(), exposed: exposed.cloned() }
    }

    /// A piece of exactly `len` bytes for a slice's `array`-th array.
    pub(super) fn take(&mut self, len: usize, array: usize) -> Option<Piece> {
        if len != self.len {
            return None;
        }
        let exposed = self.exposed.as_ref().filter(|_| array == 0).and_then(|memory| memory.take(len, false));
        exposed.map(Piece::Exposed).or_else(|| self.free.pop().map(Piece::Own))
    }
}

impl Piece {
    /// Memory for a copy, exposed as this is.
    pub(super) fn spare(&self) -> Option<Self> {
        match self {
            Self::Exposed(piece) => piece.memory.take(piece.len(), true).map(Self::Exposed),
            Self::Own(_) => None,
        }
    }

    /// Where it begins in exposed memory.
    pub(super) fn exposed_at(&self) -> Option<usize> {
        match self {
            Self::Exposed(piece) => Some(piece.offset()),
            Self::Own(_) => None,
        }
    }
}

#[cfg(all(target_os = "linux", not(any(miri, loom))))]
fn map(len: usize) -> Option<MmapMut> {
    let piece = MmapMut::map_anon(len).ok()?;
    // A kernel without huge pages says no; then these are ordinary pages.
    let _ = piece.advise(memmap2::Advice::HugePage);
    Some(piece)
}

#[cfg(not(all(target_os = "linux", not(any(miri, loom)))))]
fn map(_len: usize) -> Option<MmapMut> {
    None
}
