//! FTRL-proximal: `McMahan` et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1,
//! applied to each element separately.
//!
//! ```text
//! g   = -g                                   maximize
//! m   = fma(g, g, n)
//! s   = (sqrt(m) - sqrt(n)) * rate           rate = 1 / lr in float64
//! z   = fma(-s, p, z + g)
//! n   = m
//! p   = 0                                    |z| <= l1 or d = 0
//! p   = (z - copysign(l1, z)) / -d           otherwise; d = fma(beta + sqrt(n), rate, l2)
//! ```
//!
//! The parameters follow from `z` and `n`. A value that a registration or an assignment puts into `p` enters
//! the element's next step as the point at which the gradient was taken; the step then replaces it.

use super::settings::{invalid, settings};
use super::{Algorithm, SparseRule, Step};
use crate::base::block::Lane;
use crate::base::error::Result;

settings! {
    /// Settings of FTRL-proximal, named as the paper names them; its alpha is `lr`.
    ///
    /// A gradient beyond 1.8e19 makes `n` infinite and the element NaN.
    pub struct Ftrl {
        /// The paper's alpha, > 0. A push with an `lr` of 0 (or one whose inverse is infinite in float32)
        /// changes no value.
        lr: f64 = 0.1, NonNegative;
        /// Added to the root; a larger value shrinks the rate of the first steps more slowly.
        beta: f64 = 1.0, NonNegative;
        /// L1 penalty: elements of little weight are exactly 0.
        l1: f64 = 0.0, NonNegative;
        /// L2 penalty.
        l2: f64 = 0.0, NonNegative;
        /// Ascend instead of descend.
        maximize: bool = false;
    }
    checked together by check_together
}

impl Ftrl {
    /// Checks that `lr` has a finite inverse.
    fn check_together(&self) -> Result<()> {
        if ((1.0 / self.lr) as f32).is_finite() {
            return Ok(());
        }
        Err(invalid("lr", "a number > 0 whose inverse is finite (as float32)", self.lr))
    }
}

impl Algorithm for Ftrl {
    type Rule = FtrlRule;

    /// State: the sum of the gradients, corrected for the steps taken, and the sum of their squares.
    fn slots(&self) -> Vec<&'static str> {
        vec!["z", "n"]
    }

    /// The scalars of one step; they do not depend on the step count.
    fn rule(&self, _step: u64, lr: f64) -> FtrlRule {
        FtrlRule {
            rate: (1.0 / lr) as f32,
            beta: self.beta as f32,
            l1: self.l1 as f32,
            l2: self.l2 as f32,
            maximize: self.maximize,
        }
    }

    fn sparse_rule(&self, step: u64, lr: f64) -> Result<SparseRule, &'static str> {
        Ok(SparseRule::Ftrl(self.rule(step, lr)))
    }

    fn largest_term(&self, lr: f64, largest: f64) -> f64 {
        if largest > 0.0 { (largest / lr).max(largest * largest) } else { 0.0 }
    }
}

/// The scalars of one FTRL step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FtrlRule {
    rate: f32,
    beta: f32,
    l1: f32,
    l2: f32,
    maximize: bool,
}

impl Step for FtrlRule {
    const SLOTS: usize = 2;

    #[inline(always)]
    fn step<G: Lane>(&self, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        let [z, n] = state else { unreachable!("FTRL has two state slots") };
        let Self { rate, beta, l1, l2, maximize } = *self;
        if !rate.is_finite() {
            return;
        }
        for (((p, z), n), &g) in p.iter_mut().zip(z.iter_mut()).zip(n.iter_mut()).zip(g) {
            let g = if maximize { -g.value() } else { g.value() };
            let sum = g.mul_add(g, *n);
            let s = (sum.sqrt() - n.sqrt()) * rate;
            *z = (-s).mul_add(*p, *z + g);
            *n = sum;
            let d = (beta + sum.sqrt()).mul_add(rate, l2);
            let moved = (*z - l1.copysign(*z)) / -d;
            // Without beta and l2, d is 0 where the gradient's square is 0.
            *p = if z.abs() <= l1 || d == 0.0 { 0.0 } else { moved };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::optim::settings::SettingsTable;

    fn one(ftrl: Ftrl, lr: f64, (p, z, n): (f32, f32, f32), g: f32) -> (f32, f32, f32) {
        let (mut p, mut z, mut n) = ([p; 5], [z; 5], [n; 5]);
        ftrl.rule(0, lr).step(&mut p, &mut [&mut z, &mut n], &[g; 5]);
        assert!(p.iter().all(|x| x.to_bits() == p[0].to_bits()));
        (p[0], z[0], n[0])
    }

    #[test]
    fn small_weights_are_zero() {
        let ftrl = Ftrl { lr: 0.5, beta: 1.0, l1: 1.0, l2: 2.0, maximize: false };
        assert_eq!(one(ftrl, 0.5, (0.0, 0.0, 0.0), 1.0), (0.0, 1.0, 1.0));
        // z = 1 + 3 - 0 = 4; n = 10; p = -(4 - 1) / ((1 + sqrt(10)) / 0.5 + 2).
        let d = (1.0 + 10f32.sqrt()).mul_add(2.0, 2.0);
        assert_eq!(one(ftrl, 0.5, (0.0, 1.0, 1.0), 3.0), (-3.0 / d, 4.0, 10.0));
        assert_eq!(one(Ftrl { maximize: true, ..ftrl }, 0.5, (0.0, -1.0, 1.0), 3.0), (3.0 / d, -4.0, 10.0));
    }

    #[test]
    fn the_point_of_the_gradient_counts() {
        // sqrt(25) - sqrt(9) = 2, so s = 2 / lr = 4: z = 1 + 4 - 4 * 0.5 = 3.
        let ftrl = Ftrl { lr: 0.5, beta: 0.0, ..Ftrl::default() };
        assert_eq!(one(ftrl, 0.5, (0.5, 1.0, 9.0), 4.0), (3.0 / -10.0, 3.0, 25.0));
    }

    #[test]
    fn a_gradient_whose_square_is_zero_moves_nothing() {
        let ftrl = Ftrl { beta: 0.0, ..Ftrl::default() };
        assert_eq!(one(ftrl, 0.5, (0.0, 0.0, 0.0), 1e-30), (0.0, 1e-30, 0.0));
        assert_eq!(one(ftrl, 0.5, (0.0, 0.0, 0.0), 0.0), (0.0, 0.0, 0.0));
    }

    #[test]
    fn a_rate_of_zero_changes_nothing() {
        assert_eq!(one(Ftrl::default(), 0.0, (0.5, 1.0, 9.0), 4.0), (0.5, 1.0, 9.0));
    }

    #[test]
    fn settings_are_checked() {
        let good = Ftrl::default();
        assert!(good.validate().is_ok());
        for (ftrl, argument) in [
            (Ftrl { lr: 0.0, ..good }, "lr"),
            (Ftrl { lr: 1e-39, ..good }, "lr"),
            (Ftrl { lr: f64::NAN, ..good }, "lr"),
            (Ftrl { beta: -1.0, ..good }, "beta"),
            (Ftrl { l1: f64::INFINITY, ..good }, "l1"),
            (Ftrl { l2: -1.0, ..good }, "l2"),
        ] {
            assert!(ftrl.validate().unwrap_err().message.ends_with(argument));
        }
    }
}
