//! Encoding, block by block, with or without a residual (error feedback). All codecs share the arithmetic.

use crate::base::block::AlignedBlock;
use crate::base::isa::{Isa, Kernel};

/// A codec's half of [`encode`]: writes a body, N elements at a time. A smaller N keeps what a block needs in
/// faster memory between its passes; N is a multiple of the codec's own blocks.
pub(super) trait Encoder<const N: usize> {
    /// Encodes the elements `at..at + len` given as `v[..len]`; the rest of `v` is zero.
    fn block(&mut self, at: usize, v: &[f32; N], len: usize);
    /// Leaves in `e` the residual of the block `v` at `at`, which was just encoded: `v - decoded`. If the
    /// body marks the block as not finite, `e` keeps its contents. Decoded values must not pass through
    /// memory: their stores would delay the loads beside them.
    fn unsaid(&self, at: usize, v: &[f32; N], e: &mut [f32]);
}

/// Encodes `v = values + residual`, block by block, and leaves `v - decoded` in the residual, with one
/// rounding each, never fused. `decoded` is bit for bit what the server will decode.
pub(super) fn encode<const N: usize>(
    isa: Isa,
    values: &[f32],
    residual: Option<&mut [f32]>,
    encoder: impl Encoder<N>,
) {
    match residual {
        None => isa.run(Encode::<N, _> { values, encoder }),
        Some(residual) => isa.run(EncodeSum::<N, _> { values, residual, encoder }),
    }
}

struct Encode<'a, const N: usize, E> {
    values: &'a [f32],
    encoder: E,
}

impl<const N: usize, E: Encoder<N>> Kernel for Encode<'_, N, E> {
    type Out = ();
    #[inline(always)]
    fn run(mut self) {
        let (whole, rest) = self.values.as_chunks::<N>();
        for (k, v) in whole.iter().enumerate() {
            self.encoder.block(k * N, v, N);
        }
        if !rest.is_empty() {
            let mut v = AlignedBlock::<N>::ZERO;
            v.0[..rest.len()].copy_from_slice(rest);
            self.encoder.block(self.values.len() - rest.len(), &v.0, rest.len());
        }
    }
}

struct EncodeSum<'a, const N: usize, E> {
    values: &'a [f32],
    residual: &'a mut [f32],
    encoder: E,
}

impl<const N: usize, E: Encoder<N>> Kernel for EncodeSum<'_, N, E> {
    type Out = ();
    #[inline(always)]
    fn run(mut self) {
        let mut v = AlignedBlock::<N>::ZERO;
        let v = &mut v.0;
        let (whole, g_rest) = self.values.as_chunks::<N>();
        let (residuals, e_rest) = self.residual.as_chunks_mut::<N>();
        for (k, (g, e)) in whole.iter().zip(residuals).enumerate() {
            for ((v, g), e) in v.iter_mut().zip(g).zip(&*e) {
                *v = g + e;
            }
            self.encoder.block(k * N, v, N);
            self.encoder.unsaid(k * N, v, e);
        }
        if !g_rest.is_empty() {
            let (at, len) = (N * whole.len(), g_rest.len());
            v.fill(0.0);
            for ((v, g), e) in v.iter_mut().zip(g_rest).zip(&*e_rest) {
                *v = g + e;
            }
            self.encoder.block(at, v, len);
            self.encoder.unsaid(at, v, e_rest);
        }
    }
}
