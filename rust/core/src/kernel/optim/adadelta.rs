//! Adadelta: Zeiler, "ADADELTA: An Adaptive Learning Rate Method", arXiv 1212.5701, 2012.
//!
//! ```text
//! g   = -g                              maximize
//! g   = fma(weight_decay, p, g)         weight_decay != 0
//! s   = fma((1 - rho) * g, g, s * rho)
//! dx  = sqrt(u + eps) / sqrt(s + eps) * g
//! u   = fma((1 - rho) * dx, dx, u * rho)
//! p   = fma(-lr, dx, p)
//! ```
//!
//! The paper has no learning rate (`lr = 1`). It puts `eps` inside both roots, as torch does.

use super::settings::settings;
use super::{Algorithm, AsItCame, Changed, Prepare, SparseRule, Step};
use crate::base::block::Lane;

settings! {
    /// Settings of Adadelta, named as torch names them.
    ///
    /// Finite gradients can produce bad state, as in torch: a gradient beyond about 1e19 makes `square_avg`
    /// infinite, and the element then never changes again; `eps = 0` gives 0 / 0 at a zero gradient, and
    /// never moves from a zero `acc_delta`.
    pub struct Adadelta {
        /// Factor on the paper's update.
        lr: f64 = 1.0, NonNegative;
        /// Share of the old means that each step keeps.
        rho: f64 = 0.9, UpToOne;
        /// Starts the updates, and keeps the division finite.
        eps: f64 = 1e-6, NonNegative;
        /// L2 penalty, added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// Ascend instead of descend.
        maximize: bool = false;
    }
}

impl Algorithm for Adadelta {
    type Rule = AdadeltaRule;

    /// State: the mean squares of gradients and of updates.
    fn slots(&self) -> Vec<&'static str> {
        vec!["square_avg", "acc_delta"]
    }

    /// The scalars of one step; they do not depend on the step's number.
    fn rule(&self, _step: u64, lr: f64) -> AdadeltaRule {
        AdadeltaRule {
            neg_lr: -lr as f32,
            prepare: Changed::new(self.maximize, self.weight_decay),
            rho: self.rho as f32,
            rest: (1.0 - self.rho) as f32,
            eps: self.eps as f32,
        }
    }

    fn sparse_rule(&self, _step: u64, _lr: f64) -> Result<SparseRule, &'static str> {
        Err("Adadelta's means decay in every row")
    }
}

/// The scalars of one Adadelta step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdadeltaRule {
    neg_lr: f32,
    prepare: Option<Changed>,
    rho: f32,
    /// 1 - rho.
    rest: f32,
    eps: f32,
}

impl Step for AdadeltaRule {
    const SLOTS: usize = 2;

    #[inline(always)]
    fn step<G: Lane>(&self, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        match self.prepare {
            None => self.prepared(AsItCame, p, state, g),
            Some(prepare) => self.prepared(prepare, p, state, g),
        }
    }
}

impl AdadeltaRule {
    #[inline(always)]
    fn prepared<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        let [s, u] = state else { unreachable!("Adadelta has two state slots") };
        self.pass(prepare, p, s, u, g);
    }

    #[inline(always)]
    fn pass<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], s: &mut [f32], u: &mut [f32], g: &[G]) {
        let Self { neg_lr, rho, rest, eps, .. } = *self;
        for (((p, s), u), &g) in p.iter_mut().zip(s).zip(u).zip(g) {
            let g = prepare.of(g, *p);
            *s = (rest * g).mul_add(g, *s * rho);
            let dx = (*u + eps).sqrt() / (*s + eps).sqrt() * g;
            *u = (rest * dx).mul_add(dx, *u * rho);
            *p = neg_lr.mul_add(dx, *p);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::optim::settings::SettingsTable;

    const HALF: Adadelta = Adadelta { lr: 1.0, rho: 0.5, eps: 1.0, weight_decay: 0.0, maximize: false };

    #[test]
    fn the_update_uses_the_old_mean_of_updates() {
        // s = 0.5 * 28 + 0.5 * 4 = 16 - 1; sqrt(3 + 1) / sqrt(15 + 1) * 2 = 1; u = 0.5 * 3 + 0.5 * 1.
        let (mut p, mut s, mut u) = ([5.0; 3], [26.0; 3], [3.0; 3]);
        HALF.rule(0, 0.25).step(&mut p, &mut [&mut s, &mut u], &[2.0; 3]);
        assert_eq!((p, s, u), ([4.75; 3], [15.0; 3], [2.0; 3]));
    }

    #[test]
    fn decay_and_ascent() {
        // -6 + 1 * 4 = -2: the step above, mirrored.
        let (mut p, mut s, mut u) = ([4.0], [26.0], [3.0]);
        let adadelta = Adadelta { weight_decay: 1.0, maximize: true, ..HALF };
        adadelta.rule(9, 1.0).step(&mut p, &mut [&mut s, &mut u], &[6.0]);
        assert_eq!((p, s, u), ([5.0], [15.0], [2.0]));
    }

    #[test]
    fn settings_are_checked() {
        assert!(Adadelta::default().validate().is_ok());
        let bad = [
            (Adadelta { lr: -1.0, ..HALF }, "lr"),
            (Adadelta { rho: 1.1, ..HALF }, "rho"),
            (Adadelta { rho: f64::NAN, ..HALF }, "rho"),
            (Adadelta { eps: -1.0, ..HALF }, "eps"),
            (Adadelta { weight_decay: -1.0, ..HALF }, "weight_decay"),
        ];
        for (adadelta, argument) in bad {
            assert!(adadelta.validate().unwrap_err().message.ends_with(argument));
        }
    }
}
