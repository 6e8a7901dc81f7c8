//! The exponential moving average of a tensor's values, which the step of the values updates:
//!
//! ```text
//! a = p                                 until `start` steps are taken
//! a = lerp(a, p, 1 - decay)             after each `every`-th step from then on
//! ```
//!
//! `lerp` is torch's, with a fused multiply-add; the weight is computed in float64 and rounded once.

use crate::base::block::{BLOCK, Block};
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};
use crate::kernel::codec::CodecId;
use crate::kernel::optim::lerp;
use bytemuck::cast_slice;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Settings of an average. Steps are counted by slice.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ema {
    /// Share of the old average that an update keeps: above 0 and below 1.
    pub decay: f64,
    /// Steps from one update to the next, at least 1.
    pub every: u64,
    /// Steps during which the average equals the values.
    pub start: u64,
}

impl Ema {
    /// The name of its slot in the state.
    pub const SLOT: &str = "average";

    /// Checks the settings.
    pub fn validate(&self) -> Result<()> {
        let invalid = |what: &str, expected: &str, got: &dyn fmt::Display| {
            Err(Error::new(Kind::Config, format!("invalid {what} of the average")).expected(expected, got))
        };
        if !(self.decay > 0.0 && self.decay < 1.0) {
            return invalid("decay", "a number above 0 and below 1", &self.decay);
        }
        if self.every == 0 {
            return invalid("every", "1 or more", &self.every);
        }
        Ok(())
    }

    /// The weight of the values after this many steps of the slice; `None`: the step leaves the average as it
    /// is.
    pub(crate) fn weight(&self, step: u64) -> Option<f32> {
        match step.checked_sub(self.start) {
            None | Some(0) => Some(1.0),
            Some(since) => since.is_multiple_of(self.every).then_some((1.0 - self.decay) as f32),
        }
    }
}

impl fmt::Display for Ema {
    /// As written in Python.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { decay, every, start } = self;
        write!(f, "EMA(decay={decay}, every={every}, start={start})")
    }
}

/// The average of a slice in a step.
pub(crate) struct Following<'a> {
    pub(crate) isa: Isa,
    pub(crate) average: &'a mut [f32],
    /// The weight of the values.
    pub(crate) weight: f32,
}

impl Following<'_> {
    /// The same, borrowed.
    pub(crate) fn reborrow(&mut self) -> Following<'_> {
        Following { isa: self.isa, average: &mut *self.average, weight: self.weight }
    }

    /// Moves the elements at `range` towards their new values. Its loop is no part of the step's: that would
    /// put a copy of it into each of some hundred kernels.
    pub(crate) fn follow(&mut self, range: Range<usize>, values: &[f32]) {
        self.isa.run(Follow { average: &mut self.average[range], values, weight: self.weight });
    }
}

/// Moves an average towards the values by this weight; by 1, onto them.
struct Follow<'a> {
    average: &'a mut [f32],
    values: &'a [f32],
    weight: f32,
}

impl Kernel for Follow<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Self { average, values, weight } = self;
        if weight == 1.0 {
            average.copy_from_slice(values);
            return;
        }
        for (a, p) in average.iter_mut().zip(values) {
            *a = lerp(*a, *p, weight);
        }
    }
}

/// Appends `lerp(y, z, weight)` of values, in the plain codec of their type, and of float32.
pub(crate) fn average_of(isa: Isa, (codec, y): (CodecId, &[u8]), z: &[u8], weight: f32, to: &mut Vec<u8>) {
    let (mut block, n) = (Block::ZERO, z.len() / size_of::<f32>());
    for (z, at) in z.chunks(size_of_val(&block.0)).zip((0..n).step_by(BLOCK)) {
        let average = &mut block.0[..z.len() / size_of::<f32>()];
        codec.decode_block(isa, y, n, at, average);
        isa.run(Follow { average: &mut *average, values: cast_slice(z), weight });
        to.extend_from_slice(cast_slice(&*average));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_by_the_step_count() {
        let ema = Ema { decay: 0.75, every: 3, start: 2 };
        let weights: Vec<_> = (1..=8).map(|step| ema.weight(step)).collect();
        let (all, some) = (Some(1.0), Some(0.25));
        assert_eq!(weights, [all, all, None, None, some, None, None, some]);
        assert_eq!(Ema { decay: 0.75, every: 1, start: 0 }.weight(1), some);
    }

    #[test]
    fn settings_are_checked() {
        let good = Ema { decay: 0.999, every: 1, start: 0 };
        assert!(good.validate().is_ok());
        for decay in [0.0, 1.0, -0.5, f64::NAN] {
            assert!(Ema { decay, ..good }.validate().unwrap_err().message.contains("decay"));
        }
        assert!(Ema { every: 0, ..good }.validate().unwrap_err().message.contains("every"));
    }
}
