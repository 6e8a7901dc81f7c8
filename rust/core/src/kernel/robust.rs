//! The middle of several bodies, element by element: their median and their trimmed mean (Yin et al., 2018).
//!
//! Each block of a body becomes a row of integers that have the order of its values, -0 before +0. A network
//! of exchanges sorts the rows at all elements at once (Batcher's merge exchange; Knuth, TAOCP 3, 5.2.2 M).
//! So the sum of the middle rows depends neither on the order of the bodies nor on the instruction set.

use super::codec::CodecId;
use crate::base::block::{BLOCK, Block, blocks};
use crate::base::isa::{Isa, Kernel};

type Row = [i32; BLOCK];

/// Sets `out` to the sums of its elements in the bodies, each times its factor, without the `trim` smallest
/// and the `trim` largest ones. The bodies are dense ones of `out.len()` elements, more than twice `trim`.
pub(crate) fn sum_of_middle(isa: Isa, bodies: &[(CodecId, &[u8], f32)], trim: usize, out: &mut [f32]) {
    let (n, mut rows, mut values) = (out.len(), vec![[0; BLOCK]; bodies.len()], Block::ZERO);
    for (at, len) in blocks(n) {
        for (row, (codec, body, factor)) in rows.iter_mut().zip(bodies) {
            codec.decode_block(isa, body, n, at, &mut values.0[..len]);
            isa.run(Keys { values: &values.0, factor: *factor, row });
        }
        isa.run(Middle { rows: &mut rows, trim, out: &mut out[at..at + len] });
    }
}

struct Keys<'a> {
    values: &'a [f32; BLOCK],
    factor: f32,
    row: &'a mut Row,
}

impl Kernel for Keys<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (key, value) in self.row.iter_mut().zip(self.values) {
            *key = turned((value * self.factor).to_bits() as i32);
        }
    }
}

/// The bits of a float32 as an integer in the order of the values, and back.
#[inline(always)]
fn turned(bits: i32) -> i32 {
    bits ^ ((bits >> 31) & 0x7FFF_FFFF)
}

struct Middle<'a> {
    rows: &'a mut [Row],
    trim: usize,
    out: &'a mut [f32],
}

impl Kernel for Middle<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Self { rows, trim, out } = self;
        sort(rows);
        out.fill(0.0);
        let kept = trim..rows.len().saturating_sub(trim);
        for row in rows.get(kept).unwrap_or_default() {
            for (sum, key) in out.iter_mut().zip(row) {
                *sum += f32::from_bits(turned(*key) as u32);
            }
        }
    }
}

#[inline(always)]
fn sort(rows: &mut [Row]) {
    let top = rows.len().next_power_of_two() / 2;
    let mut p = top;
    while p > 0 {
        let (mut q, mut r, mut d) = (top, 0, p);
        loop {
            for i in (0..rows.len().saturating_sub(d)).filter(|i| i & p == r) {
                exchange(rows, i, i + d);
            }
            if q == p {
                break;
            }
            (d, q, r) = (q - p, q / 2, p);
        }
        p /= 2;
    }
}

/// Moves the smaller elements of two rows to the first one.
#[inline(always)]
fn exchange(rows: &mut [Row], first: usize, second: usize) {
    let (before, after) = rows.split_at_mut(second);
    if let (Some(low), Some(high)) = (before.get_mut(first), after.first_mut()) {
        for (low, high) in low.iter_mut().zip(high) {
            (*low, *high) = ((*low).min(*high), (*low).max(*high));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_that_of_sorted_values() {
        let n = BLOCK + 67;
        let odd = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, f32::MAX, f32::MIN, 2.5, -2.5];
        for count in 1..=32_usize {
            let value = |k: usize, i: usize| {
                let mixed = (k * 7919 + i * 104_729 + k * i * 31) % 1009;
                if mixed < 40 { odd[mixed % odd.len()] } else { mixed as f32 - 500.0 }
            };
            let bodies: Vec<Vec<u8>> =
                (0..count).map(|k| (0..n).flat_map(|i| value(k, i).to_le_bytes()).collect()).collect();
            for trim in [0, (count - 1) / 3, (count - 1) / 2] {
                let expected: Vec<u32> = (0..n)
                    .map(|i| {
                        let mut all: Vec<f32> = (0..count).map(|k| value(k, i)).collect();
                        all.sort_by(f32::total_cmp);
                        all[trim..count - trim].iter().fold(0.0_f32, |sum, x| sum + x).to_bits()
                    })
                    .collect();
                for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                    for turn in [0, count / 2] {
                        let mut parts: Vec<_> =
                            bodies.iter().map(|body| (CodecId::Float32, &body[..], 1.0)).collect();
                        parts.rotate_left(turn);
                        let mut out = vec![f32::NAN; n];
                        sum_of_middle(isa, &parts, trim, &mut out);
                        let got: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
                        assert!(got == expected, "{count} bodies, trim {trim}, {}", isa.name());
                    }
                }
            }
        }
    }
}
