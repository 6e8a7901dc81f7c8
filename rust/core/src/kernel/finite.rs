//! The check for NaN and infinity. It scans a whole push before the first byte is sent or the first slice
//! changes, and finds the largest magnitude, which says whether a step may overflow.

use super::sums::max_abs;
use crate::base::block::blocks;
use crate::base::dtype::{View, widened};
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};

struct Scan<'a> {
    values: &'a [f32],
    residual: Option<&'a [f32]>,
}

impl Kernel for Scan<'_> {
    type Out = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let mut worst = 0;
        for (at, len) in blocks(self.values.len()) {
            let values = &self.values[at..at + len];
            match self.residual {
                None => values.iter().for_each(|x| worst = worst.max(magnitude(*x))),
                Some(residual) => values
                    .iter()
                    .zip(&residual[at..at + len])
                    .for_each(|(x, e)| worst = worst.max(magnitude(*x + *e))),
            }
        }
        worst
    }
}

#[inline(always)]
fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7FFF_FFFF
}

/// The largest magnitude of `values` (plus `residual`, if given, of the same length). Fails with the index of
/// the first element that is not finite.
pub fn check(isa: Isa, values: &[f32], residual: Option<&[f32]>) -> Result<f64> {
    let largest = f32::from_bits(isa.run(Scan { values, residual }));
    if largest.is_finite() {
        return Ok(largest.into());
    }
    let sum = |i: usize| residual.map_or(values[i], |e| values[i] + e[i]);
    let index = (0..values.len()).find(|i| !sum(*i).is_finite()).unwrap_or(0);
    Err(not_finite(index, sum(index)))
}

/// As [`check`], for values of any type.
pub fn check_view(isa: Isa, values: View<'_>) -> Result<f64> {
    match values {
        View::Float32(values) => check(isa, values, None),
        View::Float64(values) => {
            let largest = max_abs(isa, values);
            if largest.is_finite() {
                return Ok(largest);
            }
            let index = values.iter().position(|x| !x.is_finite()).unwrap_or(0);
            Err(not_finite(index, values[index]))
        }
        View::BFloat16(bits) => {
            let value = |bits: &u16| widened(*bits);
            if let Some((index, value)) = bits.iter().map(value).enumerate().find(|(_, x)| !x.is_finite()) {
                return Err(not_finite(index, value));
            }
            Ok(bits.iter().map(value).fold(0.0, |largest, x| x.abs().max(largest)).into())
        }
    }
}

fn not_finite(index: usize, value: impl std::fmt::Display) -> Error {
    Error::new(Kind::NonFinite, format!("a value is not finite at index {index}"))
        .expected("finite values", value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_bad_element() {
        for isa in Isa::ALL {
            for n in [1_usize, 63, 1024, 1025, 5000] {
                let mut values = vec![f32::MAX; n];
                assert_eq!(check(isa, &values, None).unwrap(), f64::from(f32::MAX));
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    for at in [0, n / 2, n - 1] {
                        values[at] = bad;
                        let error = check(isa, &values, None).unwrap_err();
                        assert_eq!(error.kind, Kind::NonFinite);
                        assert!(error.message.contains(&format!("index {at}")));
                        values[at] = f32::MAX;
                    }
                }
                assert!(check(isa, &values, Some(&vec![f32::MAX; n])).is_err());
                let mut values = vec![f64::MIN; n];
                assert_eq!(check_view(isa, View::Float64(&values)).unwrap(), f64::MAX);
                for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                    values[n / 2] = bad;
                    let error = check_view(isa, View::Float64(&values)).unwrap_err();
                    assert!(error.message.contains(&format!("index {}", n / 2)));
                }
            }
        }
    }
}
