//! The check for NaN and infinity. It scans a whole push before the first byte is sent or the first slice
//! changes.

use crate::base::block::blocks;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};

struct Scan<'a> {
    values: &'a [f32],
    residual: Option<&'a [f32]>,
}

impl Kernel for Scan<'_> {
    type Out = bool;
    #[inline(always)]
    fn run(self) -> bool {
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
        worst < INFINITE
    }
}

const INFINITE: u32 = 0x7F80_0000;

#[inline(always)]
fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7FFF_FFFF
}

/// Fails with the index of the first element of `values` (plus `residual`, if given, of the same length) that
/// is not finite.
pub fn check(isa: Isa, values: &[f32], residual: Option<&[f32]>) -> Result<()> {
    if isa.run(Scan { values, residual }) {
        return Ok(());
    }
    let sum = |i: usize| residual.map_or(values[i], |e| values[i] + e[i]);
    let index = (0..values.len()).find(|i| !sum(*i).is_finite()).unwrap_or(0);
    Err(Error::new(Kind::NonFinite, format!("a value is not finite at index {index}"))
        .expected("finite values", sum(index)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_bad_element() {
        for isa in Isa::ALL {
            for n in [1_usize, 63, 1024, 1025, 5000] {
                let mut values = vec![f32::MAX; n];
                assert!(check(isa, &values, None).is_ok());
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
            }
        }
    }
}
