//! Schedule-Free `AdamW`: Defazio et al., 2024, in the operations of its authors' PyTorch code.
//!
//! ```text
//! v   = fma((1 - beta2) * g, g, v * beta2)
//! d   = g / (sqrt(v / (1 - beta2^t)) + eps)
//! d   = fma(weight_decay, y, d)         weight_decay != 0
//! ```
//!
//! and then the move of `schedule_free.rs`, with beta = beta1.

use super::schedule_free::{Move, NOT_SPARSE, average_weight, check};
use super::settings::settings;
use super::{Algorithm, AsItCame, Changed, Prepare, SparseRule, Step};
use crate::base::block::Lane;
use crate::base::error;

settings! {
    /// Settings of Schedule-Free `AdamW`, named as its authors name them (`betas` is the pair `beta1`,
    /// `beta2`).
    pub struct ScheduleFreeAdamW {
        /// Learning rate, for all steps after the warm-up.
        lr: f64 = 2.5e-3, NonNegative;
        /// Place of the point where gradients are taken, from z (0) to the average (1).
        beta1: f64 = 0.9, BelowOne;
        /// Share of the old mean of squares that each step keeps.
        beta2: f64 = 0.999, BelowOne;
        /// Keeps the division finite.
        eps: f64 = 1e-8, NonNegative;
        /// Decoupled decay of the values.
        weight_decay: f64 = 0.0, NonNegative;
        /// Steps in which the rate grows linearly to `lr`.
        warmup: f64 = 0.0, NonNegative;
    }
    checked together by check_together
}

impl ScheduleFreeAdamW {
    fn check_together(&self) -> error::Result<()> {
        check(self.warmup, "betas[0]", self.beta1)
    }
}

impl Algorithm for ScheduleFreeAdamW {
    type Rule = ScheduleFreeAdamWRule;

    /// State: the point that plain steps move, and the mean of the squared gradients.
    fn slots(&self) -> Vec<&'static str> {
        vec!["z", "exp_avg_sq"]
    }

    fn rule(&self, step: u64, lr: f64) -> ScheduleFreeAdamWRule {
        ScheduleFreeAdamWRule {
            beta2: self.beta2 as f32,
            rest2: (1.0 - self.beta2) as f32,
            bias: (1.0 - self.beta2.powf(step as f64 + 1.0)) as f32,
            eps: self.eps as f32,
            decay: Changed::new(false, self.weight_decay),
            moved: Move::new(step, lr, self.warmup, self.beta1),
        }
    }

    fn sparse_rule(&self, _step: u64, _lr: f64) -> Result<SparseRule, &'static str> {
        Err(NOT_SPARSE)
    }

    fn average_weight(&self) -> Option<f32> {
        Some(average_weight(self.beta1))
    }
}

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScheduleFreeAdamWRule {
    beta2: f32,
    rest2: f32,
    bias: f32,
    eps: f32,
    decay: Option<Changed>,
    moved: Move,
}

impl Step for ScheduleFreeAdamWRule {
    const SLOTS: usize = 2;

    #[inline(always)]
    fn step<G: Lane>(&self, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        let [z, v] = state else { unreachable!("Schedule-Free AdamW has two state slots") };
        match self.decay {
            None => self.pass(AsItCame, p, z, v, g),
            Some(decay) => self.pass(decay, p, z, v, g),
        }
    }
}

impl ScheduleFreeAdamWRule {
    #[inline(always)]
    fn pass<P: Prepare, G: Lane>(&self, decay: P, p: &mut [f32], z: &mut [f32], v: &mut [f32], g: &[G]) {
        for (((y, z), v), g) in p.iter_mut().zip(z).zip(v).zip(g) {
            let g = g.value();
            *v = (self.rest2 * g).mul_add(g, *v * self.beta2);
            let direction = decay.of(g / ((*v / self.bias).sqrt() + self.eps), *y);
            self.moved.take(y, z, direction);
        }
    }
}
