//! Lazy Adam: a sparse push to a tensor with Adam; torch's `SparseAdam`, operation by operation. The moments
//! decay only at touched elements, and `eps` is added to the uncorrected root.
//!
//! ```text
//! g   = -g                              maximize
//! m   = m + (g - m) * (1 - beta1)
//! v   = v + (g * g - v) * (1 - beta2)
//! d   = sqrt(v) + eps
//! p   = p + -size * (m / d)             size = lr * sqrt(1 - beta2^t) / (1 - beta1^t) in float64
//! ```
//!
//! `t` counts the steps of the slice, dense and sparse alike, as torch does for a tensor of one slice.

use super::Step;
use super::algorithm::corrections;
use crate::base::block::Lane;

/// The scalars of one step of lazy Adam.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LazyAdamRule {
    neg_size: f32,
    rest1: f32,
    rest2: f32,
    eps: f32,
    maximize: bool,
}

impl LazyAdamRule {
    /// The rule of Adam's settings at a rate, after `step` earlier steps.
    pub(crate) fn new(betas: (f64, f64), eps: f64, maximize: bool, step: u64, lr: f64) -> Self {
        let (beta1, beta2) = betas;
        let (correction1, root_correction2) = corrections(beta1, beta2, step);
        Self {
            neg_size: -(lr * root_correction2 / correction1) as f32,
            rest1: (1.0 - beta1) as f32,
            rest2: (1.0 - beta2) as f32,
            eps: eps as f32,
            maximize,
        }
    }
}

impl Step for LazyAdamRule {
    const SLOTS: usize = 2;

    #[inline(always)]
    fn step<G: Lane>(&self, p: &mut [f32], state: &mut [&mut [f32]], g: &[G]) {
        let [m, v] = state else { unreachable!("lazy Adam has two state slots") };
        let Self { neg_size, rest1, rest2, eps, maximize } = *self;
        for (((p, m), v), &g) in p.iter_mut().zip(m.iter_mut()).zip(v.iter_mut()).zip(g) {
            let g = if maximize { -g.value() } else { g.value() };
            *m += (g - *m) * rest1;
            *v += (g * g - *v) * rest2;
            *p += neg_size * (*m / (v.sqrt() + eps));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_moves_by_the_rate() {
        for (maximize, expected) in [(false, 0.5), (true, 1.5)] {
            let rule = LazyAdamRule::new((0.9, 0.999), 0.0, maximize, 0, 0.5);
            let (mut p, mut m, mut v) = ([1.0; 3], [0.0; 3], [0.0; 3]);
            rule.step(&mut p, &mut [&mut m, &mut v], &[4.0; 3]);
            assert!(p.iter().all(|p: &f32| (p - expected).abs() < 1e-6), "{p:?}");
        }
    }
}
