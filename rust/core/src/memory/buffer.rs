//! Plain, aligned memory for one array of an `exact` slice: values or one slot of optimizer state.

use super::exposed::ExposedFile;
use super::meter::Charge;
use super::pieces::{Piece, Pieces};
use crate::base::dtype::DType;
use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};
use std::sync::OnceLock;

const LINE: usize = 64;
/// Full slices take whole multiples of this; no supported system has larger pages.
const PAGE: usize = 1 << 16;
/// Arrays of at least this many bytes are staggered within a page.
const LARGE: usize = 1 << 16;
/// Offset within a page between the large arrays of one slice. A step walks along all of them and the
/// gradient, which mostly starts near the start of a page, at once; streams whose addresses agree in the low
/// bits slow each other down.
const STAGGER: usize = 5 * LINE;
/// The number of different offsets; array k and array k + `PLACES` share one.
const PLACES: usize = 4;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct ByteLine([u8; LINE]);

/// Values of one type, aligned to 64 bytes.
pub(crate) struct Buffer {
    memory: BufferMemory,
    /// The byte at which the first value begins.
    start: usize,
    dtype: DType,
    len: usize,
    /// Set when only readers keep the buffer alive; the memory of the slice itself is charged elsewhere.
    charge: OnceLock<Charge>,
}

enum BufferMemory {
    Lines(Vec<ByteLine>),
    Piece(Piece),
}

impl Buffer {
    /// `len` values of a slice's `array`-th array. All are written here, so that the first push takes no page
    /// faults.
    pub(crate) fn filled(dtype: DType, len: usize, value: f32, array: usize, pieces: &mut Pieces) -> Self {
        let piece = pieces.take(Self::bytes_for(dtype, len) as usize, array);
        Self::made(dtype, len, value, array, piece)
    }

    /// Memory for a copy of a slice's values, exposed to other processes if these values are.
    pub(crate) fn spare(&self) -> Self {
        let piece = match &self.memory {
            BufferMemory::Piece(piece) => piece.spare(),
            BufferMemory::Lines(_) => None,
        };
        Self::made(self.dtype, self.len, 0.0, 0, piece)
    }

    fn made(dtype: DType, len: usize, value: f32, array: usize, piece: Option<Piece>) -> Self {
        let lines = || vec![ByteLine([0; LINE]); Self::bytes_for(dtype, len) as usize / LINE];
        let memory = piece.map_or_else(|| BufferMemory::Lines(lines()), BufferMemory::Piece);
        let start = if dtype.size() * len < LARGE { 0 } else { STAGGER * (1 + array % PLACES) };
        let mut buffer = Self { memory, start, dtype, len, charge: OnceLock::new() };
        match dtype {
            DType::Float32 => buffer.values_mut().fill(value),
            DType::Float64 => buffer.values_mut().fill(f64::from(value)),
            // State is never of this type, so the value is 0.
            DType::BFloat16 => {}
        }
        buffer
    }

    /// Bytes of memory for `len` values.
    pub(crate) fn bytes_for(dtype: DType, len: usize) -> u64 {
        let bytes = dtype.size() * len;
        let room = if bytes < LARGE { 0 } else { STAGGER * PLACES };
        let unit = if len == dtype.slice_len() { PAGE } else { LINE };
        (bytes + room).next_multiple_of(unit) as u64
    }

    /// Charges the buffer's memory until its last reader drops it.
    pub(crate) fn leave_to_readers(&self, charge: Charge) {
        // A buffer is left to readers at most once, so `set` replaces nothing.
        let _ = self.charge.set(charge);
    }

    /// Copies the values of a buffer of the same type and length.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.values_mut::<u8>().copy_from_slice(other.bytes());
    }

    /// The values, for writing. `T` is the type that `dtype` names, or a byte.
    pub(crate) fn values_mut<T: Pod>(&mut self) -> &mut [T] {
        let (start, end) = (self.start, self.start + self.dtype.size() * self.len);
        let memory: &mut [u8] = match &mut self.memory {
            BufferMemory::Lines(lines) => cast_slice_mut(lines),
            BufferMemory::Piece(piece) => piece,
        };
        cast_slice_mut(&mut memory[start..end])
    }

    /// File and offset of the values in the shard's exposed memory, if that contains them.
    pub(crate) fn exposed_at(&self) -> Option<(&ExposedFile, u64)> {
        match &self.memory {
            BufferMemory::Piece(piece) => {
                let (file, offset) = piece.exposed_at()?;
                Some((file, offset + self.start as u64))
            }
            BufferMemory::Lines(_) => None,
        }
    }

    /// The type of the values.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let memory: &[u8] = match &self.memory {
            BufferMemory::Lines(lines) => cast_slice(lines),
            BufferMemory::Piece(piece) => piece,
        };
        &memory[self.start..][..self.dtype.size() * self.len]
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}
