//! A gradient that its caller has encoded, for example on a GPU.

use super::CodecId;
use crate::base::dtype::DType;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use std::ops::Range;

const SLICE: usize = DType::Float32.slice_len();

/// The bodies of all slices of a float32 tensor, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Bodies<'a> {
    /// Their encoding.
    pub codec: CodecId,
    /// Their bytes.
    pub bytes: &'a [u8],
}

impl<'a> Bodies<'a> {
    /// The body of a slice; empty if it is out of bounds.
    pub fn of(self, elements: Range<usize>) -> &'a [u8] {
        let start = elements.start / SLICE * self.codec.body_len(SLICE);
        self.bytes.get(start..start + self.codec.body_len(elements.len())).unwrap_or_default()
    }

    /// Fails unless these are as many bytes as `n` elements have.
    pub(crate) fn check_len(self, n: usize) -> Result<()> {
        let expected = n / SLICE * self.codec.body_len(SLICE) + self.codec.body_len(n % SLICE);
        if self.bytes.len() == expected {
            return Ok(());
        }
        let message = format!("the {} bodies of {n} elements have the wrong length", self.codec.name());
        Err(Error::new(Kind::Frame, message)
            .expected(format!("{expected} bytes"), format!("{} bytes", self.bytes.len())))
    }

    /// Checks bodies of `n` elements as those that come over the network. Returns the largest magnitude, or a
    /// bound of it.
    pub(crate) fn check(self, isa: Isa, n: usize) -> Result<f64> {
        self.check_len(n)?;
        let slices = (0..n).step_by(SLICE).map(|at| at..n.min(at + SLICE));
        let mut bounds = slices.map(|range| self.codec.validate(isa, self.of(range.clone()), range.len()));
        bounds.try_fold(0.0, |largest: f64, bound| Ok(largest.max(bound?)))
    }
}
