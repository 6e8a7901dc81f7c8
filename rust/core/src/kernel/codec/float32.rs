//! float32: the values themselves, little-endian.

use super::Body;
use super::encode::{Encoder, encode as encode_blocks};
use crate::base::block::{BLOCK, Lane};
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};
use std::ops::Range;

const WIDTH: usize = 4;
/// The bits without the sign.
const MAGNITUDE: u32 = 0x7FFF_FFFF;

/// Bodies of this codec mark no blocks that are not finite.
pub(super) const MARKED: Option<usize> = None;

/// Bytes of a body of `n` elements.
pub(super) fn body_len(n: usize) -> usize {
    WIDTH * n
}

/// Bodies of this codec mark no blocks that are not finite.
pub(super) fn was_finite(_body: &[u8], _block: usize) -> bool {
    true
}

pub(super) fn encode(isa: Isa, values: &[f32], residual: Option<&mut [f32]>, body: &mut [u8]) {
    encode_blocks(isa, values, residual, Float32Writer { body });
}

struct Float32Writer<'a> {
    body: &'a mut [u8],
}

impl Encoder<BLOCK> for Float32Writer<'_> {
    #[inline(always)]
    fn block(&mut self, at: usize, v: &[f32; BLOCK], len: usize) {
        let (out, _) = self.body[WIDTH * at..][..WIDTH * len].as_chunks_mut::<WIDTH>();
        for (out, v) in out.iter_mut().zip(v) {
            *out = v.to_le_bytes();
        }
    }

    #[inline(always)]
    fn unsaid(&self, at: usize, v: &[f32; BLOCK], e: &mut [f32]) {
        let (body, _) = self.body[WIDTH * at..][..WIDTH * e.len()].as_chunks::<WIDTH>();
        for ((e, v), b) in e.iter_mut().zip(v).zip(body) {
            *e = v - f32::from_le_bytes(*b);
        }
    }
}

/// The largest magnitude. Refuses NaN and infinities.
pub(super) fn validate(isa: Isa, body: &[u8], _n: usize) -> Result<f64> {
    let (body, _) = body.as_chunks::<WIDTH>();
    let largest = f32::from_bits(isa.run(LargestFloat32 { body }));
    if largest.is_finite() {
        return Ok(largest.into());
    }
    let bad = body.iter().position(|&b| !f32::from_le_bytes(b).is_finite()).unwrap_or_default();
    Err(Error::new(Kind::NonFinite, format!("element {bad} is not finite"))
        .expected("finite float32 values", body.get(bad).map_or(f32::NAN, |&b| f32::from_le_bytes(b))))
}

/// The bits of the largest magnitude; NaN is above infinity.
struct LargestFloat32<'a> {
    body: &'a [[u8; WIDTH]],
}

impl Kernel for LargestFloat32<'_> {
    type Out = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        self.body.iter().fold(0, |largest, &b| largest.max(u32::from_le_bytes(b) & MAGNITUDE))
    }
}

impl Lane for [u8; WIDTH] {
    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_le_bytes(self)
    }
}

/// A validated body of float32 values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Float32Body<'a> {
    body: &'a [u8],
}

impl<'a> Float32Body<'a> {
    /// `body` holds `n` elements.
    #[inline(always)]
    pub(crate) fn new(body: &'a [u8], n: usize) -> Self {
        debug_assert_eq!(body.len(), WIDTH * n);
        Self { body }
    }
}

impl Body for Float32Body<'_> {
    type Lane = [u8; WIDTH];

    #[inline(always)]
    fn lanes(&self, range: Range<usize>) -> Option<&[[u8; WIDTH]]> {
        Some(self.body[WIDTH * range.start..WIDTH * range.end].as_chunks().0)
    }

    #[inline(always)]
    fn decode(&self, at: usize, out: &mut [f32]) {
        let (body, _) = self.body[WIDTH * at..][..WIDTH * out.len()].as_chunks::<WIDTH>();
        for (out, &b) in out.iter_mut().zip(body) {
            *out = f32::from_le_bytes(b);
        }
    }
}
