//! Adagrad: Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
//! Optimization", JMLR 12, 2011.
//!
//! ```text
//! g   = -g                              maximize
//! g   = fma(weight_decay, p, g)         weight_decay != 0
//! s   = fma(g, g, s)
//! d   = sqrt(s) + eps                   eps_mode outside; inside: sqrt(s + eps); both: sqrt(s + eps) + eps
//! p   = p + (-clr * g) / d              clr = lr / (1 + step * lr_decay) in float64, step counting from 0
//! ```

use super::algorithm::no_decay;
use super::settings::settings;
use super::{Algorithm, AsItCame, Changed, EpsMode, Prepare, SparseRule, Step, split_eps};
use crate::base::block::Lane;

settings! {
    /// Settings of Adagrad, named as torch names them.
    ///
    /// Finite gradients can produce bad state in two ways, as in torch: a gradient beyond 1.8e19 makes `sum`
    /// infinite, and the element then never changes again; with `eps = 0`, a zero gradient on a zero `sum`
    /// gives 0 / 0 = NaN.
    pub struct Adagrad {
        /// Learning rate.
        lr: f64 = 1e-2, NonNegative;
        /// Step n (from 0) uses `lr / (1 + n * lr_decay)`.
        lr_decay: f64 = 0.0, NonNegative;
        /// L2 penalty, added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// The initial value of `sum`.
        initial_accumulator_value: f64 = 0.0, NonNegative;
        /// Keeps the division finite.
        eps: f64 = 1e-10, NonNegative;
        /// Where `eps` is added.
        eps_mode: EpsMode = EpsMode::Outside;
        /// Ascend instead of descend.
        maximize: bool = false;
    }
}

impl Algorithm for Adagrad {
    type Rule = AdagradRule;

    /// State: the sum of squared gradients.
    fn slots(&self) -> Vec<&'static str> {
        vec!["sum"]
    }

    /// The scalars of one step. (torch counts steps in float32, so its decay stops at step 2^24; this one
    /// continues.)
    fn rule(&self, step: u64, lr: f64) -> AdagradRule {
        let (eps_in, eps_out) = split_eps(self.eps, self.eps_mode);
        AdagradRule {
            neg_lr: -(lr / (1.0 + step as f64 * self.lr_decay)) as f32,
            prepare: Changed::new(self.maximize, self.weight_decay),
            eps_in,
            eps_out,
        }
    }

    fn sparse_rule(&self, step: u64, lr: f64) -> Result<SparseRule, &'static str> {
        no_decay(self.weight_decay)?;
        Ok(SparseRule::Adagrad(self.rule(step, lr)))
    }

    fn initial_state(&self) -> f32 {
        self.initial_accumulator_value as f32
    }
}

/// The scalars of one Adagrad step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdagradRule {
    neg_lr: f32,
    prepare: Option<Changed>,
    eps_in: f32,
    eps_out: f32,
}

impl Step for AdagradRule {
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<G: Lane>(&self, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        match self.prepare {
            None => self.prepared(AsItCame, p, state, g),
            Some(prepare) => self.prepared(prepare, p, state, g),
        }
    }
}

impl AdagradRule {
    #[inline(always)]
    fn prepared<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        let [s] = state else { unreachable!("Adagrad has one state slot") };
        self.pass(prepare, p, s, g);
    }

    #[inline(always)]
    fn pass<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], s: &mut [f32], g: &[G]) {
        let Self { neg_lr, eps_in, eps_out, .. } = *self;
        for ((p, s), &g) in p.iter_mut().zip(s).zip(g) {
            let g = prepare.of(g, *p);
            *s = g.mul_add(g, *s);
            let d = (*s + eps_in).sqrt() + eps_out;
            *p += neg_lr * g / d;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::optim::settings::SettingsTable;

    fn one(adagrad: Adagrad, step: u64, p: f32, s: f32, g: f32) -> (f32, f32) {
        let (mut p, mut s) = ([p; 5], [s; 5]);
        adagrad.rule(step, adagrad.lr).step(&mut p, &mut [&mut s], &[g; 5]);
        assert!(p.iter().all(|x| x.to_bits() == p[0].to_bits()));
        (p[0], s[0])
    }

    #[test]
    fn the_three_places_of_eps() {
        let with = |eps_mode| Adagrad { lr: 1.0, eps: 2.0, eps_mode, ..Adagrad::default() };
        // s = 10 + 2 * 2 = 14; sqrt(14) + 2, sqrt(16), sqrt(16) + 2.
        assert_eq!(one(with(EpsMode::Outside), 0, 0.0, 10.0, 2.0), (-2.0 / (14f32.sqrt() + 2.0), 14.0));
        assert_eq!(one(with(EpsMode::Inside), 0, 0.0, 10.0, 2.0), (-0.5, 14.0));
        assert_eq!(one(with(EpsMode::Both), 0, 0.0, 10.0, 2.0), (-2.0 / 6.0, 14.0));
    }

    #[test]
    fn the_rate_decays_with_the_steps_before() {
        let adagrad = Adagrad { lr: 1.0, lr_decay: 1.0, eps: 0.0, ..Adagrad::default() };
        assert_eq!(one(adagrad, 0, 0.0, 0.0, 3.0).0, -1.0);
        assert_eq!(one(adagrad, 3, 0.0, 0.0, 3.0).0, -0.25);
        assert_eq!(one(Adagrad { maximize: true, ..adagrad }, 3, 0.0, 0.0, 3.0).0, 0.25);
    }

    #[test]
    fn states_that_go_bad_as_documented() {
        assert_eq!(one(Adagrad::default(), 0, 1.0, 0.0, 1e30), (1.0, f32::INFINITY));
        assert!(one(Adagrad { eps: 0.0, ..Adagrad::default() }, 0, 1.0, 0.0, 0.0).0.is_nan());
    }

    #[test]
    fn settings_are_checked() {
        assert!(Adagrad::default().validate().is_ok());
        let good = Adagrad::default();
        let bad = [
            (Adagrad { lr: -1.0, ..good }, "lr"),
            (Adagrad { lr_decay: f64::NAN, ..good }, "lr_decay"),
            (Adagrad { weight_decay: -1.0, ..good }, "weight_decay"),
            (Adagrad { initial_accumulator_value: -1.0, ..good }, "initial_accumulator_value"),
            (Adagrad { eps: f64::INFINITY, ..good }, "eps"),
        ];
        for (adagrad, argument) in bad {
            assert!(adagrad.validate().unwrap_err().message.ends_with(argument));
        }
    }
}
