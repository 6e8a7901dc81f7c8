//! bfloat16: the upper half of a float32, rounded to nearest even, little-endian. The code uses only integer
//! arithmetic, so subnormals and flush-to-zero modes do not matter.

use super::Body;
use super::encode::{Encoder, encode as encode_blocks};
use crate::base::block::{BLOCK, Lane};
use crate::base::dtype::widened;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};
use std::ops::Range;

const WIDTH: usize = 2;
/// The bits without the sign.
const MAGNITUDE: u16 = 0x7FFF;
/// Largest finite magnitude.
const LARGEST: u32 = 0x7F7F;
const NAN: u32 = 0x7FC0;

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
    encode_blocks(isa, values, residual, BFloat16Writer { body });
}

/// Rounds to nearest even. A finite value beyond the largest bfloat16 becomes that value and not infinity,
/// which every decoder refuses; error feedback keeps the difference. NaN and infinity become NaN, so that the
/// server refuses them; callers have excluded both unless the check was disabled.
#[inline(always)]
fn round(x: f32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let rounded = magnitude.wrapping_add(0x7FFF).wrapping_add((magnitude >> 16) & 1) >> 16;
    let finite = rounded.min(LARGEST);
    let kept = if magnitude >= 0x7F80_0000 { NAN } else { finite };
    ((bits >> 16) & 0x8000 | kept) as u16
}

struct BFloat16Writer<'a> {
    body: &'a mut [u8],
}

impl Encoder<BLOCK> for BFloat16Writer<'_> {
    #[inline(always)]
    fn block(&mut self, at: usize, v: &[f32; BLOCK], len: usize) {
        let (out, _) = self.body[WIDTH * at..][..WIDTH * len].as_chunks_mut::<WIDTH>();
        for (out, &v) in out.iter_mut().zip(v) {
            *out = round(v).to_le_bytes();
        }
    }

    #[inline(always)]
    fn unsaid(&self, at: usize, v: &[f32; BLOCK], e: &mut [f32]) {
        let (body, _) = self.body[WIDTH * at..][..WIDTH * e.len()].as_chunks::<WIDTH>();
        for ((e, v), b) in e.iter_mut().zip(v).zip(body) {
            *e = v - widen(*b);
        }
    }
}

/// The value of one element.
#[inline(always)]
pub(crate) fn widen(bytes: [u8; WIDTH]) -> f32 {
    widened(u16::from_le_bytes(bytes))
}

/// The largest magnitude. Refuses NaN and infinities.
pub(super) fn validate(isa: Isa, body: &[u8], _n: usize) -> Result<f64> {
    let (body, _) = body.as_chunks::<WIDTH>();
    let largest = widen(isa.run(LargestBFloat16 { body }).to_le_bytes());
    if largest.is_finite() {
        return Ok(largest.into());
    }
    let bad = body.iter().position(|&b| !widen(b).is_finite()).unwrap_or_default();
    Err(Error::new(Kind::NonFinite, format!("element {bad} is not finite"))
        .expected("finite bfloat16 values", body.get(bad).map_or(f32::NAN, |&b| widen(b))))
}

/// The bits of the largest magnitude; NaN is above infinity.
struct LargestBFloat16<'a> {
    body: &'a [[u8; WIDTH]],
}

impl Kernel for LargestBFloat16<'_> {
    type Out = u16;
    #[inline(always)]
    fn run(self) -> u16 {
        self.body.iter().fold(0, |largest, &b| largest.max(u16::from_le_bytes(b) & MAGNITUDE))
    }
}

impl Lane for [u8; WIDTH] {
    #[inline(always)]
    fn value(self) -> f32 {
        widen(self)
    }
}

/// A validated body of bfloat16 values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BFloat16Body<'a> {
    body: &'a [u8],
}

impl<'a> BFloat16Body<'a> {
    /// `body` holds `n` elements.
    #[inline(always)]
    pub(crate) fn new(body: &'a [u8], n: usize) -> Self {
        debug_assert_eq!(body.len(), WIDTH * n);
        Self { body }
    }
}

impl Body for BFloat16Body<'_> {
    type Lane = [u8; WIDTH];

    #[inline(always)]
    fn lanes(&self, range: Range<usize>) -> Option<&[[u8; WIDTH]]> {
        Some(self.body[WIDTH * range.start..WIDTH * range.end].as_chunks().0)
    }

    #[inline(always)]
    fn decode(&self, at: usize, out: &mut [f32]) {
        let (body, _) = self.body[WIDTH * at..][..WIDTH * out.len()].as_chunks::<WIDTH>();
        for (out, &b) in out.iter_mut().zip(body) {
            *out = widen(b);
        }
    }
}
