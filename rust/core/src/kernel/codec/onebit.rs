//! One-bit: the sign of each element, and per 1024 elements the mean of the positive and of the negative ones
//! (Seide et al. 2014, zero threshold). It requires error feedback: without it, the result is biased.
//!
//! Body: per block two float32, the positive and the negative mean (both as magnitudes), then one bit per
//! element, least significant first, set = negative (-0.0 too), pad bits zero. Sums are integers, so their
//! order does not matter. With E the exponent field of the block's largest magnitude:
//!
//! ```text
//! a = trunc(|v| * 2^(150 - E))
//! M = floor((256 * sum of a + floor(count / 2)) / count)     of each side; 0 if it is empty
//! mean = float32(M) * 2^(E - 158)
//! ```
//!
//! Below 2^-95 (E < 32) both means are zero and the residual keeps everything, so every factor is a normal
//! number.

use super::Body;
use super::encode::{Encoder, encode as encode_blocks};
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use std::ops::Range;

/// Elements that share two means.
const BLOCK: usize = crate::base::block::BLOCK;
/// Elements of a block that a body can mark as not finite.
pub(super) const MARKED: Option<usize> = Some(BLOCK);

/// Bytes of a body of `n` elements.
pub(super) fn body_len(n: usize) -> usize {
    8 * n.div_ceil(BLOCK) + n.div_ceil(8)
}
/// Exponent fields below this one give zero means.
const SMALLEST: u32 = 32;
/// Number of partial sums.
const LANES: usize = 16;
/// Elements that are decoded together.
const RUN: usize = 64;
/// Bytes of the two means of a block.
const MEANS: usize = 8;

pub(super) fn encode(isa: Isa, values: &[f32], residual: Option<&mut [f32]>, body: &mut [u8]) {
    encode_blocks(isa, values, residual, OneBitWriter { n: values.len(), body });
}

/// Returns whether the values of a block were finite.
pub(super) fn was_finite(body: &[u8], block: usize) -> bool {
    let mean = body[MEANS * block..].first_chunk();
    mean.is_none_or(|mean| !f32::from_le_bytes(*mean).is_nan())
}

struct OneBitWriter<'a> {
    n: usize,
    body: &'a mut [u8],
}

impl Encoder<BLOCK> for OneBitWriter<'_> {
    #[inline(always)]
    fn block(&mut self, at: usize, v: &[f32; BLOCK], len: usize) {
        let (means, bits) = self.body.split_at_mut(MEANS * self.n.div_ceil(BLOCK));
        // The padding of `v` is +0.0: it adds nothing to a sum and leaves the pad bits zero.
        let signs = signs(v);
        bits[at / 8..][..len.div_ceil(8)].copy_from_slice(&signs[..len.div_ceil(8)]);
        let negative = count(&signs);
        let pair = means_of(v, len as u64 - negative, negative);
        let (means, _) = means.as_chunks_mut::<4>();
        for (mean, value) in means[2 * (at / BLOCK)..][..2].iter_mut().zip(pair) {
            *mean = value.to_le_bytes();
        }
    }

    #[inline(always)]
    fn unsaid(&self, at: usize, v: &[f32; BLOCK], e: &mut [f32]) {
        let [positive, negative] = OneBitBody::new(self.body, self.n).pair(at);
        if positive.is_nan() {
            return;
        }
        for (e, v) in e.iter_mut().zip(v) {
            *e = v - if v.is_sign_negative() { negative } else { positive };
        }
    }
}

/// The sign bits. First a byte for each, 0 or 1; then a product gathers eight of them in its highest byte.
#[inline(always)]
fn signs(v: &[f32; BLOCK]) -> [u8; BLOCK / 8] {
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let mut out = [0; BLOCK / 8];
    for (out, v) in out.as_chunks_mut::<8>().0.iter_mut().zip(v.as_chunks::<64>().0) {
        let mut bytes = [0; 64];
        for (byte, x) in bytes.iter_mut().zip(v) {
            *byte = (x.to_bits() >> 31) as u8;
        }
        for (out, &eight) in out.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *out = (u64::from_le_bytes(eight).wrapping_mul(GATHER) >> 56) as u8;
        }
    }
    out
}

#[inline(always)]
fn count(signs: &[u8; BLOCK / 8]) -> u64 {
    let (words, _) = signs.as_chunks::<8>();
    words.iter().fold(0, |sum, &word| sum + u64::from_le_bytes(word).count_ones()).into()
}

/// The means of the positive and the negative elements, given how many there are of each.
#[inline(always)]
fn means_of(v: &[f32; BLOCK], positive: u64, negative: u64) -> [f32; 2] {
    let largest = v.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7FFF_FFFF));
    let e = largest >> 23;
    if e < SMALLEST {
        return [0.0; 2];
    }
    if e == 0xFF {
        // The caller skipped the check for such values. NaN marks the block, and the server refuses it.
        return [f32::NAN; 2];
    }
    // A lane sums 24 bits of 64 elements: that fits. Lanes are added once, at the end.
    let (mut all, mut below) = ([0; LANES], [0; LANES]);
    for v in v.as_chunks::<LANES>().0 {
        for ((all, below), x) in all.iter_mut().zip(&mut below).zip(v) {
            // |x| = m * 2^(f - 150) with the exponent field f, so |x| * 2^(150 - E) is m shifted right by E -
            // f; for a subnormal, whose f is 0, nothing is left.
            let magnitude = x.to_bits() & 0x7FFF_FFFF;
            let shift = e.wrapping_sub(magnitude >> 23).min(31);
            let a = ((magnitude & 0x007F_FFFF) | 0x0080_0000) >> shift;
            *all = u32::wrapping_add(*all, a);
            *below = u32::wrapping_add(*below, if x.is_sign_negative() { a } else { 0 });
        }
    }
    let [all, below] = [all, below].map(|lanes| lanes.iter().map(|&lane| u64::from(lane)).sum::<u64>());
    let unit = f32::from_bits((e + 127 - 158) << 23);
    [(all - below, positive), (below, negative)].map(|(sum, count)| {
        let mean = (256 * sum + count / 2).checked_div(count).unwrap_or(0);
        mean as f32 * unit
    })
}

/// The largest magnitude. Refuses means that are not finite or carry a sign, and pad bits that are not zero.
pub(super) fn validate(_isa: Isa, body: &[u8], n: usize) -> Result<f64> {
    let (means, bits) = body.split_at(MEANS * n.div_ceil(BLOCK));
    let bad = |&b: &[u8; 4]| u32::from_le_bytes(b) >= 0x7F80_0000;
    let (means, _) = means.as_chunks::<4>();
    if let Some(i) = means.iter().position(bad) {
        return Err(Error::new(Kind::Frame, format!("one-bit: a mean of block {} is not canonical", i / 2))
            .expected("a finite magnitude", f32::from_le_bytes(means[i])));
    }
    match bits.last() {
        Some(last) if !n.is_multiple_of(8) && last >> (n % 8) != 0 => {
            Err(Error::new(Kind::Frame, "one-bit: the pad bits are not zero")
                .expected(format!("zeros above bit {}", n % 8 - 1), format!("{last:#04x}")))
        }
        _ => Ok(means.iter().map(|&b| f32::from_le_bytes(b)).fold(0.0, f32::max).into()),
    }
}

/// A validated body of signs and means.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OneBitBody<'a> {
    means: &'a [[u8; 4]],
    bits: &'a [u8],
}

impl<'a> OneBitBody<'a> {
    /// `body` holds `n` elements.
    #[inline(always)]
    pub(crate) fn new(body: &'a [u8], n: usize) -> Self {
        let (means, bits) = body.split_at(MEANS * n.div_ceil(BLOCK));
        debug_assert_eq!(bits.len(), n.div_ceil(8));
        Self { means: means.as_chunks().0, bits }
    }
}

impl OneBitBody<'_> {
    /// The decoded values of a positive and of a negative element of the block at `at`.
    #[inline(always)]
    fn pair(&self, at: usize) -> [f32; 2] {
        let means = &self.means[2 * (at / BLOCK)..][..2];
        [f32::from_le_bytes(means[0]), -f32::from_le_bytes(means[1])]
    }
}

impl Body for OneBitBody<'_> {
    type Lane = f32;
    /// Its bits serve as masks unchanged.
    const WIDE: bool = true;

    #[inline(always)]
    fn lanes(&self, _range: Range<usize>) -> Option<&[f32]> {
        None
    }

    #[inline(always)]
    fn decode(&self, at: usize, out: &mut [f32]) {
        let pair = self.pair(at);
        let bits = &self.bits[at / 8..][..out.len().div_ceil(8)];
        let (out, rest) = out.as_chunks_mut::<RUN>();
        let (words, last) = bits.split_at(RUN / 8 * out.len());
        for (out, word) in out.iter_mut().zip(words.as_chunks().0) {
            select(word, pair, out);
        }
        if !(rest.is_empty() || crate::base::fault::fault("codec_tail")) {
            let (mut word, mut tail) = ([0; RUN / 8], [0.0; RUN]);
            word[..last.len()].copy_from_slice(last);
            select(&word, pair, &mut tail);
            rest.copy_from_slice(&tail[..rest.len()]);
        }
    }
}

/// The values that bits choose. Two halves of 32 bits, because a vector has as many lanes of a word as of a
/// value.
#[inline(always)]
fn select(bits: &[u8; RUN / 8], [positive, negative]: [f32; 2], out: &mut [f32; RUN]) {
    let bits = u64::from_le_bytes(*bits);
    for (i, out) in out.iter_mut().enumerate() {
        let half = if i < 32 { bits as u32 } else { (bits >> 32) as u32 };
        *out = if half & (1 << (i % 32)) == 0 { positive } else { negative };
    }
}
