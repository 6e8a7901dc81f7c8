//! Schedule-Free SGD: Defazio et al., 2024, algorithm 1, in the operations of its authors' PyTorch code.
//!
//! ```text
//! d   = fma(weight_decay, y, g)         weight_decay != 0; otherwise g
//! ```
//!
//! and then the move of `schedule_free.rs`.

use super::schedule_free::{Move, NOT_SPARSE, average_weight, check};
use super::settings::settings;
use super::{Algorithm, AsItCame, Changed, Prepare, SparseRule, Step};
use crate::base::block::Lane;
use crate::base::error;

settings! {
    /// Settings of Schedule-Free SGD, named as its authors name them.
    pub struct ScheduleFreeSgd {
        /// Learning rate, for all steps after the warm-up.
        lr: f64 = 1.0, NonNegative;
        /// Place of the point where gradients are taken, from z (0) to the average (1).
        momentum: f64 = 0.9, BelowOne;
        /// L2 penalty, added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// Steps in which the rate grows linearly to `lr`.
        warmup: f64 = 0.0, NonNegative;
    }
    checked together by check_together
}

impl ScheduleFreeSgd {
    fn check_together(&self) -> error::Result<()> {
        check(self.warmup, "momentum", self.momentum)
    }
}

impl Algorithm for ScheduleFreeSgd {
    type Rule = ScheduleFreeSgdRule;

    /// State: the point that plain steps move.
    fn slots(&self) -> Vec<&'static str> {
        vec!["z"]
    }

    fn rule(&self, step: u64, lr: f64) -> ScheduleFreeSgdRule {
        ScheduleFreeSgdRule {
            prepare: Changed::new(false, self.weight_decay),
            moved: Move::new(step, lr, self.warmup, self.momentum),
        }
    }

    fn sparse_rule(&self, _step: u64, _lr: f64) -> Result<SparseRule, &'static str> {
        Err(NOT_SPARSE)
    }

    fn average_weight(&self) -> Option<f32> {
        Some(average_weight(self.momentum))
    }
}

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScheduleFreeSgdRule {
    prepare: Option<Changed>,
    moved: Move,
}

impl Step for ScheduleFreeSgdRule {
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<G: Lane>(&self, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        let [z] = state else { unreachable!("Schedule-Free SGD has one state slot") };
        match self.prepare {
            None => self.pass(AsItCame, p, z, g),
            Some(prepare) => self.pass(prepare, p, z, g),
        }
    }
}

impl ScheduleFreeSgdRule {
    #[inline(always)]
    fn pass<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], z: &mut [f32], g: &[G]) {
        for ((y, z), &g) in p.iter_mut().zip(z).zip(g) {
            let direction = prepare.of(g, *y);
            self.moved.take(y, z, direction);
        }
    }
}
