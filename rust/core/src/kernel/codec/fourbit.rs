//! Four bits: the sign of each element and one of seven powers of two, one scale byte per 64 elements (E3M0).
//!
//! Body: all scale bytes, then two elements a byte, the earlier one in the low half. `r(x)` is the exponent
//! field of the power of two that is nearest to |x|, of two the larger one. The scale byte is `S = r` of the
//! block's largest magnitude, at most 254. The low three bits of an element are `c = r(x) + 7 - S`; where that
//! is below 1, c is 1 for magnitudes from `2^(S - 134)`, half the smallest power, and else 0. The fourth is
//! the sign; a zero has none. Decoded as `2^(S - 134 + c)`, or 0. Below 2^-95 (E < 32) the block is zero, so
//! every power is a normal float32.

use super::Body;
use super::encode::{Encoder, encode as encode_blocks};
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};
use std::ops::Range;

/// Elements that share a scale.
const BLOCK: usize = 64;
/// Elements of a block that a body can mark as not finite.
pub(super) const MARKED: Option<usize> = Some(BLOCK);
/// Exponent fields below this one give a zero block.
const SMALLEST: u32 = 32;
/// The largest power of two that is finite.
const LARGEST: u32 = 254;
/// The scale of a block that has a value that is not finite: the exponent field of infinity.
const NOT_FINITE: u8 = 0xFF;
/// Powers of two that an element can be.
const POWERS: u32 = 7;
const SIGN: u8 = 8;

/// Bytes of a body of `n` elements.
pub(super) fn body_len(n: usize) -> usize {
    n.div_ceil(BLOCK) + n.div_ceil(2)
}

pub(super) fn encode(isa: Isa, values: &[f32], residual: Option<&mut [f32]>, body: &mut [u8]) {
    let (scales, pairs) = body.split_at_mut(values.len().div_ceil(BLOCK));
    encode_blocks(isa, values, residual, FourBitWriter { scales, pairs });
}

/// Returns whether the values of a block were finite.
pub(super) fn was_finite(body: &[u8], block: usize) -> bool {
    body[block] != NOT_FINITE
}

struct FourBitWriter<'a> {
    scales: &'a mut [u8],
    pairs: &'a mut [u8],
}

impl Encoder<BLOCK> for FourBitWriter<'_> {
    #[inline(always)]
    fn block(&mut self, at: usize, v: &[f32; BLOCK], len: usize) {
        let scale = scale_of(v);
        self.scales[at / BLOCK] = scale;
        let mut pairs = [0; BLOCK / 2];
        for (pair, [even, odd]) in pairs.iter_mut().zip(v.as_chunks::<2>().0) {
            *pair = nearest(*even, scale) | (nearest(*odd, scale) << 4);
        }
        self.pairs[at / 2..][..len.div_ceil(2)].copy_from_slice(&pairs[..len.div_ceil(2)]);
    }

    #[inline(always)]
    fn unsaid(&self, at: usize, v: &[f32; BLOCK], e: &mut [f32]) {
        let scale = self.scales[at / BLOCK];
        if scale == NOT_FINITE {
            return;
        }
        for (e, v) in e.iter_mut().zip(v) {
            *e = v - value(nearest(*v, scale), scale);
        }
    }
}

/// The exponent field of the power of two nearest to a magnitude.
#[inline(always)]
fn rounded(magnitude: u32) -> u32 {
    magnitude.wrapping_add(0x0040_0000) >> 23
}

#[inline(always)]
fn scale_of(v: &[f32; BLOCK]) -> u8 {
    let largest = v.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7FFF_FFFF));
    match largest >> 23 {
        0xFF => NOT_FINITE,
        e if e < SMALLEST => 0,
        _ => rounded(largest).min(LARGEST) as u8,
    }
}

#[inline(always)]
fn nearest(x: f32, scale: u8) -> u8 {
    let (bits, scale) = (x.to_bits(), u32::from(scale));
    let magnitude = bits & 0x7FFF_FFFF;
    let power = rounded(magnitude).wrapping_add(POWERS).saturating_sub(scale);
    let half = u32::from((magnitude >> 23).wrapping_add(POWERS) >= scale);
    let code = if scale == 0 { 0 } else { power.max(half).min(POWERS) };
    let sign = if code == 0 { 0 } else { (bits >> 28) & u32::from(SIGN) };
    (code | sign) as u8
}

/// The value of an element under a canonical scale.
#[inline(always)]
fn value(element: u8, scale: u8) -> f32 {
    let (code, sign) = (u32::from(element & 7), u32::from(element & SIGN) << 28);
    let field = u32::from(scale).wrapping_add(code).wrapping_sub(POWERS);
    f32::from_bits(sign | if code == 0 { 0 } else { field << 23 })
}

/// A bound of the magnitudes. Refuses what no encoder writes: a scale of 1..=31 or 255, a zero with a sign,
/// and an element that is not zero under a zero scale or beyond the last one.
pub(super) fn validate(isa: Isa, body: &[u8], n: usize) -> Result<f64> {
    let (scales, pairs) = body.split_at(n.div_ceil(BLOCK));
    if isa.run(AllCanonical { scales, pairs })
        && (n.is_multiple_of(2) || pairs.last().is_none_or(|p| p >> 4 == 0))
    {
        let largest = scales.iter().copied().max().unwrap_or_default();
        return Ok(value(if largest == 0 { 0 } else { 7 }, largest).into());
    }
    let wrong = |what: String| Error::new(Kind::Frame, format!("four-bit: {what} is not canonical"));
    for (i, (&scale, block)) in scales.iter().zip(pairs.chunks(BLOCK / 2)).enumerate() {
        if !is_scale(scale) {
            return Err(wrong(format!("the scale of block {i}")).expected("0 or 32 to 254", scale));
        }
        let elements = block.iter().flat_map(|pair| [pair & 15, pair >> 4]).enumerate();
        for (j, element) in elements.map(|(j, element)| (i * BLOCK + j, element)) {
            let expected = match scale {
                _ if element == SIGN => "a zero without a sign",
                0 if element != 0 => "0, as its block's scale is 0",
                _ if j >= n && element != 0 => "0, as the body has no such element",
                _ => continue,
            };
            return Err(wrong(format!("element {j}")).expected(expected, element));
        }
    }
    Err(Error::new(Kind::Internal, "four-bit: the two checks of a body disagree"))
}

#[inline(always)]
fn is_scale(scale: u8) -> bool {
    scale == 0 || (SMALLEST as u8..=LARGEST as u8).contains(&scale)
}

struct AllCanonical<'a> {
    scales: &'a [u8],
    pairs: &'a [u8],
}

impl Kernel for AllCanonical<'_> {
    type Out = bool;
    #[inline(always)]
    fn run(self) -> bool {
        // Folded, because an early exit would prevent vectorisation.
        let scales = self.scales.iter().fold(true, |good, &s| good & is_scale(s));
        let signs = |pair: u8| pair & 15 != SIGN && pair >> 4 != SIGN;
        let zeros = || {
            let blocks = self.pairs.chunks(BLOCK / 2).zip(self.scales).filter(|(_, scale)| **scale == 0);
            blocks.flat_map(|(block, _)| block).all(|&pair| pair == 0)
        };
        scales
            && self.pairs.iter().fold(true, |good, pair| good & signs(*pair))
            && (!self.scales.contains(&0) || zeros())
    }
}

/// A validated body of signs and powers of two with block scales.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FourBitBody<'a> {
    scales: &'a [u8],
    pairs: &'a [u8],
}

impl<'a> FourBitBody<'a> {
    /// `body` holds `n` elements.
    #[inline(always)]
    pub(crate) fn new(body: &'a [u8], n: usize) -> Self {
        let (scales, pairs) = body.split_at(n.div_ceil(BLOCK));
        debug_assert_eq!(pairs.len(), n.div_ceil(2));
        Self { scales, pairs }
    }
}

impl Body for FourBitBody<'_> {
    type Lane = f32;

    #[inline(always)]
    fn lanes(&self, _range: Range<usize>) -> Option<&[f32]> {
        None
    }

    #[inline(always)]
    fn decode(&self, at: usize, out: &mut [f32]) {
        let pairs = self.pairs[at / 2..][..out.len().div_ceil(2)].chunks(BLOCK / 2);
        let scales = &self.scales[at / BLOCK..];
        for ((out, pairs), &scale) in out.chunks_mut(BLOCK).zip(pairs).zip(scales) {
            let (two, one) = out.as_chunks_mut::<2>();
            for ([even, odd], pair) in two.iter_mut().zip(pairs) {
                (*even, *odd) = (value(pair & 15, scale), value(pair >> 4, scale));
            }
            if let ([last], Some(pair)) = (one, pairs.last()) {
                *last = value(pair & 15, scale);
            }
        }
    }
}
