//! Adam: Kingma & Ba, "Adam: A Method for Stochastic Optimization", arXiv 1412.6980, ICLR 2015; `AdamW`:
//! Loshchilov & Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101, ICLR 2019; `AMSGrad`:
//! Reddi, Kale, Kumar, "On the Convergence of Adam and Beyond", arXiv 1904.09237, ICLR 2018.
//!
//! ```text
//! g   = -g                              maximize
//! p   = p * (1 - lr * weight_decay)     AdamW, weight_decay != 0
//! g   = fma(weight_decay, p, g)         Adam, weight_decay != 0
//! m   = lerp(m, g, 1 - beta1)
//! v   = fma((1 - beta2) * g, g, v * beta2)
//! x   = max(x, v)                       amsgrad, before the correction; else x = v
//! d   = sqrt(x) / c2 + eps              c2 = (1 - beta2^t)^0.5 in float64
//! p   = p + (-size * m) / d             size = lr / (1 - beta1^t) in float64
//! ```
//!
//! `t` is the number of this step, counting from 1: steps of the slice, never epochs.
//!
//! A step that momentum matching (`base/correction.rs`) gives a lower beta1, written b, weighs the old mean
//! and the gradient as Adam's step t with b does. The mean stays scaled by `1 - beta1^t`, so any sequence
//! of b leaves `m / (1 - beta1^t)` a weighted mean of the gradients, with a total weight of 1:
//!
//! ```text
//! r   = (1 - beta1^t) * (1 - b) / (1 - b^t)
//! k   = b * (1 - b^(t-1)) / (1 - b^t) * (1 - beta1^t) / (1 - beta1^(t-1))
//! m   = lerp(m * (k / (1 - r)), g, r)   r, k / (1 - r) in float64; b = beta1 gives 1 - beta1 and 1
//! ```
//!
//! If every step has the same b, the parameters move as those of Adam with beta1 = b.

use super::algorithm::{corrections, no_decay};
use super::settings::{Setting, SettingsTable, settings};
use super::{Algorithm, AsItCame, Changed, LazyAdamRule, Prepare, SparseRule, Step, lerp};
use crate::base::block::Lane;
use crate::base::error;
use serde::{Deserialize, Serialize};

settings! {
    /// Settings of Adam, named as torch names them (`betas` is the pair `beta1`, `beta2`).
    ///
    /// Finite gradients can produce bad state, as in torch: a gradient beyond about 1e19 divided by `sqrt(1 -
    /// beta2)` makes `exp_avg_sq` infinite, and the element then never changes again (with `beta2 = 0` it
    /// becomes NaN); with `eps = 0`, zero gradients give 0 / 0.
    pub struct Adam {
        /// Learning rate.
        lr: f64 = 1e-3, NonNegative;
        /// Share of the old mean gradient that each step keeps.
        beta1: f64 = 0.9, BelowOne;
        /// Share of the old mean square that each step keeps.
        beta2: f64 = 0.999, BelowOne;
        /// Keeps the division finite.
        eps: f64 = 1e-8, NonNegative;
        /// L2 penalty, added to the gradient ([`AdamW`] subtracts it from the parameters).
        weight_decay: f64 = 0.0, NonNegative;
        /// Divide by the largest mean square so far.
        amsgrad: bool = false;
        /// Ascend instead of descend.
        maximize: bool = false;
    }
}

/// Adam with weight decay subtracted from the parameters instead of added to the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW(pub Adam);

impl Default for AdamW {
    fn default() -> Self {
        Self(Adam { weight_decay: 1e-2, ..Adam::default() })
    }
}

impl Algorithm for Adam {
    type Rule = AdamRule;

    /// State: the two moments, and the largest second moment so far if `amsgrad`.
    fn slots(&self) -> Vec<&'static str> {
        let mut slots = vec!["exp_avg", "exp_avg_sq"];
        if self.amsgrad {
            slots.push("max_exp_avg_sq");
        }
        slots
    }

    /// The scalars of one step. (torch counts steps in float32, up to 2^24; both corrections are 1 long
    /// before that.)
    #[inline(always)]
    fn rule(&self, step: u64, lr: f64) -> AdamRule {
        let (correction1, root_correction2) = corrections(self.beta1, self.beta2, step);
        AdamRule {
            neg_size: -(lr / correction1) as f32,
            prepare: Changed::new(self.maximize, self.weight_decay),
            shrink: 1.0,
            old1: 1.0,
            rest1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            rest2: (1.0 - self.beta2) as f32,
            root_correction2: root_correction2 as f32,
            eps: self.eps as f32,
            amsgrad: self.amsgrad,
        }
    }

    fn beta1(&self) -> Option<f64> {
        Some(self.beta1)
    }

    fn matched_rule(&self, step: u64, lr: f64, beta1: f64) -> AdamRule {
        let own = self.rule(step, lr);
        // The first step has no old mean: its gradient has the whole weight with any beta1.
        if step == 0 { own } else { own.matched(self.beta1, beta1, step) }
    }

    fn sparse_rule(&self, step: u64, lr: f64) -> Result<SparseRule, &'static str> {
        if self.amsgrad {
            return Err("lazy Adam, as torch's SparseAdam, has no amsgrad");
        }
        no_decay(self.weight_decay)?;
        let betas = (self.beta1, self.beta2);
        Ok(SparseRule::Adam(LazyAdamRule::new(betas, self.eps, self.maximize, step, lr)))
    }
}

impl SettingsTable for AdamW {
    fn settings(&mut self) -> Vec<Setting<'_>> {
        self.0.settings()
    }

    fn validate(&self) -> error::Result<()> {
        self.0.validate()
    }

    fn lr(&self) -> f64 {
        self.0.lr
    }
}

impl AdamW {
    fn without_decay(&self) -> Adam {
        Adam { weight_decay: 0.0, ..self.0 }
    }

    fn decoupled(&self, lr: f64, rule: AdamRule) -> AdamRule {
        AdamRule { shrink: (1.0 - lr * self.0.weight_decay) as f32, ..rule }
    }
}

impl Algorithm for AdamW {
    type Rule = AdamRule;

    fn slots(&self) -> Vec<&'static str> {
        self.0.slots()
    }

    /// Adam's scalars, with the decay moved from the gradient to the parameters.
    fn rule(&self, step: u64, lr: f64) -> AdamRule {
        self.decoupled(lr, self.without_decay().rule(step, lr))
    }

    fn beta1(&self) -> Option<f64> {
        self.0.beta1()
    }

    fn matched_rule(&self, step: u64, lr: f64, beta1: f64) -> AdamRule {
        self.decoupled(lr, self.without_decay().matched_rule(step, lr, beta1))
    }

    fn sparse_rule(&self, step: u64, lr: f64) -> Result<SparseRule, &'static str> {
        self.0.sparse_rule(step, lr)
    }
}

/// The scalars of one step of Adam or `AdamW`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamRule {
    neg_size: f32,
    prepare: Option<Changed>,
    /// `AdamW`'s factor on the parameters; 1 without decay, which is exact.
    shrink: f32,
    /// Factor on the old mean gradient; 1 with the settings' beta1, which is exact.
    old1: f32,
    /// Weight of the gradient: 1 - beta1 with the settings' beta1.
    rest1: f32,
    beta2: f32,
    /// 1 - beta2.
    rest2: f32,
    root_correction2: f32,
    eps: f32,
    amsgrad: bool,
}

impl AdamRule {
    /// The same step, number `step + 1`, with `matched` in place of the settings' `beta1`.
    fn matched(self, beta1: f64, matched: f64, step: u64) -> Self {
        let (before, now) = (step as f64, step as f64 + 1.0);
        let total = 1.0 - beta1.powf(now);
        let ends = 1.0 - matched.powf(now);
        let rest = total * (1.0 - matched) / ends;
        let kept = matched * (1.0 - matched.powf(before)) / ends * total / (1.0 - beta1.powf(before));
        // Without an old mean to keep, the rest may round to 1.
        let old = if rest < 1.0 { kept / (1.0 - rest) } else { 0.0 };
        Self { old1: old as f32, rest1: rest as f32, ..self }
    }

    /// The new first moment.
    #[inline(always)]
    fn mean(&self, m: f32, g: f32) -> f32 {
        lerp(m * self.old1, g, self.rest1)
    }

    /// The new second moment.
    #[inline(always)]
    fn square(&self, v: f32, g: f32) -> f32 {
        (self.rest2 * g).mul_add(g, v * self.beta2)
    }

    /// The new parameter.
    #[inline(always)]
    fn moved(&self, p: f32, m: f32, x: f32) -> f32 {
        p + self.neg_size * m / (x.sqrt() / self.root_correction2 + self.eps)
    }
}

impl Step for AdamRule {
    const SLOTS: usize = 3;

    #[inline(always)]
    fn step<G: Lane>(&self, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        match self.prepare {
            None => self.prepared(AsItCame, p, state, g),
            Some(prepare) => self.prepared(prepare, p, state, g),
        }
    }
}

impl AdamRule {
    #[inline(always)]
    fn prepared<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        match (state, self.amsgrad) {
            ([m, v], false) => self.plain(prepare, p, m, v, g),
            ([m, v, x], true) => self.amsgrad(prepare, p, m, v, x, g),
            _ => unreachable!("Adam's state slots follow its settings"),
        }
    }

    #[inline(always)]
    fn plain<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[G]) {
        let rule = *self;
        for (((p, m), v), &g) in p.iter_mut().zip(m).zip(v).zip(g) {
            let old = *p * rule.shrink;
            let g = prepare.of(g, old);
            *m = rule.mean(*m, g);
            *v = rule.square(*v, g);
            *p = rule.moved(old, *m, *v);
        }
    }

    #[inline(always)]
    fn amsgrad<P: Prepare, G: Lane>(
        &self,
        prepare: P,
        p: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
        x: &mut [f32],
        g: &[G],
    ) {
        let rule = *self;
        for ((((p, m), v), x), &g) in p.iter_mut().zip(m).zip(v).zip(x).zip(g) {
            let old = *p * rule.shrink;
            let g = prepare.of(g, old);
            *m = rule.mean(*m, g);
            *v = rule.square(*v, g);
            // torch's maximum: NaN if either is.
            *x = if *v > *x || v.is_nan() { *v } else { *x };
            *p = rule.moved(old, *m, *x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: Adam = Adam {
        lr: 1.0,
        beta1: 0.5,
        beta2: 0.75,
        eps: 1.0,
        weight_decay: 0.0,
        amsgrad: false,
        maximize: false,
    };

    #[test]
    fn the_first_step_is_corrected_to_the_gradient() {
        // m / (1 - beta1) = g and v / (1 - beta2) = g^2: the step is lr * g / (|g| + eps).
        for beta1 in [0.0, 0.5, 0.75] {
            let (mut p, mut m, mut v) = ([0.0; 3], [0.0; 3], [0.0; 3]);
            let adam = Adam { beta1, ..HALF };
            adam.rule(0, 1.0).step(&mut p, &mut [&mut m, &mut v], &[3.0; 3]);
            assert_eq!((p, v), ([-0.75; 3], [0.25 * 9.0; 3]));
            assert_eq!(m, [(1.0 - beta1 as f32) * 3.0; 3]);
        }
    }

    #[test]
    fn amsgrad_keeps_the_maximum_and_shows_nan() {
        let rule = Adam { amsgrad: true, ..HALF }.rule(0, 1.0);
        let (mut p, mut m, mut v) = ([0.0; 3], [0.0; 3], [0.0, 0.0, f32::NAN]);
        let mut x = [9.0, 0.0, 1.0];
        rule.step(&mut p, &mut [&mut m, &mut v, &mut x], &[2.0; 3]);
        assert_eq!(x[..2], [9.0, 1.0]);
        assert!(x[2].is_nan());
        // 2 * 1 / (3 / 0.5 + 1).
        assert_eq!(p[0], -2.0 / 7.0);
    }

    #[test]
    fn a_lower_beta1_moves_the_parameters_as_if_it_had_always_been_so() {
        let (adam, gradients) = (Adam { lr: 0.1, ..Adam::default() }, [3.0, -1.0, 0.5, 2.0, -4.0, 0.25]);
        for beta1 in [0.0, 1e-17, 0.3, 0.875] {
            let lower = Adam { beta1, ..adam };
            let (mut p, mut m, mut v) = ([[0.0_f32]; 2], [[0.0_f32]; 2], [[0.0_f32]; 2]);
            for step in 0..600 {
                let rules = [adam.matched_rule(step, 0.1, beta1), lower.rule(step, 0.1)];
                let g = gradients[step as usize % gradients.len()];
                for (k, rule) in rules.into_iter().enumerate() {
                    rule.step(&mut p[k], &mut [&mut m[k], &mut v[k]], &[g]);
                }
                assert!((p[0][0] - p[1][0]).abs() < 1e-4, "{beta1} {step}: {p:?}");
                let t = step as f64 + 1.0;
                let means = [(0, 0.9), (1, beta1)]
                    .map(|(k, of): (usize, f64)| f64::from(m[k][0]) / (1.0 - of.powf(t)));
                assert!((means[0] - means[1]).abs() < 1e-5, "{beta1} {step}: {means:?}");
            }
        }
    }

    #[test]
    fn decay_on_the_gradient_and_on_the_parameters() {
        let decaying = Adam { weight_decay: 0.5, ..HALF };
        let (mut p, mut m, mut v) = ([4.0], [0.0], [0.0]);
        decaying.rule(0, 1.0).step(&mut p, &mut [&mut m, &mut v], &[1.0]);
        assert_eq!((p, m), ([4.0 - 0.75], [1.5]));
        let (mut p, mut m, mut v) = ([4.0], [0.0], [0.0]);
        AdamW(decaying).rule(0, 1.0).step(&mut p, &mut [&mut m, &mut v], &[3.0]);
        assert_eq!((p, m), ([2.0 - 0.75], [1.5]));
        assert_eq!(AdamW::default().0.weight_decay, 1e-2);
    }

    #[test]
    fn settings_are_checked() {
        assert!(Adam::default().validate().is_ok() && AdamW::default().validate().is_ok());
        let bad = [
            (Adam { lr: -1.0, ..HALF }, "lr"),
            (Adam { eps: f64::NAN, ..HALF }, "eps"),
            (Adam { beta1: 1.0, ..HALF }, "betas[0]"),
            (Adam { beta2: -0.1, ..HALF }, "betas[1]"),
            (Adam { beta2: f64::NAN, ..HALF }, "betas[1]"),
            (Adam { weight_decay: -1.0, ..HALF }, "weight_decay"),
        ];
        for (adam, argument) in bad {
            assert!(adam.validate().unwrap_err().message.ends_with(argument));
            assert!(AdamW(adam).validate().is_err());
        }
    }
}
