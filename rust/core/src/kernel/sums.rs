//! Inner products and largest magnitudes of vectors: the same bits on every instruction set.
//!
//! An inner product is accumulated in float64: element i is added to lane i mod 16 by a fused multiply-add,
//! and the lanes are joined by a fixed tree. A block of inner products reads every vector once, and gives the
//! same bits as its products one by one.

use super::real::Real;
use crate::base::block::blocks;
use crate::base::isa::{Isa, Kernel};

/// Sums that run side by side: enough to hide the latency of an addition on every instruction set.
const LANES: usize = 16;
/// Columns whose sums stay in registers together.
const TILE: usize = 3;

type Lanes = [f64; LANES];

/// Adds the products of a row's elements with those of several columns, all of one length.
#[inline(always)]
fn accumulate<T: Real, const N: usize>(row: &[T], columns: [&[T]; N], into: [&mut Lanes; N]) {
    let mut sums: [Lanes; N] = std::array::from_fn(|k| *into[k]);
    let (chunks, rest) = row.as_chunks::<LANES>();
    let columns: [(&[[T; LANES]], &[T]); N] = columns.map(|column| column.as_chunks());
    for (i, x) in chunks.iter().enumerate() {
        for (sum, (chunks, _)) in sums.iter_mut().zip(&columns) {
            let y = &chunks[i];
            for lane in 0..LANES {
                sum[lane] = x[lane].wide().mul_add(y[lane].wide(), sum[lane]);
            }
        }
    }
    for (sum, (_, column_rest)) in sums.iter_mut().zip(&columns) {
        for (lane, (x, y)) in rest.iter().zip(*column_rest).enumerate() {
            sum[lane] = x.wide().mul_add(y.wide(), sum[lane]);
        }
    }
    for (into, sum) in into.into_iter().zip(sums) {
        *into = sum;
    }
}

/// Joins the lanes: halves are added until one is left.
#[inline(always)]
fn join(mut lanes: Lanes) -> f64 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

struct InnerProduct<'a, T> {
    x: &'a [T],
    y: &'a [T],
}

impl<T: Real> Kernel for InnerProduct<'_, T> {
    type Out = f64;
    #[inline(always)]
    fn run(self) -> f64 {
        let mut lanes = [0.0; LANES];
        accumulate(self.x, [self.y], [&mut lanes]);
        join(lanes)
    }
}

/// The inner product of two vectors of one length.
pub(crate) fn dot<T: Real>(isa: Isa, x: &[T], y: &[T]) -> f64 {
    isa.run(InnerProduct { x, y })
}

struct ProductBlock<'a, T> {
    rows: &'a [&'a [T]],
    columns: &'a [&'a [T]],
}

impl<T: Real> Kernel for ProductBlock<'_, T> {
    type Out = Vec<f64>;
    #[inline(always)]
    fn run(self) -> Vec<f64> {
        let Self { rows, columns } = self;
        let mut sums = vec![[0.0; LANES]; rows.len() * columns.len()];
        let n = rows.first().map_or(0, |row| row.len());
        for (at, len) in blocks(n) {
            for (row, sums) in rows.iter().zip(sums.chunks_exact_mut(columns.len().max(1))) {
                let row = &row[at..at + len];
                let (tiles, rest) = columns.as_chunks::<TILE>();
                let (tile_sums, rest_sums) = sums.as_chunks_mut::<TILE>();
                for (tile, sums) in tiles.iter().zip(tile_sums) {
                    accumulate(row, tile.map(|x| &x[at..at + len]), sums.each_mut());
                }
                for (column, sum) in rest.iter().zip(rest_sums) {
                    accumulate(row, [&column[at..at + len]], [sum]);
                }
            }
        }
        sums.into_iter().map(join).collect()
    }
}

/// The inner products of all rows with all columns, row by row, in one pass. All vectors have one length.
pub(crate) fn products<T: Real>(isa: Isa, rows: &[&[T]], columns: &[&[T]]) -> Vec<f64> {
    isa.run(ProductBlock { rows, columns })
}

struct LargestMagnitude<'a, T>(&'a [T]);

/// The bits of a magnitude order as the magnitudes do; NaN is above infinity.
const MAGNITUDE: u64 = !(1 << 63);

impl<T: Real> Kernel for LargestMagnitude<'_, T> {
    type Out = f64;
    #[inline(always)]
    fn run(self) -> f64 {
        let mut lanes = [0; LANES];
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        for chunk in chunks {
            for (largest, x) in lanes.iter_mut().zip(chunk) {
                *largest = (x.wide().to_bits() & MAGNITUDE).max(*largest);
            }
        }
        let rest = rest.iter().map(|x| x.wide().to_bits() & MAGNITUDE);
        f64::from_bits(lanes.into_iter().chain(rest).max().unwrap_or(0))
    }
}

/// The largest magnitude among the elements: NaN if one is NaN, 0 if there are none.
pub(crate) fn max_abs<T: Real>(isa: Isa, x: &[T]) -> f64 {
    isa.run(LargestMagnitude(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of both signs whose magnitudes differ by up to 2^40.
    fn values(n: usize, seed: u64) -> Vec<f64> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let scale = f64::from(2.0_f32).powi((state >> 58) as i32 - 32);
                ((state >> 11) as f64 / (1_u64 << 53) as f64 - 0.5) * scale
            })
            .collect()
    }

    /// The formula of the header, element by element.
    fn plain(x: &[f64], y: &[f64]) -> f64 {
        let mut lanes = [0.0_f64; LANES];
        for (i, (x, y)) in x.iter().zip(y).enumerate() {
            lanes[i % LANES] = x.mul_add(*y, lanes[i % LANES]);
        }
        let add = |a: &[f64]| a[..a.len() / 2].iter().zip(&a[a.len() / 2..]).map(|(a, b)| a + b).collect();
        let (eight, four, two): (Vec<f64>, Vec<f64>, Vec<f64>);
        eight = add(&lanes);
        four = add(&eight);
        two = add(&four);
        two[0] + two[1]
    }

    const LENGTHS: [usize; 10] = [0, 1, 15, 16, 17, 1023, 1024, 1025, 4099, 20_000];

    fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    #[test]
    fn every_instruction_set_computes_the_same_products() {
        for n in LENGTHS {
            let (x, y) = (values(n, 1), values(n, 2));
            let narrow = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<_>>();
            let (x32, y32) = (narrow(&x), narrow(&y));
            let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
            let (expected, expected32) = (plain(&x, &y), plain(&wide(&x32), &wide(&y32)));
            for isa in available() {
                assert_eq!(dot(isa, &x, &y).to_bits(), expected.to_bits(), "{isa:?}, {n}");
                assert_eq!(dot(isa, &x32, &y32).to_bits(), expected32.to_bits(), "{isa:?}, {n}");
            }
        }
    }

    #[test]
    fn a_block_has_the_bits_of_its_products_one_by_one() {
        for (n, rows, columns) in [(1025, 3, 21), (4099, 1, 1), (5000, 2, 4), (0, 2, 2), (17, 5, 3)] {
            let vectors: Vec<_> = (0..rows + columns).map(|k| values(n, k as u64)).collect();
            let vectors: Vec<&[f64]> = vectors.iter().map(Vec::as_slice).collect();
            let (rows, columns) = vectors.split_at(rows);
            for isa in available() {
                let block = products(isa, rows, columns);
                let one = |row: &&[f64]| columns.iter().map(|c| dot(isa, row, c)).collect::<Vec<_>>();
                assert_eq!(block, rows.iter().flat_map(one).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn largest_magnitudes_are_exact_and_show_what_is_not_finite() {
        for n in LENGTHS {
            let x = values(n, 3);
            let expected = x.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
            for isa in available() {
                assert_eq!(max_abs(isa, &x), expected);
                for at in [0, n / 2, n.saturating_sub(1)] {
                    let mut bad = x.clone();
                    let Some(value) = bad.get_mut(at) else { continue };
                    *value = f64::NEG_INFINITY;
                    assert_eq!(max_abs(isa, &bad), f64::INFINITY);
                    bad[at] = f64::NAN;
                    assert!(max_abs(isa, &bad).is_nan());
                }
            }
        }
    }
}
