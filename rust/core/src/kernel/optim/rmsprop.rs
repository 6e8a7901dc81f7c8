//! `RMSprop`: Tieleman & Hinton, "Neural Networks for Machine Learning", lecture 6a, 2012; centred as in
//! Graves, "Generating Sequences With Recurrent Neural Networks", arXiv 1308.0850, 2013.
//!
//! ```text
//! g   = -g                              maximize
//! g   = fma(weight_decay, p, g)         weight_decay != 0
//! s   = fma((1 - alpha) * g, g, s * alpha)
//! a   = lerp(a, g, 1 - alpha)           centered
//! v   = s                               centered: fma(-a, a, s)
//! d   = sqrt(v) + eps                   eps_mode outside; inside: sqrt(v + eps); both: sqrt(v + eps) + eps
//! p   = p + (-lr * g) / d               momentum = 0
//! b   = b * momentum + g / d            momentum > 0
//! p   = fma(-lr, b, p)                  momentum > 0
//! ```

use super::settings::settings;
use super::{Algorithm, AsItCame, Changed, EpsMode, Prepare, SparseRule, Step, lerp, split_eps};
use crate::base::block::Lane;

settings! {
    /// Settings of `RMSprop`, named as torch names them.
    ///
    /// Finite gradients can produce bad state, as in torch: with `centered` and a (nearly) constant gradient,
    /// the rounding of `square_avg - grad_avg^2` can fall below 0, so its root is NaN; a gradient beyond
    /// about 1e19 makes `square_avg` infinite permanently; `eps = 0` with zero gradients gives 0 / 0.
    pub struct Rmsprop {
        /// Learning rate.
        lr: f64 = 1e-2, NonNegative;
        /// Share of the old mean that each step keeps.
        alpha: f64 = 0.99, NonNegative;
        /// Keeps the division finite.
        eps: f64 = 1e-8, NonNegative;
        /// L2 penalty, added to the gradient.
        weight_decay: f64 = 0.0, NonNegative;
        /// Momentum; 0 keeps no buffer.
        momentum: f64 = 0.0, NonNegative;
        /// Divides by the standard deviation instead of the root of the mean square.
        centered: bool = false;
        /// Where `eps` is added.
        eps_mode: EpsMode = EpsMode::Outside;
        /// Ascend instead of descend.
        maximize: bool = false;
    }
}

impl Algorithm for Rmsprop {
    type Rule = RmspropRule;

    /// State: the mean square, then the velocity if there is momentum, then the mean if centred.
    fn slots(&self) -> Vec<&'static str> {
        let mut slots = vec!["square_avg"];
        if self.momentum > 0.0 {
            slots.push("momentum_buffer");
        }
        if self.centered {
            slots.push("grad_avg");
        }
        slots
    }

    /// The scalars of one step; they do not depend on the step's number.
    fn rule(&self, _step: u64, lr: f64) -> RmspropRule {
        let (eps_in, eps_out) = split_eps(self.eps, self.eps_mode);
        RmspropRule {
            neg_lr: -lr as f32,
            prepare: Changed::new(self.maximize, self.weight_decay),
            alpha: self.alpha as f32,
            rest: (1.0 - self.alpha) as f32,
            momentum: self.momentum as f32,
            eps_in,
            eps_out,
            has_momentum: self.momentum > 0.0,
            centered: self.centered,
        }
    }

    fn sparse_rule(&self, _step: u64, _lr: f64) -> Result<SparseRule, &'static str> {
        Err("RMSprop's means decay in every row")
    }

    fn momentum(&self) -> f64 {
        self.momentum
    }
}

/// The scalars of one `RMSprop` step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmspropRule {
    neg_lr: f32,
    prepare: Option<Changed>,
    alpha: f32,
    /// 1 - alpha.
    rest: f32,
    momentum: f32,
    eps_in: f32,
    eps_out: f32,
    has_momentum: bool,
    centered: bool,
}

impl RmspropRule {
    pub(super) fn with_momentum(self, momentum: f32) -> Self {
        Self { momentum, ..self }
    }
}

impl RmspropRule {
    /// The new mean square.
    #[inline(always)]
    fn square(&self, s: f32, g: f32) -> f32 {
        (self.rest * g).mul_add(g, s * self.alpha)
    }

    /// The divisor.
    #[inline(always)]
    fn root(&self, v: f32) -> f32 {
        (v + self.eps_in).sqrt() + self.eps_out
    }
}

impl Step for RmspropRule {
    const SLOTS: usize = 3;

    #[inline(always)]
    fn step<G: Lane>(&self, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        match self.prepare {
            None => self.prepared(AsItCame, p, state, g),
            Some(prepare) => self.prepared(prepare, p, state, g),
        }
    }
}

impl RmspropRule {
    #[inline(always)]
    fn prepared<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        match (state, self.has_momentum, self.centered) {
            ([s], false, false) => self.plain(prepare, p, s, g),
            ([s, b], true, false) => self.momentum(prepare, p, s, b, g),
            ([s, a], false, true) => self.centered(prepare, p, s, a, g),
            ([s, b, a], true, true) => self.centered_momentum(prepare, p, s, b, a, g),
            _ => unreachable!("RMSprop's state slots follow its settings"),
        }
    }

    #[inline(always)]
    fn plain<P: Prepare, G: Lane>(&self, prepare: P, p: &mut [f32], s: &mut [f32], g: &[G]) {
        let rule = *self;
        for ((p, s), &g) in p.iter_mut().zip(s).zip(g) {
            let g = prepare.of(g, *p);
            *s = rule.square(*s, g);
            *p += rule.neg_lr * g / rule.root(*s);
        }
    }

    #[inline(always)]
    fn momentum<P: Prepare, G: Lane>(
        &self,
        prepare: P,
        p: &mut [f32],
        s: &mut [f32],
        b: &mut [f32],
        g: &[G],
    ) {
        let rule = *self;
        for (((p, s), b), &g) in p.iter_mut().zip(s).zip(b).zip(g) {
            let g = prepare.of(g, *p);
            *s = rule.square(*s, g);
            *b = *b * rule.momentum + g / rule.root(*s);
            *p = rule.neg_lr.mul_add(*b, *p);
        }
    }

    #[inline(always)]
    fn centered<P: Prepare, G: Lane>(
        &self,
        prepare: P,
        p: &mut [f32],
        s: &mut [f32],
        a: &mut [f32],
        g: &[G],
    ) {
        let rule = *self;
        for (((p, s), a), &g) in p.iter_mut().zip(s).zip(a).zip(g) {
            let g = prepare.of(g, *p);
            *s = rule.square(*s, g);
            *a = lerp(*a, g, rule.rest);
            *p += rule.neg_lr * g / rule.root((-*a).mul_add(*a, *s));
        }
    }

    #[inline(always)]
    fn centered_momentum<P: Prepare, G: Lane>(
        &self,
        prepare: P,
        p: &mut [f32],
        s: &mut [f32],
        b: &mut [f32],
        a: &mut [f32],
        g: &[G],
    ) {
        let rule = *self;
        for ((((p, s), b), a), &g) in p.iter_mut().zip(s).zip(b).zip(a).zip(g) {
            let g = prepare.of(g, *p);
            *s = rule.square(*s, g);
            *a = lerp(*a, g, rule.rest);
            *b = *b * rule.momentum + g / rule.root((-*a).mul_add(*a, *s));
            *p = rule.neg_lr.mul_add(*b, *p);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::optim::settings::SettingsTable;

    const HALF: Rmsprop = Rmsprop {
        lr: 1.0,
        alpha: 0.5,
        eps: 0.0,
        weight_decay: 0.0,
        momentum: 0.0,
        centered: false,
        eps_mode: EpsMode::Outside,
        maximize: false,
    };

    /// One step of gradient `g` on one element; the state is filled in the order of the slots.
    fn one(rmsprop: Rmsprop, p: f32, state: [f32; 3], g: f32) -> (f32, Vec<f32>) {
        let mut p = [p];
        let mut state: Vec<[f32; 1]> = state[..rmsprop.slots().len()].iter().map(|&x| [x]).collect();
        let mut views: Vec<&mut [f32]> = state.iter_mut().map(|s| &mut s[..]).collect();
        rmsprop.rule(0, rmsprop.lr).step(&mut p, &mut views, &[g]);
        (p[0], state.into_iter().map(|[x]| x).collect())
    }

    #[test]
    fn the_three_places_of_eps() {
        // s = 0.5 * 14 + 0.5 * 4 = 9.
        let with = |eps_mode| Rmsprop { eps: 7.0, eps_mode, ..HALF };
        assert_eq!(one(HALF, 0.0, [14.0, 0.0, 0.0], 2.0), (-2.0 / 3.0, vec![9.0]));
        assert_eq!(one(with(EpsMode::Outside), 0.0, [14.0, 0.0, 0.0], 2.0).0, -0.2);
        assert_eq!(one(with(EpsMode::Inside), 0.0, [14.0, 0.0, 0.0], 2.0).0, -0.5);
        assert_eq!(one(with(EpsMode::Both), 0.0, [14.0, 0.0, 0.0], 2.0).0, -2.0 / 11.0);
    }

    #[test]
    fn momentum_and_centering() {
        let momentum = Rmsprop { momentum: 0.5, lr: 3.0, ..HALF };
        assert_eq!(momentum.slots(), ["square_avg", "momentum_buffer"]);
        assert_eq!(one(momentum, 1.0, [14.0, 2.0, 0.0], 6.0), (1.0 - 3.0 * 2.2, vec![25.0, 2.2]));
        // mean 0.5 * 6 + 0.5 * 2 = 4, variance 25 - 16 = 9.
        let centered = Rmsprop { centered: true, ..HALF };
        assert_eq!(centered.slots(), ["square_avg", "grad_avg"]);
        assert_eq!(one(centered, 1.0, [14.0, 2.0, 0.0], 6.0), (-1.0, vec![25.0, 4.0]));
        let both = Rmsprop { centered: true, ..momentum };
        assert_eq!(both.slots(), ["square_avg", "momentum_buffer", "grad_avg"]);
        assert_eq!(one(both, 1.0, [14.0, 2.0, 2.0], 6.0), (-8.0, vec![25.0, 3.0, 4.0]));
    }

    #[test]
    fn settings_are_checked() {
        assert!(Rmsprop::default().validate().is_ok());
        let bad = [
            (Rmsprop { lr: -1.0, ..HALF }, "lr"),
            (Rmsprop { eps: -1.0, ..HALF }, "eps"),
            (Rmsprop { momentum: -1.0, ..HALF }, "momentum"),
            (Rmsprop { weight_decay: f64::NAN, ..HALF }, "weight_decay"),
            (Rmsprop { alpha: -0.1, ..HALF }, "alpha"),
        ];
        for (rmsprop, argument) in bad {
            assert!(rmsprop.validate().unwrap_err().message.ends_with(argument));
        }
    }
}
