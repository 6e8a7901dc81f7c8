//! What the Schedule-Free optimizers share: Defazio et al., "The Road Less Scheduled", arXiv 2405.15682,
//! `NeurIPS` 2024.
//!
//! Gradients are taken at y, which are the tensor's values; plain steps move z, the first slot; x is the
//! average of the z, in which the present one has the weight c. With `y = lerp(z, x, beta)`, x need not be
//! stored: it is `lerp(y, z, 1 - 1 / beta)`.
//!
//! ```text
//! lr  = lr * t / warmup                 in step t (from 1) of the warm-up
//! c   = lr^2 / (sum of the lr^2 so far)
//! y   = lerp(y, z, c)
//! y   = fma(lr * (beta * (1 - c) - 1), d, y)        d: the direction of the step
//! z   = fma(-lr, d, z)
//! ```
//!
//! The rate's own value cancels in c, so c is a function of t: it needs no state, and the rate is one for all
//! steps.

use super::lerp;
use super::settings::invalid;
use crate::base::error::Result;

/// The reason why a step changes all rows.
pub(super) const NOT_SPARSE: &str = "the average moves in every row";

/// The scalars of one step, but for the direction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    /// c.
    weight: f32,
    /// The factor on the direction in y.
    y: f32,
    /// The factor in z.
    z: f32,
}

impl Move {
    /// The scalars of a step after `step` earlier ones, computed in float64 and rounded once.
    pub(super) fn new(step: u64, lr: f64, warmup: f64, beta: f64) -> Self {
        let (t, warmup) = (step as f64 + 1.0, warmup.max(1.0));
        let warm = t.min(warmup);
        let rate = lr * (warm / warmup);
        let squares = warm * (warm + 1.0) * (2.0 * warm + 1.0) / (6.0 * warmup * warmup);
        let weight = (warm / warmup).powi(2) / (squares + (t - warm));
        Self { weight: weight as f32, y: (rate * (beta * (1.0 - weight) - 1.0)) as f32, z: -rate as f32 }
    }

    /// Moves both points in the direction.
    #[inline(always)]
    pub(super) fn take(self, y: &mut f32, z: &mut f32, direction: f32) {
        *y = self.y.mul_add(direction, lerp(*y, *z, self.weight));
        *z = self.z.mul_add(direction, *z);
    }
}

/// The weight of z in `x = lerp(y, z, weight)`.
pub(super) fn average_weight(beta: f64) -> f32 {
    (1.0 - 1.0 / beta) as f32
}

/// Checks the settings that both have.
pub(super) fn check(warmup: f64, what: &str, beta: f64) -> Result<()> {
    if warmup.fract() != 0.0 {
        return Err(invalid("warmup", "a whole number of steps", warmup));
    }
    if beta == 0.0 {
        return Err(invalid(what, "a number above 0 and below 1", beta));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_the_sums() {
        for warmup in [0.0, 1.0, 2.0, 7.0, 100.0] {
            let mut sum = 0.0;
            for step in 0..300 {
                let rate: f64 = 0.5 * ((step + 1) as f64 / warmup).min(1.0);
                sum += rate * rate;
                let found = Move::new(step, 0.5, warmup, 0.9);
                let weight = rate * rate / sum;
                assert!((f64::from(found.weight) - weight).abs() <= 1e-7 * weight, "{warmup} {step}");
                assert_eq!(found.z, -rate as f32);
            }
        }
    }

    #[test]
    fn settings_are_checked() {
        assert!(check(100.0, "momentum", 0.9).is_ok());
        assert!(check(0.5, "momentum", 0.9).unwrap_err().message.ends_with("warmup"));
        assert!(check(0.0, "betas[0]", 0.0).unwrap_err().message.ends_with("betas[0]"));
    }
}
