//! A running average of pushed values, for a model's statistics: not an optimizer of gradients, but a rule
//! by which a value is pushed, logged, saved and moved like any gradient.
//!
//! ```text
//! w   = lr * scale                      in float64, rounded once; the pushed values are not scaled
//! p   = fma(w, x - p, p)                |w| < 0.5
//! p   = fma(w - 1, x - p, x)            otherwise, so that w = 1 gives x exactly
//! ```

use super::settings::settings;
use super::{Algorithm, SparseRule, Step, lerp};
use crate::base::block::Lane;

settings! {
    /// Settings of the running average.
    pub struct Average {
        /// Share of the pushed value in the new one; 1 replaces the old one.
        lr: f64 = 1e-1, UpToOne;
    }
}

impl Algorithm for Average {
    type Rule = AverageRule;

    /// State: none.
    fn slots(&self) -> Vec<&'static str> {
        vec![]
    }

    /// The scalar of one step; it does not depend on the step count.
    fn rule(&self, _step: u64, lr: f64) -> AverageRule {
        AverageRule { weight: lr as f32 }
    }

    fn sparse_rule(&self, _step: u64, _lr: f64) -> Result<SparseRule, &'static str> {
        Err("rows that are named twice are summed, which averages nothing")
    }

    fn rate_and_factor(&self, lr: f64, scale: f32) -> (f64, f32) {
        (lr * f64::from(scale), 1.0)
    }

    fn largest_term(&self, _lr: f64, largest: f64) -> f64 {
        largest
    }
}

/// The scalar of one step of the average.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AverageRule {
    weight: f32,
}

impl Step for AverageRule {
    const SLOTS: usize = 0;

    #[inline(always)]
    fn step<G: Lane>(&self, p: &mut [f32], _state: &mut [&mut [f32]], g: &[G]) {
        for (p, &x) in p.iter_mut().zip(g) {
            *p = lerp(*p, x.value(), self.weight);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::optim::settings::SettingsTable;

    fn one(lr: f64, p: f32, x: f32) -> f32 {
        let mut p = [p; 5];
        Average::default().rule(0, lr).step(&mut p, &mut [], &[x; 5]);
        assert!(p.iter().all(|y| y.to_bits() == p[0].to_bits()));
        p[0]
    }

    #[test]
    fn a_share_of_the_pushed_value() {
        assert_eq!(one(0.25, 8.0, 4.0), 7.0);
        assert_eq!(one(0.75, 8.0, 4.0), 5.0);
        assert_eq!(one(0.0, 8.0, 4.0), 8.0);
    }

    #[test]
    fn all_of_it_is_exact() {
        assert_eq!(one(1.0, 1e30, 0.1), 0.1);
        assert_eq!(one(1.0, f32::MAX, f32::MIN_POSITIVE), f32::MIN_POSITIVE);
    }

    #[test]
    fn settings_are_checked() {
        assert!(Average::default().validate().is_ok());
        for lr in [-0.1, 1.1, f64::NAN] {
            assert!(Average { lr }.validate().unwrap_err().message.ends_with("lr"));
        }
    }
}
