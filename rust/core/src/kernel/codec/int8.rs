//! 8-bit: one signed byte per element and one power-of-two scale byte per 64 elements (OCP MXINT8 elements).
//!
//! Body: all scale bytes, then all elements. The scale byte is the exponent field E of the block's largest
//! magnitude; `q = clamp(rne(x * 2^(133 - E)), -127, 127)`, decoded as `q * 2^(E - 133)`. Both are exact
//! except for the one rounding. Below 2^-95 (E < 32) the block is zero, so every factor is a normal float32,
//! and neither subnormals nor flush-to-zero modes nor approximate division can change a byte.
//!
//! Stochastic: `q = clamp((p + u) >> 16, -127, 127)` with p the integer floor of the exact
//! `x * 2^(133 - E) * 2^16` and u 16 bits of Philox4x32-10: key = seed; counter = (element of the tensor / 8,
//! sequence); the eight elements take the low, then the high half of each of the four words.

use super::encode::{Encoder, encode as encode_blocks};
use super::philox;
use super::{Body, Position};
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};
use std::ops::Range;

/// Elements that share a scale.
const BLOCK: usize = 64;
/// Elements of a block that a body can mark as not finite.
pub(super) const MARKED: Option<usize> = Some(BLOCK);

/// Bytes of a body of `n` elements.
pub(super) fn body_len(n: usize) -> usize {
    n.div_ceil(BLOCK) + n
}
/// Exponent fields below this one give a zero block.
const SMALLEST: u32 = 32;
/// 1.5 * 2^23: adding it leaves the sum's integer part, rounded to nearest even, in the low bits.
const ROUND: f32 = 12_582_912.0;
/// Elements whose random bits are generated together.
const NOISE: usize = philox::HALVES;

pub(super) fn encode(
    isa: Isa,
    values: &[f32],
    residual: Option<&mut [f32]>,
    seed: Option<u64>,
    position: Position,
    body: &mut [u8],
) {
    let (scales, elements) = body.split_at_mut(values.len().div_ceil(BLOCK));
    match seed {
        None => encode_blocks(isa, values, residual, Nearest { scales, elements }),
        Some(seed) => {
            encode_blocks(isa, values, residual, Stochastic { scales, elements, seed, position });
        }
    }
}

/// The scale of a block that has a value that is not finite: the exponent field of infinity.
const NOT_FINITE: u8 = 0xFF;

/// Returns whether the values of a block were finite.
pub(super) fn was_finite(body: &[u8], block: usize) -> bool {
    body[block] != NOT_FINITE
}

struct Nearest<'a> {
    scales: &'a mut [u8],
    elements: &'a mut [u8],
}

impl Encoder<BLOCK> for Nearest<'_> {
    #[inline(always)]
    fn block(&mut self, at: usize, v: &[f32; BLOCK], len: usize) {
        let elements = &mut self.elements[at..at + len];
        let scale = &mut self.scales[at / BLOCK];
        if let Some(q) = elements.first_chunk_mut() {
            *scale = nearest(v, q);
        } else {
            let mut q = [0; BLOCK];
            *scale = nearest(v, &mut q);
            elements.copy_from_slice(&q[..len]);
        }
    }

    #[inline(always)]
    fn unsaid(&self, at: usize, v: &[f32; BLOCK], e: &mut [f32]) {
        left(e, v, &self.elements[at..at + e.len()], self.scales[at / BLOCK]);
    }
}

struct Stochastic<'a> {
    scales: &'a mut [u8],
    elements: &'a mut [u8],
    seed: u64,
    position: Position,
}

impl Encoder<NOISE> for Stochastic<'_> {
    #[inline(always)]
    fn block(&mut self, at: usize, v: &[f32; NOISE], len: usize) {
        let first = self.position.first_element.wrapping_add(at as u64) / 8;
        let noise = philox::halves(self.seed, first, self.position.sequence);
        let scales = &mut self.scales[at / BLOCK..];
        let blocks = self.elements[at..at + len].chunks_mut(BLOCK);
        let given = v.as_chunks::<BLOCK>().0.iter().zip(noise.as_chunks::<BLOCK>().0);
        for (scale, (elements, (v, u))) in scales.iter_mut().zip(blocks.zip(given)) {
            let mut q = [0; BLOCK];
            *scale = stochastic(v, u, &mut q);
            elements.copy_from_slice(&q[..elements.len()]);
        }
    }

    #[inline(always)]
    fn unsaid(&self, at: usize, v: &[f32; NOISE], e: &mut [f32]) {
        let elements = self.elements[at..].chunks(BLOCK).zip(&self.scales[at / BLOCK..]);
        let blocks = e.chunks_mut(BLOCK).zip(v.as_chunks::<BLOCK>().0);
        for ((e, v), (q, &scale)) in blocks.zip(elements) {
            left(e, v, q, scale);
        }
    }
}

/// Sets `e` to the residual of `v` after `q`.
#[inline(always)]
fn left(e: &mut [f32], v: &[f32], q: &[u8], scale: u8) {
    if scale == NOT_FINITE {
        return;
    }
    let factor = factor(scale);
    for ((e, v), &q) in e.iter_mut().zip(v).zip(q) {
        *e = v - f32::from(q as i8) * factor;
    }
}

/// The exponent field of the largest magnitude, or 0 if the block is too small to be encoded.
#[inline(always)]
fn exponent(v: &[f32; BLOCK]) -> u32 {
    let largest = v.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7FFF_FFFF));
    let e = largest >> 23;
    if e < SMALLEST { 0 } else { e }
}

/// `2^(k - 127)` for the exponent field `k` of a normal number.
#[inline(always)]
fn power(k: u32) -> f32 {
    f32::from_bits(k << 23)
}

#[inline(always)]
fn nearest(v: &[f32; BLOCK], q: &mut [u8; BLOCK]) -> u8 {
    let e = exponent(v);
    let factor = if e == 0 { 0.0 } else { power(133 + 127 - e) };
    for (q, x) in q.iter_mut().zip(v) {
        let rounded = ((x * factor + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
        // In two steps, because saturating narrowing is one instruction.
        *q = (rounded.clamp(-128, 127) as i8).max(-127) as u8;
    }
    e as u8
}

#[inline(always)]
fn stochastic(v: &[f32; BLOCK], noise: &[u16; BLOCK], q: &mut [u8; BLOCK]) -> u8 {
    let e = exponent(v);
    let live = if e == 0 { 0 } else { u32::MAX };
    for ((q, x), &u) in q.iter_mut().zip(v).zip(noise) {
        // |x| = m * 2^(f - 150) with the exponent field f, so |x| * 2^(149 - E) is m shifted right by E - f +
        // 1. In integers, because the floor of a tiny negative number would depend on whether the product
        // underflows.
        let bits = x.to_bits() & live;
        let f = (bits >> 23) & 0xFF;
        let m = (bits & 0x007F_FFFF) | (u32::from(f != 0) << 23);
        let shift = e.wrapping_sub(f).wrapping_add(1).min(31);
        let down = m >> shift;
        let up = down.wrapping_add(u32::from(down << shift != m));
        let p = if (bits as i32) < 0 { (up as i32).wrapping_neg() } else { down as i32 };
        let drawn = p.wrapping_add(i32::from(u)) >> 16;
        *q = drawn.clamp(-127, 127) as u8;
    }
    e as u8
}

/// Refuses what breaks the contract: a scale of 1..=31 or 255, an element of -128, and a non-zero element
/// under a zero scale. The first two would not decode to what the contract says; the third would be a second
/// encoding of the same value.
/// A bound of the magnitudes. Refuses what no encoder writes.
pub(super) fn validate(isa: Isa, body: &[u8], n: usize) -> Result<f64> {
    let (scales, elements) = body.split_at(n.div_ceil(BLOCK));
    if isa.run(AllCanonical { scales, elements }) {
        return Ok(127.0 * f64::from(factor(scales.iter().copied().max().unwrap_or_default())));
    }
    for (i, (&scale, block)) in scales.iter().zip(elements.chunks(BLOCK)).enumerate() {
        if !is_scale(scale) {
            return Err(Error::new(Kind::Frame, format!("int8: the scale of block {i} is not canonical"))
                .expected("0 or 32 to 254", scale));
        }
        if let Some(j) = block.iter().position(|&q| q == 0x80 || (scale == 0 && q != 0)) {
            let expected = if scale == 0 { "0, as its block's scale is 0" } else { "-127 to 127" };
            return Err(Error::new(Kind::Frame, format!("int8: element {} is not canonical", i * BLOCK + j))
                .expected(expected, block[j] as i8));
        }
    }
    Err(Error::new(Kind::Internal, "int8: the two checks of a body disagree"))
}

#[inline(always)]
fn is_scale(scale: u8) -> bool {
    scale == 0 || (SMALLEST as u8..=254).contains(&scale)
}

struct AllCanonical<'a> {
    scales: &'a [u8],
    elements: &'a [u8],
}

impl Kernel for AllCanonical<'_> {
    type Out = bool;
    #[inline(always)]
    fn run(self) -> bool {
        // Folded, because an early exit would prevent vectorisation.
        let scales = self.scales.iter().fold(true, |good, &s| good & is_scale(s));
        let lowest = self.elements.iter().fold(0, |lowest: i8, &q| lowest.min(q as i8));
        scales && lowest > i8::MIN && (!self.scales.contains(&0) || self.zeros())
    }
}

impl AllCanonical<'_> {
    /// Returns whether all elements under a zero scale are zero.
    #[inline(always)]
    fn zeros(&self) -> bool {
        let blocks = self.elements.chunks(BLOCK).zip(self.scales);
        blocks.filter(|(_, scale)| **scale == 0).all(|(block, _)| block.iter().all(|&q| q == 0))
    }
}

/// A validated body of bytes with block scales.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int8Body<'a> {
    scales: &'a [u8],
    elements: &'a [u8],
}

impl<'a> Int8Body<'a> {
    /// `body` holds `n` elements.
    #[inline(always)]
    pub(crate) fn new(body: &'a [u8], n: usize) -> Self {
        let (scales, elements) = body.split_at(n.div_ceil(BLOCK));
        debug_assert_eq!(elements.len(), n);
        Self { scales, elements }
    }
}

impl Body for Int8Body<'_> {
    type Lane = f32;

    #[inline(always)]
    fn lanes(&self, _range: Range<usize>) -> Option<&[f32]> {
        None
    }

    #[inline(always)]
    fn decode(&self, at: usize, out: &mut [f32]) {
        let elements = &self.elements[at..at + out.len()];
        let scales = &self.scales[at / BLOCK..][..out.len().div_ceil(BLOCK)];
        let (out, out_rest) = out.as_chunks_mut::<BLOCK>();
        let (q, q_rest) = elements.as_chunks::<BLOCK>();
        for ((out, q), &scale) in out.iter_mut().zip(q).zip(scales) {
            scaled(q, scale, out);
        }
        if let (false, Some(&scale)) = (q_rest.is_empty(), scales.last()) {
            scaled(q_rest, scale, out_rest);
        }
    }
}

/// The value of one quantization step of a block.
#[inline(always)]
fn factor(scale: u8) -> f32 {
    // E - 133 + 127 is the exponent field of 2^(E - 133).
    if scale == 0 { 0.0 } else { power(u32::from(scale).wrapping_sub(6)) }
}

#[inline(always)]
fn scaled(q: &[u8], scale: u8, out: &mut [f32]) {
    let factor = factor(scale);
    for (out, &q) in out.iter_mut().zip(q) {
        *out = f32::from(q as i8) * factor;
    }
}
