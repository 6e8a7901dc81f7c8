//! Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, `NeurIPS` 2023,
//! algorithm 2; the operations are those of its PyTorch code.
//!
//! ```text
//! g   = -g                              maximize
//! p   = p * (1 - lr * weight_decay)     weight_decay != 0; the factor in float64
//! u   = m * beta1 + g * (1 - beta1)     nothing is fused
//! p   = fma(-lr, sign(u), p)            sign(0) = 0
//! m   = fma(1 - beta2, g, m * beta2)
//! ```
//!
//! Every element moves by `lr` or not at all, so a usual rate is 3 to 10 times smaller than `AdamW`'s, and a
//! usual `weight_decay` as many times larger.

use super::settings::settings;
use super::{Algorithm, AsItCame, Changed, Prepare, SparseRule, Step};
use crate::base::block::Lane;

settings! {
    /// Settings of Lion, named as torch names those of Adam (`betas` is the pair `beta1`, `beta2`).
    pub struct Lion {
        /// Learning rate: the size of every element's step.
        lr: f64 = 1e-4, NonNegative;
        /// Share of the mean gradient in the direction of a step.
        beta1: f64 = 0.9, BelowOne;
        /// Share of the old mean gradient that each step keeps.
        beta2: f64 = 0.99, BelowOne;
        /// Every step first shrinks the parameters by `1 - lr * weight_decay`.
        weight_decay: f64 = 0.0, NonNegative;
        /// Ascend instead of descend.
        maximize: bool = false;
    }
}

impl Algorithm for Lion {
    type Rule = LionRule;

    /// State: the mean gradient.
    fn slots(&self) -> Vec<&'static str> {
        vec!["exp_avg"]
    }

    #[inline(always)]
    fn rule(&self, _step: u64, lr: f64) -> LionRule {
        LionRule {
            neg_lr: -lr as f32,
            prepare: Changed::new(self.maximize, 0.0),
            shrink: (1.0 - lr * self.weight_decay) as f32,
            beta1: self.beta1 as f32,
            rest1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            rest2: (1.0 - self.beta2) as f32,
        }
    }

    fn sparse_rule(&self, _step: u64, _lr: f64) -> Result<SparseRule, &'static str> {
        Err("the mean gradient moves every row")
    }

    /// The step has the size of the rate, and the mean is never larger than its gradients.
    fn largest_term(&self, _lr: f64, largest: f64) -> f64 {
        largest
    }
}

/// The scalars of one step of Lion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LionRule {
    neg_lr: f32,
    prepare: Option<Changed>,
    /// Factor on the parameters; 1 without decay, which is exact.
    shrink: f32,
    beta1: f32,
    /// 1 - beta1.
    rest1: f32,
    beta2: f32,
    /// 1 - beta2.
    rest2: f32,
}

impl Step for LionRule {
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<G: Lane>(&self, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        match self.prepare {
            None => self.prepared(AsItCame, p, state, g),
            Some(prepare) => self.prepared(prepare, p, state, g),
        }
    }
}

impl LionRule {
    #[inline(always)]
    fn prepared<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        let [m] = state else { unreachable!("Lion has one state slot") };
        self.pass(prepare, p, m, g);
    }

    #[inline(always)]
    fn pass<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], m: &mut [f32], g: &[G]) {
        let Self { neg_lr, shrink, beta1, rest1, beta2, rest2, .. } = *self;
        for ((p, m), &g) in p.iter_mut().zip(m).zip(g) {
            let g = prepare.of(g, *p);
            let direction = sign(*m * beta1 + g * rest1);
            *p = neg_lr.mul_add(direction, *p * shrink);
            *m = rest2.mul_add(g, *m * beta2);
        }
    }
}

/// torch's sign: 0 for zeros of either sign.
#[inline(always)]
fn sign(x: f32) -> f32 {
    f32::from(u8::from(x > 0.0)) - f32::from(u8::from(x < 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::optim::settings::SettingsTable;

    const HALF: Lion = Lion { lr: 0.25, beta1: 0.5, beta2: 0.75, weight_decay: 0.0, maximize: false };

    fn one(lion: Lion, p: f32, m: f32, g: f32) -> (f32, f32) {
        let (mut p, mut m) = ([p; 5], [m; 5]);
        lion.rule(7, lion.lr).step(&mut p, &mut [&mut m], &[g; 5]);
        assert!(p.iter().all(|x| x.to_bits() == p[0].to_bits()));
        (p[0], m[0])
    }

    #[test]
    fn the_step_has_the_size_of_the_rate() {
        for (m, g, moved) in [(0.0, 8.0, -0.25), (0.0, -1e-30, 0.25), (3.0, -1.0, -0.25), (1.0, -1.0, 0.0)] {
            assert_eq!(one(HALF, 4.0, m, g), (4.0 + moved, 0.75 * m + 0.25 * g));
            assert_eq!(one(Lion { maximize: true, ..HALF }, 4.0, -m, g).0, 4.0 - moved);
        }
        assert_eq!(one(HALF, 4.0, 0.0, -0.0).0, 4.0);
    }

    #[test]
    fn decay_shrinks_the_parameters_and_not_the_direction() {
        assert_eq!(one(Lion { weight_decay: 2.0, ..HALF }, 4.0, 0.0, 1.0), (2.0 - 0.25, 0.25));
        assert_eq!(one(Lion { weight_decay: 2.0, ..HALF }, 4.0, 0.0, 0.0), (2.0, 0.0));
    }

    #[test]
    fn settings_are_checked() {
        assert!(Lion::default().validate().is_ok());
        let bad = [
            (Lion { lr: -1.0, ..HALF }, "lr"),
            (Lion { beta1: 1.0, ..HALF }, "betas[0]"),
            (Lion { beta2: f64::NAN, ..HALF }, "betas[1]"),
            (Lion { weight_decay: -1.0, ..HALF }, "weight_decay"),
        ];
        for (lion, argument) in bad {
            assert!(lion.validate().unwrap_err().message.ends_with(argument));
        }
    }
}
