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
//! The learning rate stays outside the velocity `b`, as in torch: a schedule does not rescale what is stored.
//! With these operations every result equals `torch.optim.SGD` bit for bit.

use super::{Step, decay, invalid, non_negative, prepare};
use crate::error::Result;

/// Settings of stochastic gradient descent, named as torch names them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Momentum; 0 keeps no state.
    pub momentum: f64,
    /// Share of the gradient that does not enter the momentum buffer, from the second step on.
    pub dampening: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Nesterov's momentum; needs momentum and no dampening.
    pub nesterov: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

impl Default for Sgd {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false }
    }
}

impl Sgd {
    /// torch's conditions, and every number finite.
    pub fn validate(&self) -> Result<()> {
        non_negative("lr", self.lr)?;
        non_negative("momentum", self.momentum)?;
        non_negative("weight_decay", self.weight_decay)?;
        if !self.dampening.is_finite() {
            return Err(invalid("dampening", "a finite number", self.dampening));
        }
        if self.nesterov && self.momentum == 0.0 {
            return Err(invalid("momentum", "a number > 0 with nesterov", self.momentum));
        }
        if self.nesterov && self.dampening != 0.0 {
            return Err(invalid("dampening", "0 with nesterov", self.dampening));
        }
        Ok(())
    }

    /// State: the velocity, if there is momentum.
    pub fn slots(&self) -> Vec<&'static str> {
        if self.momentum == 0.0 { vec![] } else { vec!["momentum_buffer"] }
    }

    /// The scalars of one step.
    pub(crate) fn rule(&self, step: u64, lr: f64) -> SgdRule {
        let form = match (self.momentum != 0.0, step == 0, self.nesterov) {
            (false, _, _) => Form::Plain,
            (true, true, false) => Form::First,
            (true, true, true) => Form::FirstNesterov,
            (true, false, false) => Form::Momentum,
            (true, false, true) => Form::Nesterov,
        };
        SgdRule {
            neg_lr: -lr as f32,
            weight_decay: decay(self.weight_decay),
            momentum: self.momentum as f32,
            undamped: (1.0 - self.dampening) as f32,
            maximize: self.maximize,
            form,
        }
    }
}

/// The scalars of one SGD step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SgdRule {
    neg_lr: f32,
    weight_decay: Option<f32>,
    momentum: f32,
    undamped: f32,
    maximize: bool,
    form: Form,
}

/// What becomes of the velocity; in the first step it is a copy of the gradient, not damped.
#[derive(Clone, Copy, Debug)]
enum Form {
    Plain,
    First,
    FirstNesterov,
    Momentum,
    Nesterov,
}

impl Step for SgdRule {
    #[inline(always)]
    fn step(&self, p: &mut [f32], state: &mut [&mut [f32]], g: &mut [f32]) {
        let Self { neg_lr, weight_decay, momentum, undamped, maximize, form } = *self;
        let n = p.len();
        let g = &mut g[..n];
        prepare(g, p, maximize, weight_decay);
        if crate::fault::fault("unfused_multiply_add") {
            for (p, g) in p.iter_mut().zip(g.iter()) {
                *p += neg_lr * *g;
            }
            return;
        }
        if let Form::Plain = form {
            for (p, g) in p.iter_mut().zip(g) {
                *p = neg_lr.mul_add(*g, *p);
            }
            return;
        }
        let [b] = state else { unreachable!("SGD with momentum has one state slot") };
        let b = &mut b[..n];
        let all = p.iter_mut().zip(b).zip(g);
        match form {
            Form::Plain => {}
            Form::First => {
                for ((p, b), g) in all {
                    *b = *g;
                    *p = neg_lr.mul_add(*g, *p);
                }
            }
            Form::FirstNesterov => {
                for ((p, b), g) in all {
                    *b = *g;
                    *p = neg_lr.mul_add(momentum.mul_add(*g, *g), *p);
                }
            }
            Form::Momentum => {
                for ((p, b), g) in all {
                    *b = undamped.mul_add(*g, *b * momentum);
                    *p = neg_lr.mul_add(*b, *p);
                }
            }
            Form::Nesterov => {
                for ((p, b), g) in all {
                    *b = undamped.mul_add(*g, *b * momentum);
                    *p = neg_lr.mul_add(momentum.mul_add(*b, *g), *p);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENTUM: Sgd =
        Sgd { lr: 0.5, momentum: 0.5, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };

    fn run(sgd: Sgd, steps: u64, p: &mut [f32], b: &mut [f32], g: &[f32]) {
        for step in 0..steps {
            let mut state: Vec<&mut [f32]> = if sgd.slots().is_empty() { vec![] } else { vec![&mut *b] };
            sgd.rule(step, sgd.lr).step(p, &mut state, &mut g.to_vec());
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
    fn first_step_is_not_damped() {
        let damped = Sgd { dampening: 0.5, ..MOMENTUM };
        let (mut p, mut b) = ([0.0; 3], [7.0; 3]);
        run(damped, 1, &mut p, &mut b, &[2.0; 3]);
        assert_eq!((p, b), ([-1.0; 3], [2.0; 3]));
        let mut state: [&mut [f32]; 1] = [&mut b];
        damped.rule(1, damped.lr).step(&mut p, &mut state, &mut [2.0; 3]);
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
        // torch: fma(0, p, -0) is +0, where no decay would leave -0.
        let mut g = [-0.0];
        let rule = Sgd { weight_decay: 1e-60, lr: 0.0, ..Sgd::default() }.rule(0, 0.0);
        rule.step(&mut [1.0], &mut [], &mut g);
        assert_eq!(g[0].to_bits(), 0);
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
