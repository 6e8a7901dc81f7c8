//! float64: the values of a float64 tensor themselves, little-endian.

use crate::base::block::Lane;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};

const WIDTH: usize = 8;
/// The bits without the sign.
const MAGNITUDE: u64 = 0x7FFF_FFFF_FFFF_FFFF;

/// Bodies of this codec mark no blocks that are not finite.
pub(super) const MARKED: Option<usize> = None;

/// Bytes of a body of `n` elements.
pub(super) fn body_len(n: usize) -> usize {
    WIDTH * n
}

/// Bodies of this codec mark no blocks that are not finite.
pub(super) fn was_finite(_body: &[u8], _block: usize) -> bool {
    true
}

/// The elements of a body.
#[inline(always)]
pub(crate) fn lanes(body: &[u8]) -> &[[u8; WIDTH]] {
    body.as_chunks().0
}

impl Lane<f64> for [u8; WIDTH] {
    #[inline(always)]
    fn value(self) -> f64 {
        f64::from_le_bytes(self)
    }
}

/// The largest magnitude. Refuses NaN and infinities.
pub(super) fn validate(isa: Isa, body: &[u8], _n: usize) -> Result<f64> {
    let body = lanes(body);
    let largest = f64::from_bits(isa.run(LargestFloat64 { body }));
    if largest.is_finite() {
        return Ok(largest);
    }
    let bad = body.iter().position(|&b| !f64::from_le_bytes(b).is_finite()).unwrap_or_default();
    Err(Error::new(Kind::NonFinite, format!("element {bad} is not finite"))
        .expected("finite float64 values", body.get(bad).map_or(f64::NAN, |&b| f64::from_le_bytes(b))))
}

/// The bits of the largest magnitude; NaN is above infinity.
struct LargestFloat64<'a> {
    body: &'a [[u8; WIDTH]],
}

impl Kernel for LargestFloat64<'_> {
    type Out = u64;
    #[inline(always)]
    fn run(self) -> u64 {
        self.body.iter().fold(0, |largest, &b| largest.max(u64::from_le_bytes(b) & MAGNITUDE))
    }
}
