//! Inner products and largest magnitudes of vectors: the same bits on every instruction set.
//!
//! An inner product is accumulated in float64: element i is added to lane i mod 16 by a fused multiply-add,
//! and the lanes are joined by a fixed tree. A block of inner products reads every vector once, and gives the
//! same bits as its products one by one.

use super::real::Real;
use crate::base::isa::{Isa, Kernel, prefetch};
use std::array::from_fn;
use std::ops::Range;

/// Sums that run side by side: enough to hide the latency of an addition on every instruction set.
const LANES: usize = 16;
/// Rows of a tile: products of several rows and columns are added together, so that each element is converted
/// to float64 once for all of them.
const ROWS: usize = 3;
/// Columns of a tile on AVX-512, whose registers hold this many sums; elsewhere a tile has one column.
const COLUMNS: usize = 3;
/// Chunks of a column that are added before the next column: a run of them stays in the second-level cache
/// until it has met every row.
const RUN: usize = 512;
/// Chunks by which a column is prefetched: the CPU does not follow this many vectors itself.
const AHEAD: usize = 64;

type Lanes = [f64; LANES];
/// A vector in chunks of one element for each lane, and the rest.
type Chunks<'a, T> = (&'a [[T; LANES]], &'a [T]);

#[inline(always)]
fn chunks<T>(vector: &[T]) -> Chunks<'_, T> {
    vector.as_chunks()
}

/// Adds the products of a run's chunks, of every row with every column.
#[inline(always)]
fn accumulate<T: Real, const R: usize, const C: usize>(
    rows: [&[[T; LANES]]; R],
    columns: [&[[T; LANES]]; C],
    run: Range<usize>,
    sums: &mut [[Lanes; C]; R],
) {
    let mut added = *sums;
    let len = run.len();
    let (rows, now) = (rows.map(|x| &x[run.clone()][..len]), columns.map(|y| &y[run.clone()][..len]));
    let later = columns.map(|y| &y[y.len().min(run.start + AHEAD)..]);
    for i in 0..len {
        let mut x = [[0.0; LANES]; R];
        if C > 1 {
            for r in 0..R {
                for lane in 0..LANES {
                    x[r][lane] = rows[r][i][lane].wide();
                }
            }
        }
        for c in 0..C {
            if let Some(later) = later[c].get(i) {
                prefetch(later);
            }
            let mut y = [0.0; LANES];
            for lane in 0..LANES {
                y[lane] = now[c][i][lane].wide();
            }
            for r in 0..R {
                for lane in 0..LANES {
                    // With one column, a converted row would only take registers.
                    let x = if C > 1 { x[r][lane] } else { rows[r][i][lane].wide() };
                    added[r][c][lane] = x.mul_add(y[lane], added[r][c][lane]);
                }
            }
        }
    }
    *sums = added;
}

/// Adds the products of the elements after the chunks.
#[inline(always)]
fn add_rest<T: Real>(x: &[T], y: &[T], lanes: &mut Lanes) {
    for (lane, (x, y)) in x.iter().zip(y).enumerate() {
        lanes[lane] = x.wide().mul_add(y.wide(), lanes[lane]);
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
        let ((x, x_rest), (y, y_rest)) = (chunks(self.x), chunks(self.y));
        for (x, y) in x.iter().zip(y) {
            for lane in 0..LANES {
                lanes[lane] = x[lane].wide().mul_add(y[lane].wide(), lanes[lane]);
            }
        }
        add_rest(x_rest, y_rest, &mut lanes);
        join(lanes)
    }
}

/// The inner product of two vectors of one length.
pub(crate) fn dot<T: Real>(isa: Isa, x: &[T], y: &[T]) -> f64 {
    isa.run(InnerProduct { x, y })
}

struct ProductBlock<'a, T, const C: usize> {
    rows: &'a [&'a [T]],
    columns: &'a [&'a [T]],
}

impl<T: Real, const C: usize> Kernel for ProductBlock<'_, T, C> {
    type Out = Vec<f64>;
    #[inline(always)]
    fn run(self) -> Vec<f64> {
        let (rows, columns): (Vec<_>, Vec<_>) =
            (self.rows.iter().map(|x| chunks(x)).collect(), self.columns.iter().map(|y| chunks(y)).collect());
        let mut sums = vec![[0.0; LANES]; rows.len() * columns.len()];
        let n = rows.first().map_or(0, |(chunks, _)| chunks.len());
        for start in (0..n).step_by(RUN) {
            let run = start..n.min(start + RUN);
            for c in (0..columns.len()).step_by(C) {
                let whole = columns.len() - c >= C;
                for r in (0..rows.len()).step_by(ROWS) {
                    let tile = Tile { rows: &rows, columns: &columns, first: (r, c), run: run.clone() };
                    match (rows.len() - r, whole) {
                        (1, true) => tile.add::<1, C>(&mut sums),
                        (2, true) => tile.add::<2, C>(&mut sums),
                        (_, true) => tile.add::<ROWS, C>(&mut sums),
                        (left, false) => tile.add_singly(left.min(ROWS), &mut sums),
                    }
                }
            }
        }
        for (r, (_, x)) in rows.iter().enumerate() {
            for (c, (_, y)) in columns.iter().enumerate() {
                add_rest(x, y, &mut sums[r * columns.len() + c]);
            }
        }
        sums.into_iter().map(join).collect()
    }
}

/// Some rows and columns, from the first ones given on, and a run of their chunks.
struct Tile<'a, T> {
    rows: &'a [Chunks<'a, T>],
    columns: &'a [Chunks<'a, T>],
    first: (usize, usize),
    run: Range<usize>,
}

impl<T: Real> Tile<'_, T> {
    /// Adds the products of R rows with C columns.
    #[inline(always)]
    fn add<const R: usize, const C: usize>(&self, sums: &mut [Lanes]) {
        let (row, column) = self.first;
        let place = |r: usize, c: usize| (row + r) * self.columns.len() + column + c;
        let mut added: [[Lanes; C]; R] = from_fn(|r| from_fn(|c| sums[place(r, c)]));
        let rows = from_fn(|r| self.rows[row + r].0);
        accumulate(rows, from_fn(|c| self.columns[column + c].0), self.run.clone(), &mut added);
        for (r, row) in added.into_iter().enumerate() {
            for (c, lanes) in row.into_iter().enumerate() {
                sums[place(r, c)] = lanes;
            }
        }
    }

    /// Adds the products of `rows` rows with all remaining columns, one by one.
    #[inline(always)]
    fn add_singly(&self, rows: usize, sums: &mut [Lanes]) {
        let (row, column) = self.first;
        for r in row..row + rows {
            for c in column..self.columns.len() {
                Tile { first: (r, c), run: self.run.clone(), ..*self }.add::<1, 1>(sums);
            }
        }
    }
}

/// The inner products of all rows with all columns, row by row, in one pass. All vectors have one length.
pub(crate) fn products<T: Real>(isa: Isa, rows: &[&[T]], columns: &[&[T]]) -> Vec<f64> {
    if isa == Isa::Avx512 {
        isa.run(ProductBlock::<T, COLUMNS> { rows, columns })
    } else {
        isa.run(ProductBlock::<T, 1> { rows, columns })
    }
}

struct LargestMagnitude<'a, T>(&'a [T]);

impl<T: Real> Kernel for LargestMagnitude<'_, T> {
    type Out = f64;
    #[inline(always)]
    fn run(self) -> f64 {
        // The compiler keeps several vectors of maxima apart.
        let mut largest = T::Magnitude::default();
        for x in self.0 {
            largest = largest.max(x.magnitude());
        }
        T::of_magnitude(largest)
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
