//! Memory of large tensors, backed by huge pages where the system allows: a step over gigabytes then spends
//! less time on address translation. All pieces are mapped before the first one is touched, so that the
//! system lays them side by side and huge pages span them. Each piece is freed on its own, when its buffer is
//! dropped.
//!
//! If the clients of a shard may read its values in place, the values come out of its `exposed` memory.

use super::exposed::{Exposed, ExposedFile, ExposedPiece};
use crate::base::sync::Arc;
use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// Below this many bytes, huge pages do not pay off.
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

/// Pieces of one length, for buffers that will be made.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    len: usize,
    free: Vec<MmapMut>,
    /// The memory that values, which are each slice's first array, are taken from.
    exposed: Option<Arc<Exposed>>,
}

impl Pieces {
    /// No pieces: buffers use ordinary memory.
    pub(crate) fn none() -> Self {
        Self::default()
    }

    /// Pieces of `len` bytes each, for `slices` slices of `arrays` arrays each. There are none if the total
    /// is small or the system has no memory to give.
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
        let exposed = self.exposed.as_ref().filter(|_| array == 0).and_then(|memory| memory.take(len));
        exposed.map(Piece::Exposed).or_else(|| self.free.pop().map(Piece::Own))
    }
}

impl Piece {
    /// Memory for a copy, exposed if this piece is.
    pub(super) fn spare(&self) -> Option<Self> {
        match self {
            Self::Exposed(piece) => piece.from.take(piece.len()).map(Self::Exposed),
            Self::Own(_) => None,
        }
    }

    /// Its file and offset in the exposed memory.
    pub(super) fn exposed_at(&self) -> Option<(&ExposedFile, u64)> {
        match self {
            Self::Exposed(piece) => Some((&piece.file, piece.offset())),
            Self::Own(_) => None,
        }
    }
}

#[cfg(all(target_os = "linux", not(any(miri, loom))))]
fn map(len: usize) -> Option<MmapMut> {
    let piece = MmapMut::map_anon(len).ok()?;
    // A kernel without huge pages refuses this advice; the pages are then ordinary ones.
    let _ = piece.advise(memmap2::Advice::HugePage);
    Some(piece)
}

#[cfg(not(all(target_os = "linux", not(any(miri, loom)))))]
fn map(_len: usize) -> Option<MmapMut> {
    None
}
