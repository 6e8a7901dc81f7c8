//! Stochastic gradient descent (Robbins & Monro 1951), with heavy-ball momentum (Polyak 1964) or Nesterov's
//! (Nesterov 1983; in the form of Sutskever, Martens, Dahl, Hinton, ICML 2013).
//!
//! ```text
//! g   = -g                              maximize
//! g   = fma(weight_decay, p, g)         weight_decay != 0
//! b   = g                               momentum != 0, first step
//! b   = fma(1 - dampening, g, b * mu)   momentum != 0, later steps
//! g   = fma(mu, b, g)                   nesterov
//! g   = b                               momentum without nesterov
//! p   = fma(-lr, g, p)
//! ```
//!
//! The learning rate stays outside the velocity `b`, as in torch: a schedule does not rescale the stored
//! state. With these operations, every result equals `torch.optim.SGD` bit for bit.

use super::algorithm::no_decay;
use super::settings::{invalid, settings};
use super::{Algorithm, AsItCame, Changed, Prepare, Rule, SparseRule, Step};
use crate::base::block::Lane;
use crate::base::error;
use crate::base::fault::fault;
use crate::kernel::real::Real;

settings! {
    /// Settings of stochastic gradient descent, named as torch names them.
    pub struct Sgd {
        /// Learning rate.
        lr: f64 = 1e-3, NonNegative;
        /// Momentum; 0 keeps no state.
        momentum: f64 = 0.0, NonNegative;
        /// Share of the gradient that does not enter the momentum buffer, from the second step on.
        dampening: f64 = 0.0, Finite;
        /// L2 penalty, added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// Nesterov's momentum; needs momentum and no dampening.
        nesterov: bool = false;
        /// Ascend instead of descend.
        maximize: bool = false;
    }
    checked together by check_together
}

impl Sgd {
    /// Checks the conditions of Nesterov's momentum.
    fn check_together(&self) -> error::Result<()> {
        if self.nesterov && self.momentum == 0.0 {
            return Err(invalid("momentum", "a number > 0 with nesterov", self.momentum));
        }
        if self.nesterov && self.dampening != 0.0 {
            return Err(invalid("dampening", "0 with nesterov", self.dampening));
        }
        Ok(())
    }

    /// The scalars of one step on elements of type `T`.
    #[inline(always)]
    pub(super) fn step_of<T: Real>(&self, step: u64, lr: f64) -> SgdStep<T> {
        let (neg_lr, prepare) = (T::nearest(-lr), Changed::new(self.maximize, self.weight_decay));
        if self.momentum == 0.0 {
            return SgdStep::Plain(SgdRule { neg_lr, prepare });
        }
        let form = match (step == 0, self.nesterov) {
            (true, false) => Form::First,
            (true, true) => Form::FirstNesterov,
            (false, false) => Form::Momentum,
            (false, true) => Form::Nesterov,
        };
        let (momentum, undamped) = (T::nearest(self.momentum), T::nearest(1.0 - self.dampening));
        SgdStep::Momentum(MomentumRule { neg_lr, prepare, momentum, undamped, form })
    }
}

impl Algorithm for Sgd {
    type Rule = SgdStep<f32>;

    /// State: the velocity, if there is momentum.
    fn slots(&self) -> Vec<&'static str> {
        if self.momentum == 0.0 { vec![] } else { vec!["momentum_buffer"] }
    }

    #[inline(always)]
    fn rule(&self, step: u64, lr: f64) -> SgdStep<f32> {
        self.step_of(step, lr)
    }

    fn sparse_rule(&self, step: u64, lr: f64) -> Result<SparseRule, &'static str> {
        match self.step_of(step, lr) {
            SgdStep::Momentum(_) => Err("momentum moves every row"),
            SgdStep::Plain(rule) => no_decay(self.weight_decay).map(|()| SparseRule::Sgd(rule)),
        }
    }

    fn momentum(&self) -> f64 {
        self.momentum
    }

    fn largest_term(&self, _lr: f64, largest: f64) -> f64 {
        largest
    }
}

impl From<SgdStep<f32>> for Rule {
    #[inline(always)]
    fn from(step: SgdStep<f32>) -> Self {
        match step {
            SgdStep::Plain(rule) => Self::Sgd(rule),
            SgdStep::Momentum(rule) => Self::Momentum(rule),
        }
    }
}

/// The scalars of one step, with or without momentum.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SgdStep<T> {
    Plain(SgdRule<T>),
    Momentum(MomentumRule<T>),
}

impl<T: Real> SgdStep<T> {
    /// The same step with another momentum, if it has momentum.
    pub(crate) fn with_momentum(self, momentum: f64) -> Self {
        match self {
            Self::Plain(_) => self,
            Self::Momentum(rule) => Self::Momentum(rule.with_momentum(T::nearest(momentum))),
        }
    }
}

/// The scalars of one step without momentum. This is a separate rule because in so short a loop a decoded
/// gradient never leaves the registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SgdRule<T = f32> {
    neg_lr: T,
    prepare: Option<Changed<T>>,
}

/// The scalars of one step with momentum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MomentumRule<T = f32> {
    neg_lr: T,
    prepare: Option<Changed<T>>,
    momentum: T,
    undamped: T,
    form: Form,
}

impl<T> MomentumRule<T> {
    pub(super) fn with_momentum(self, momentum: T) -> Self {
        Self { momentum, ..self }
    }
}

/// How a step updates the velocity; the first step copies the gradient into it, undamped.
#[derive(Clone, Copy, Debug)]
enum Form {
    First,
    FirstNesterov,
    Momentum,
    Nesterov,
}

impl<T: Real> Step<T> for SgdRule<T> {
    const SLOTS: usize = 0;

    #[inline(always)]
    fn step<G: Lane<T>>(&self, p: &mut [T], _state: &mut [&mut [T]], g: &[G]) {
        match self.prepare {
            None => self.prepared(AsItCame, p, g),
            Some(prepare) => self.prepared(prepare, p, g),
        }
    }
}

impl SgdRule {
    /// Adds the gradient: p - (-1) * g.
    pub(crate) const SUM: Self = Self { neg_lr: 1.0, prepare: None };
}

impl<T: Real> SgdRule<T> {
    #[inline(always)]
    fn prepared<P: Prepare<T>, G: Lane<T>>(&self, prepare: P, p: &mut [T], g: &[G]) {
        let Self { neg_lr, .. } = *self;
        for (p, &g) in p.iter_mut().zip(g) {
            let g = prepare.of(g, *p);
            *p = if fault("unfused_multiply_add") { *p + neg_lr * g } else { neg_lr.fma(g, *p) };
        }
    }
}

impl<T: Real> Step<T> for MomentumRule<T> {
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step<G: Lane<T>>(&self, p: &mut [T], state: &mut [&mut [T]], g: &[G]) {
        let [b] = state else { unreachable!("SGD with momentum has one state slot") };
        match self.prepare {
            None => self.prepared(AsItCame, p, b, g),
            Some(prepare) => self.prepared(prepare, p, b, g),
        }
    }
}

impl<T: Real> MomentumRule<T> {
    #[inline(always)]
    fn prepared<P: Prepare<T>, G: Lane<T>>(&self, prepare: P, p: &mut [T], b: &mut [T], g: &[G]) {
        let Self { neg_lr, momentum, undamped, .. } = *self;
        let all = p.iter_mut().zip(b).zip(g);
        match self.form {
            Form::First => {
                for ((p, b), &g) in all {
                    *b = prepare.of(g, *p);
                    *p = neg_lr.fma(*b, *p);
                }
            }
            Form::FirstNesterov => {
                for ((p, b), &g) in all {
                    let g = prepare.of(g, *p);
                    *b = g;
                    *p = neg_lr.fma(momentum.fma(g, g), *p);
                }
            }
            Form::Momentum => {
                for ((p, b), &g) in all {
                    *b = undamped.fma(prepare.of(g, *p), *b * momentum);
                    *p = neg_lr.fma(*b, *p);
                }
            }
            Form::Nesterov => {
                for ((p, b), &g) in all {
                    let g = prepare.of(g, *p);
                    *b = undamped.fma(g, *b * momentum);
                    *p = neg_lr.fma(momentum.fma(*b, g), *p);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::optim::settings::SettingsTable;

    const MOMENTUM: Sgd =
        Sgd { lr: 0.5, momentum: 0.5, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };

    fn take(rule: SgdStep<f32>, p: &mut [f32], state: &mut [&mut [f32]], g: &[f32]) {
        match rule {
            SgdStep::Plain(rule) => rule.step(p, state, g),
            SgdStep::Momentum(rule) => rule.step(p, state, g),
        }
    }

    fn run(sgd: Sgd, steps: u64, p: &mut [f32], b: &mut [f32], g: &[f32]) {
        for step in 0..steps {
            let mut state: Vec<&mut [f32]> = if sgd.slots().is_empty() { vec![] } else { vec![&mut *b] };
            take(sgd.rule(step, sgd.lr), p, &mut state, g);
        }
    }

    #[test]
    fn plain_decay_and_ascent() {
        let mut p = [4.0, -2.0];
        run(Sgd { lr: 0.5, ..Sgd::default() }, 1, &mut p, &mut [], &[1.0, 2.0]);
        assert_eq!(p, [3.5, -3.0]);
        let up = Sgd { lr: 0.5, weight_decay: 0.25, maximize: true, ..Sgd::default() };
        run(up, 1, &mut p, &mut [], &[1.0, 2.0]);
        assert_eq!(p, [3.5 + 0.5 * (1.0 - 0.25 * 3.5), -3.0 + 0.5 * (2.0 - 0.25 * -3.0)]);
    }

    #[test]
    fn multiplication_and_addition_round_once() {
        // (1 + e)^2 is 1 + 2e + e^2; rounded separately it would lose e^2.
        let e = 2f32.powi(-12);
        for sgd in [Sgd::default(), MOMENTUM] {
            let (mut p, mut b) = ([1.0 + 2.0 * e; 33], [0.0; 33]);
            run(Sgd { lr: f64::from(1.0 + e), ..sgd }, 1, &mut p, &mut b, &[1.0 + e; 33]);
            assert_eq!(p, [-e * e; 33]);
        }
    }

    #[test]
    fn first_step_is_not_damped() {
        let damped = Sgd { dampening: 0.5, ..MOMENTUM };
        let (mut p, mut b) = ([0.0; 3], [7.0; 3]);
        run(damped, 1, &mut p, &mut b, &[2.0; 3]);
        assert_eq!((p, b), ([-1.0; 3], [2.0; 3]));
        let mut state: [&mut [f32]; 1] = [&mut b];
        take(damped.rule(1, damped.lr), &mut p, &mut state, &[2.0; 3]);
        assert_eq!((p, b), ([-2.0; 3], [2.0; 3]));
    }

    #[test]
    fn nesterov_looks_ahead() {
        let (mut p, mut b) = ([0.0], [0.0]);
        run(Sgd { nesterov: true, ..MOMENTUM }, 2, &mut p, &mut b, &[1.0]);
        // b: 1, 1.5; direction: 1.5, 1.75.
        assert_eq!((p, b), ([-0.5 * (1.5 + 1.75)], [1.5]));
    }

    #[test]
    fn a_decay_that_rounds_to_zero_still_counts() {
        // torch: fma(0, p, -0) is +0, where no decay would leave -0; the first velocity is the gradient.
        let first_velocity = |weight_decay| {
            let mut b = [1.0];
            let rule = Sgd { weight_decay, ..MOMENTUM }.rule(0, 0.0);
            take(rule, &mut [1.0], &mut [&mut b], &[-0.0]);
            b[0].to_bits()
        };
        assert_eq!((first_velocity(1e-60), first_velocity(0.0)), (0, (-0.0_f32).to_bits()));
    }

    #[test]
    fn settings_are_checked() {
        assert!(Sgd::default().validate().is_ok());
        let bad = [
            (Sgd { lr: -1.0, ..MOMENTUM }, "lr"),
            (Sgd { lr: f64::NAN, ..MOMENTUM }, "lr"),
            (Sgd { momentum: -0.1, ..MOMENTUM }, "momentum"),
            (Sgd { dampening: f64::INFINITY, ..MOMENTUM }, "dampening"),
            (Sgd { weight_decay: -0.1, ..MOMENTUM }, "weight_decay"),
            (Sgd { nesterov: true, momentum: 0.0, ..MOMENTUM }, "momentum"),
            (Sgd { nesterov: true, dampening: 0.1, ..MOMENTUM }, "dampening"),
        ];
        for (sgd, argument) in bad {
            assert!(sgd.validate().unwrap_err().message.ends_with(argument));
        }
    }
}
