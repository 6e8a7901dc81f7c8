//! Plain memory of an `exact` slice, aligned to a cache line.

use super::meter::Charge;
use crate::dtype::DType;
use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};
use std::sync::OnceLock;

const LINE: usize = 64;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

/// Values of one type, aligned to 64 bytes.
pub(crate) struct Buffer {
    lines: Vec<Line>,
    dtype: DType,
    len: usize,
    /// Set when only a reader keeps the buffer alive: the slice's own memory is counted elsewhere.
    charge: OnceLock<Charge>,
}

impl Buffer {
    /// `len` values, written once so that the first push does not pay for the pages.
    pub(crate) fn filled(dtype: DType, len: usize, value: f32) -> Self {
        let line = match dtype {
            DType::Float32 => Line(bytemuck::cast([value; LINE / size_of::<f32>()])),
        };
        let lines = (dtype.size() * len).div_ceil(LINE);
        Self { lines: vec![line; lines], dtype, len, charge: OnceLock::new() }
    }

    /// Bytes of memory that `len` values take.
    pub(crate) fn bytes_for(dtype: DType, len: usize) -> u64 {
        (LINE * (dtype.size() * len).div_ceil(LINE)) as u64
    }

    /// Counts the buffer's memory until its last reader is done.
    pub(crate) fn leave_to_readers(&self, charge: Charge) {
        // A buffer is left once, so nothing is there to be replaced.
        let _ = self.charge.set(charge);
    }

    /// Copies the values of a buffer of the same type and length.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.lines.copy_from_slice(&other.lines);
    }

    /// The values, for writing; `T` is what `dtype` names.
    pub(crate) fn values_mut<T: Pod>(&mut self) -> &mut [T] {
        &mut cast_slice_mut(&mut self.lines)[..self.len]
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &cast_slice(&self.lines)[..self.dtype.size() * self.len]
    }
}
impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}
