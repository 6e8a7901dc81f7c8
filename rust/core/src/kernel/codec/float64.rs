//! float64: the values of a float64 tensor themselves, little-endian.

use crate::base::block::Lane;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};

const WIDTH: usize = 8;
const EXPONENT: u64 = 0x7FF0_0000_0000_0000;

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

/// Refuses NaN and infinities.
pub(super) fn validate(isa: Isa, body: &[u8]) -> Result<()> {
    let body = lanes(body);
    if isa.run(Float64AllFinite { body }) {
        return Ok(());
    }
    let bad = body.iter().position(|&b| !is_finite(b)).unwrap_or_default();
    Err(Error::new(Kind::NonFinite, format!("element {bad} is not finite"))
        .expected("finite float64 values", body.get(bad).map_or(f64::NAN, |&b| f64::from_le_bytes(b))))
}

#[inline(always)]
fn is_finite(bytes: [u8; WIDTH]) -> bool {
    u64::from_le_bytes(bytes) & EXPONENT != EXPONENT
}

struct Float64AllFinite<'a> {
    body: &'a [[u8; WIDTH]],
}

impl Kernel for Float64AllFinite<'_> {
    type Out = bool;
    #[inline(always)]
    fn run(self) -> bool {
        // Not `all`: an early exit would prevent vectorisation.
        self.body.iter().fold(true, |finite, &b| finite & is_finite(b))
    }
}
