//! Plain memory of an `exact` slice, aligned to a cache line.

use super::meter::Charge;
use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};
use std::sync::OnceLock;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Float32 values, aligned to 64 bytes.
pub(crate) struct Buffer {
    lines: Vec<Line>,
    len: usize,
    /// Set when only a reader keeps the buffer alive: the slice's own memory is counted elsewhere.
    charge: OnceLock<Charge>,
}

impl Buffer {
    /// `len` values, written once so that the first push does not pay for the pages.
    pub(crate) fn filled(len: usize, value: f32) -> Self {
        Self { lines: vec![Line([value; 16]); len.div_ceil(16)], len, charge: OnceLock::new() }
    }

    /// Bytes of memory that `len` values take.
    pub(crate) fn bytes_for(len: usize) -> u64 {
        64 * len.div_ceil(16) as u64
    }

    /// Counts the buffer's memory until its last reader is done.
    pub(crate) fn leave_to_readers(&self, charge: Charge) {
        // A buffer is left once, so nothing is there to be replaced.
        let _ = self.charge.set(charge);
    }

    pub(crate) fn values(&self) -> &[f32] {
        &cast_slice(&self.lines)[..self.len]
    }

    pub(crate) fn values_mut(&mut self) -> &mut [f32] {
        &mut cast_slice_mut(&mut self.lines)[..self.len]
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        cast_slice(self.values())
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}
