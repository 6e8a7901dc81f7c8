//! What the file of an optimizer provides, and what several of them share.

use super::settings::SettingsTable;
use super::{EpsMode, Rule, SparseRule};
use crate::base::block::Lane;
use crate::kernel::real::Real;
use std::cell::Cell;

/// An optimizer: its state and the scalars of its steps.
pub(crate) trait Algorithm: SettingsTable {
    /// The scalars of one step, rounded to float32.
    type Rule: Into<Rule>;

    /// torch's names of the state tensors that these settings need, in storage order.
    fn slots(&self) -> Vec<&'static str>;

    /// The scalars of one step at the rate `lr`, after `step` earlier steps of the slice.
    fn rule(&self, step: u64, lr: f64) -> Self::Rule;

    /// The scalars of one step that touches only some rows, or the reason why a step must change all rows.
    fn sparse_rule(&self, step: u64, lr: f64) -> Result<SparseRule, &'static str>;

    /// The value that registration fills a state slot with.
    fn initial_state(&self) -> f32 {
        0.0
    }

    /// The momentum in the settings; 0 if the optimizer has none.
    fn momentum(&self) -> f64 {
        0.0
    }

    /// The share of the old mean gradient that each step keeps, if the optimizer has such a mean and
    /// divides it by its bias.
    fn beta1(&self) -> Option<f64> {
        None
    }

    /// The weight w by which `lerp(values, first slot, w)` is the average, if the optimizer keeps one. An
    /// assignment sets that slot, too, and a push has no rate of its own.
    fn average_weight(&self) -> Option<f32> {
        None
    }

    /// As [`Algorithm::rule`], for a step that keeps the share `beta1` of the old mean gradient.
    fn matched_rule(&self, step: u64, lr: f64, _beta1: f64) -> Self::Rule {
        self.rule(step, lr)
    }

    /// The rate and the factor on the pushed values by which a push with this rate and scale is applied.
    #[inline(always)]
    fn rate_and_factor(&self, lr: f64, scale: f32) -> (f64, f32) {
        (lr, scale)
    }

    /// The largest term that a step computes of gradients up to `largest`.
    #[inline(always)]
    fn largest_term(&self, _lr: f64, largest: f64) -> f64 {
        largest * largest
    }
}

/// Fails if a weight decay changes every row.
pub(super) fn no_decay(weight_decay: f64) -> Result<(), &'static str> {
    if weight_decay == 0.0 { Ok(()) } else { Err("weight_decay shrinks every row") }
}

/// `1 - beta1^t` and the root of `1 - beta2^t`. The tensors of a list are mostly at the same step, so each
/// thread caches its last result: the powers cost as much as the step of a small tensor.
pub(super) fn corrections(beta1: f64, beta2: f64, step: u64) -> (f64, f64) {
    type Known = ((f64, f64, u64), (f64, f64));
    thread_local!(static LAST: Cell<Option<Known>> = const { Cell::new(None) });
    let asked = (beta1, beta2, step);
    if let Some((known, answer)) = LAST.get()
        && known == asked
    {
        return answer;
    }
    let t = step as f64 + 1.0;
    let answer = (1.0 - beta1.powf(t), (1.0 - beta2.powf(t)).powf(0.5));
    LAST.set(Some((asked, answer)));
    answer
}

/// Prepares the gradient for the rule. It is a type, so that the common case adds nothing to the loop.
pub(crate) trait Prepare<T = f32>: Copy {
    /// The gradient for the parameter `p`.
    fn of(self, g: impl Lane<T>, p: T) -> T;
}

/// Uses the gradient unchanged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AsItCame;

/// Negated if `maximize`, then `fma(weight_decay, p, g)` if there is a decay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Changed<T = f32> {
    maximize: bool,
    weight_decay: Option<T>,
}

impl<T: Real> Changed<T> {
    /// `None` if the gradient needs no preparation. The decay is rounded once (a tiny one may round to 0 and
    /// still counts).
    pub(crate) fn new(maximize: bool, weight_decay: f64) -> Option<Self> {
        let weight_decay = (weight_decay != 0.0).then_some(T::nearest(weight_decay));
        (maximize || weight_decay.is_some()).then_some(Self { maximize, weight_decay })
    }
}

impl<T: Real> Prepare<T> for AsItCame {
    #[inline(always)]
    fn of(self, g: impl Lane<T>, _p: T) -> T {
        g.value()
    }
}

impl<T: Real> Prepare<T> for Changed<T> {
    #[inline(always)]
    fn of(self, g: impl Lane<T>, p: T) -> T {
        let g = g.value();
        let g = if self.maximize { -g } else { g };
        self.weight_decay.map_or(g, |decay| decay.fma(p, g))
    }
}

/// torch's `avg.lerp_(g, weight)`, which has two forms, so that `weight = 1` gives `g` exactly.
#[inline(always)]
pub(crate) fn lerp(avg: f32, g: f32, weight: f32) -> f32 {
    if weight.abs() < 0.5 { weight.mul_add(g - avg, avg) } else { (weight - 1.0).mul_add(g - avg, g) }
}

/// The terms added under and after the square root. Adding 0 to a value that is never -0 is exact, so one
/// loop serves all modes.
pub(crate) fn split_eps(eps: f64, mode: EpsMode) -> (f32, f32) {
    let eps = eps as f32;
    match mode {
        EpsMode::Outside => (0.0, eps),
        EpsMode::Inside => (eps, 0.0),
        EpsMode::Both => (eps, eps),
    }
}
