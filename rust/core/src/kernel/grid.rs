//! Sums of floats that do not depend on the order: every value is rounded to a multiple of one quantum, and
//! the multiples are added as integers.
//!
//! A multiple is kept in two 64-bit lanes, `high 2^40 + low`. The quantum is 2^-60 of the power of two below
//! the largest magnitude expected, and values up to 2^21 times that power fit: 81 bits and a sign, which
//! leaves room for [`MAX_TERMS`] terms. A term is rounded to the nearest multiple, so a sum of n terms is
//! within n/2 quanta of the exact one; its value is the float64 nearest to the sum of the multiples.

use super::real::Real;
use crate::base::isa::{Isa, Kernel};

/// Most terms of a sum.
pub(crate) const MAX_TERMS: u32 = 1 << 16;
/// Bits of the low lane.
const LOW: i32 = 40;
/// Bits of the high lane below the largest magnitude expected.
const BELOW: i32 = 20;
/// Bits of the high lane above it, and by how much a coarser grid is coarser.
const ABOVE: i32 = 20;
/// Smallest exponent of the high lane's unit: below, a quantum would not be a normal float.
const MIN_UNIT: i32 = -960;
/// Largest exponent of the high lane's unit: above, its inverse would not be.
const MAX_UNIT: i32 = 1003;

/// Largest exponent of a float.
const MAX_EXPONENT: i32 = 1023;

/// The multiples that a sum counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Exponent of the high lane's unit.
    unit: i32,
}

impl Grid {
    /// The grid for values whose largest magnitude is about this; `None` for 0 and for NaN or infinity.
    pub(crate) fn for_largest(largest: f64) -> Option<Self> {
        (largest.is_finite() && largest > 0.0).then(|| Self::of_unit(exponent(largest) - BELOW))
    }

    fn of_unit(unit: i32) -> Self {
        Self { unit: unit.clamp(MIN_UNIT, MAX_UNIT) }
    }

    /// A grid that reaches 2^20 times as far, `steps` times over.
    pub(crate) fn coarser(self, steps: u32) -> Self {
        let steps = i32::try_from(steps).unwrap_or(i32::MAX);
        Self::of_unit(self.unit.saturating_add(ABOVE.saturating_mul(steps)))
    }

    /// Largest magnitude that fits.
    pub(crate) fn limit(self) -> f64 {
        let limit = self.unit + BELOW + ABOVE + 1;
        if limit > MAX_EXPONENT { f64::MAX } else { power(limit) }
    }

    /// The number by which logs and snapshots keep it.
    pub(crate) fn number(self) -> i32 {
        self.unit
    }

    /// The grid with a number; `None` if there is none.
    pub(crate) fn of_number(unit: i32) -> Option<Self> {
        (MIN_UNIT..=MAX_UNIT).contains(&unit).then_some(Self { unit })
    }
}

/// The exponent of the power of two at or below a positive, finite number; -1023 below the normal ones.
fn exponent(x: f64) -> i32 {
    (x.to_bits() >> 52) as i32 - 1023
}

/// 2^k, for k from -1022 to 1023.
fn power(k: i32) -> f64 {
    f64::from_bits(((k + 1023) as u64) << 52)
}

/// The bits of 1.5 x 2^52: a float64 of that size has units of 1, so adding it rounds to an integer, in the
/// lowest bits.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// The integer nearest to `x`, below 2^51 in magnitude, as a float and as an integer.
#[inline(always)]
fn to_integer(x: f64) -> (f64, i64) {
    let shifted = x + ROUND;
    (shifted - ROUND, shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i64)
}

/// The float equal to an integer below 2^51 in magnitude.
#[inline(always)]
fn to_float(n: i64) -> f64 {
    f64::from_bits(ROUND.to_bits().wrapping_add(n as u64)) - ROUND
}

struct GridAdd<'a, T> {
    high: &'a mut [i64],
    low: &'a mut [i64],
    values: &'a [T],
    /// 2^-unit.
    scale: f64,
}

impl<T: Real> Kernel for GridAdd<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Self { high, low, values, scale } = self;
        for ((high, low), x) in high.iter_mut().zip(low).zip(values) {
            let units = x.wide() * scale;
            let (whole, n) = to_integer(units);
            // Never wraps: a sum has few enough terms.
            *high = high.wrapping_add(n);
            *low = low.wrapping_add(to_integer((units - whole) * power(LOW)).1);
        }
    }
}

struct GridValue<'a, T> {
    to: &'a mut [T],
    high: &'a [i64],
    low: &'a [i64],
    /// 2^unit.
    scale: f64,
}

impl<T: Real> Kernel for GridValue<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Self { to, high, low, scale } = self;
        for ((to, high), low) in to.iter_mut().zip(high).zip(low) {
            // Floats hold 53 bits, so the sum is cut into three exact parts of fewer.
            let carry = low.wrapping_add(1 << (LOW - 1)) >> LOW;
            let (units, fraction) =
                (high.wrapping_add(carry), to_float(low.wrapping_sub(carry << LOW)) * power(-LOW));
            let top = units.wrapping_add(1 << 31) >> 32;
            let (top, rest) = (to_float(top) * power(32), to_float(units.wrapping_sub(top << 32)));
            // Nearly all is in `sum`; the rest after rounding is exact, also together with the fraction.
            let sum = top + rest;
            let left = rest - (sum - top);
            *to = T::nearest((sum + (left + fraction)) * scale);
        }
    }
}

/// A sum in progress: a multiple of the grid's quantum for each element.
#[derive(Debug)]
pub(crate) struct GridSum {
    high: Vec<i64>,
    low: Vec<i64>,
}

impl GridSum {
    /// Bytes of memory for each element.
    pub(crate) const BYTES: usize = 2 * size_of::<i64>();

    /// `len` zeros, all written here, so that the first term takes no page faults.
    pub(crate) fn zeros(len: usize) -> Self {
        let (mut high, mut low) = (Vec::new(), Vec::new());
        high.resize(len, 0);
        low.resize(len, 0);
        Self { high, low }
    }

    /// Begins again with zeros.
    pub(crate) fn clear(&mut self) {
        self.high.fill(0);
        self.low.fill(0);
    }

    /// Adds values of at most the grid's limit in magnitude.
    pub(crate) fn add<T: Real>(&mut self, isa: Isa, grid: Grid, values: &[T]) {
        isa.run(GridAdd { high: &mut self.high, low: &mut self.low, values, scale: power(-grid.unit) });
    }

    /// Writes the sum to `to`.
    pub(crate) fn write<T: Real>(&self, isa: Isa, grid: Grid, to: &mut [T]) {
        isa.run(GridValue { to, high: &self.high, low: &self.low, scale: power(grid.unit) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Values up to `2^spread` times smaller than 1.
    fn values(n: usize, seed: u64, spread: i32) -> Vec<f64> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let scale = power(-((state >> 40) as i32 % (spread + 1)));
                ((state >> 11) as f64 / (1_u64 << 53) as f64 - 0.5) * scale
            })
            .collect()
    }

    /// A float as a multiple of 2^-1074 would need 2,100 bits: these have exponents near 0, and multiples of
    /// 2^-120 are exact.
    fn exact(x: f64) -> i128 {
        let (bits, sign) = (x.to_bits(), if x < 0.0 { -1 } else { 1 });
        let mantissa = i128::from(bits & ((1 << 52) - 1) | (1 << 52));
        let shift = exponent(x.abs()) - 52 + 120;
        if x == 0.0 { 0 } else { sign * (mantissa << shift) }
    }

    #[test]
    fn a_sum_is_within_half_a_quantum_per_term_of_the_exact_one() {
        const TERMS: u64 = 64;
        let n = 300;
        let terms: Vec<_> = (0..TERMS).map(|k| values(n, k + 1, 12)).collect();
        let largest = terms.iter().flatten().fold(0.0, |most: f64, x| most.max(x.abs()));
        let grid = Grid::for_largest(largest).unwrap();
        // 2^-120 is the unit of `exact`.
        let quantum = 1_i128 << (grid.unit - LOW + 120);
        assert!(quantum <= exact(largest) >> 60);
        for isa in available() {
            let mut sum = GridSum::zeros(n);
            for term in &terms {
                sum.add(isa, grid, term);
            }
            let mut rounded = vec![0.0; n];
            sum.write(isa, grid, &mut rounded);
            for i in 0..n {
                let expected: i128 = terms.iter().map(|term| exact(term[i])).sum();
                let multiple = (i128::from(sum.high[i]) << LOW) + i128::from(sum.low[i]);
                let error = (multiple * quantum - expected).abs();
                assert!(2 * error <= i128::from(TERMS) * quantum, "{error} of {quantum}");
                // The written value is the float64 nearest to the multiple.
                assert_eq!(rounded[i], multiple as f64 * power(grid.unit - LOW));
            }
        }
    }

    #[test]
    fn the_largest_sum_fits_and_is_rounded_to_the_nearest_float() {
        let grid = Grid::for_largest(1.0).unwrap();
        let term = [grid.limit(), -grid.limit(), grid.limit() * (1.0 - f64::EPSILON), 1.0 / 3.0, 0.0];
        for isa in available() {
            let mut sum = GridSum::zeros(term.len());
            for _ in 0..MAX_TERMS {
                sum.add(isa, grid, &term);
            }
            let (mut wide, mut narrow) = ([0.0_f64; 5], [0.0_f32; 5]);
            sum.write(isa, grid, &mut wide);
            sum.write(isa, grid, &mut narrow);
            for k in 0..term.len() {
                let multiple = (i128::from(sum.high[k]) << LOW) + i128::from(sum.low[k]);
                assert_eq!(wide[k], multiple as f64 * power(grid.unit - LOW), "{k}");
                assert_eq!(narrow[k], wide[k] as f32);
            }
            assert_eq!(wide[0], grid.limit() * f64::from(MAX_TERMS));
        }
    }

    #[test]
    fn all_orders_and_instruction_sets_have_the_same_bits() {
        let terms: Vec<_> = (0..40_u64).map(|k| values(1000, k + 7, 50)).collect();
        let grid = Grid::for_largest(0.5).unwrap();
        let mut expected: Option<Vec<u64>> = None;
        for (order, isa) in (0..6).flat_map(|order| available().map(move |isa| (order, isa))) {
            let mut sum = GridSum::zeros(1000);
            for k in 0..terms.len() {
                sum.add(isa, grid, &terms[(k * [1, 3, 7, 9, 11, 39][order] + 5 * order) % terms.len()]);
            }
            let mut written = vec![0.0_f64; 1000];
            sum.write(isa, grid, &mut written);
            let bits: Vec<_> = written.iter().map(|x| x.to_bits()).collect();
            assert_eq!(expected.get_or_insert_with(|| bits.clone()), &bits);
        }
    }

    #[test]
    fn grids_reach_from_the_smallest_to_the_largest_floats() {
        for largest in [f64::MIN_POSITIVE / 4.0, 1e-300, 1e-30, 1.0, 1e30, f64::MAX] {
            let grid = Grid::for_largest(largest).unwrap();
            assert!(grid.limit() >= largest);
            for isa in available() {
                let mut sum = GridSum::zeros(2);
                sum.add(isa, grid, &[largest, -largest]);
                let mut written = [0.0; 2];
                sum.write(isa, grid, &mut written);
                let tolerance = largest * power(-52) + power(MIN_UNIT - LOW);
                assert!((written[0] - largest).abs() <= tolerance && written[1] == -written[0]);
            }
            assert_eq!(Grid::of_number(grid.number()), Some(grid));
            assert!(grid.coarser(200).limit() == f64::MAX);
        }
        for none in [0.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Grid::for_largest(none), None);
        }
        assert_eq!(Grid::of_number(MAX_UNIT + 1), None);
    }
}
