//! Steps that may overflow: a finite gradient times a large rate, or its square, can exceed the range of a
//! float. Slices take such a step on trial. An overflow through many ordinary steps is found by an occasional
//! scan.

use super::codec::{CodecId, widen_bfloat16};
use super::optim::Optimizer;
use crate::base::dtype::DType;
use crate::base::isa::Isa;

/// Terms of a float32 step up to this size cannot, in one step, drive values that are far from the largest
/// float32 to infinity.
const LIMIT_FLOAT32: f64 = (1_u128 << 100) as f64;
/// The limit for float64: 2^1000.
const LIMIT_FLOAT64: f64 = f64::from_bits((1023 + 1000) << 52);
/// A slice is scanned each time that its pushes have touched this many times its elements: a scan costs less
/// than half of a step.
const TOUCHES: u64 = 128;

/// The size that the terms of one step may have.
pub(crate) fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::Float32 | DType::BFloat16 => LIMIT_FLOAT32,
        DType::Float64 => LIMIT_FLOAT64,
    }
}

/// Returns whether one step at a rate, with a gradient whose largest magnitude is `largest`, may overflow.
#[inline(always)]
pub(crate) fn may_overflow(optimizer: &Optimizer, dtype: DType, lr: f64, largest: f64) -> bool {
    let term = optimizer.largest_term(lr, largest);
    largest.max(lr).max(lr * largest).max(term) > limit(dtype)
}

/// Returns whether a slice with `len` elements is to be scanned after the step that made this version and
/// touched some of them.
#[inline(always)]
pub(crate) fn is_due(version: u64, len: usize, touched: usize) -> bool {
    if touched >= len {
        return version.is_multiple_of(TOUCHES);
    }
    version.is_multiple_of(TOUCHES * len as u64 / touched.max(1) as u64)
}

/// Returns whether all of an array's values are finite.
pub(crate) fn is_finite(isa: Isa, dtype: DType, array: &[u8]) -> bool {
    CodecId::plain(dtype).validate(isa, array, array.len() / dtype.size()).is_ok()
}

/// Index and value of the first element that was finite before a step and is not after it.
pub(crate) fn first_overflow(dtype: DType, before: &[u8], after: &[u8]) -> Option<(usize, f64)> {
    let value = |bytes: &[u8]| match dtype {
        DType::Float32 => bytes.try_into().map_or(f64::NAN, |bytes| f32::from_le_bytes(bytes).into()),
        DType::Float64 => bytes.try_into().map_or(f64::NAN, f64::from_le_bytes),
        DType::BFloat16 => bytes.try_into().map_or(f64::NAN, |bytes| widen_bfloat16(bytes).into()),
    };
    let both = before.chunks(dtype.size()).zip(after.chunks(dtype.size()));
    let values = both.map(|(before, after)| (value(before), value(after))).enumerate();
    values
        .filter(|(_, (before, after))| before.is_finite() && !after.is_finite())
        .map(|(i, (_, x))| (i, x))
        .next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::optim::{Adam, Ftrl, Sgd};

    #[test]
    fn large_terms_may_overflow() {
        let (sgd, adam) = (Optimizer::Sgd(Sgd::default()), Optimizer::Adam(Adam::default()));
        let ftrl = Optimizer::Ftrl(Ftrl::default());
        for (optimizer, dtype, lr, largest, may) in [
            (&sgd, DType::Float32, 0.1, 1e30, false),
            (&sgd, DType::Float32, 1e10, 1e25, true),
            (&sgd, DType::Float32, 1e-10, 1e31, true),
            (&sgd, DType::Float32, 1e31, 0.0, true),
            (&sgd, DType::Float64, 1e10, 1e30, false),
            (&sgd, DType::Float64, 1e10, 1e300, true),
            (&adam, DType::Float32, 0.1, 1e15, false),
            (&adam, DType::Float32, 0.1, 1e16, true),
            (&ftrl, DType::Float32, 1e-30, 1.0, false),
            (&ftrl, DType::Float32, 1e-30, 10.0, true),
            (&ftrl, DType::Float32, 0.0, 0.0, false),
        ] {
            assert_eq!(may_overflow(optimizer, dtype, lr, largest), may, "{optimizer} {lr} {largest}");
        }
    }

    #[test]
    fn a_slice_is_scanned_in_proportion_to_what_pushes_touch() {
        let scans = |len, touched| (1..=12_800).filter(|version| is_due(*version, len, touched)).count();
        assert_eq!([scans(1000, 1000), scans(0, 0), scans(1000, 100), scans(1000, 0)], [100, 100, 10, 0]);
    }

    #[test]
    fn the_first_element_that_became_infinite_is_found() {
        let floats = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
        let (before, after) = ([f32::INFINITY, 1.0, 2.0], [f32::INFINITY, 5.0, f32::NEG_INFINITY]);
        let found = first_overflow(DType::Float32, &floats(&before), &floats(&after));
        assert_eq!(found, Some((2, f64::NEG_INFINITY)));
        assert_eq!(first_overflow(DType::Float32, &floats(&after), &floats(&after)), None);
        let (before, after) = (1.0_f64.to_le_bytes(), f64::NAN.to_le_bytes());
        assert!(first_overflow(DType::Float64, &before, &after).is_some_and(|(i, x)| i == 0 && x.is_nan()));
    }
}
