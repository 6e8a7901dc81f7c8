//! Optimizers, one file each, with formula and paper in its header and torch's argument names, defaults and
//! state names. The operations are those of torch's single-tensor CPU code with an IEEE square root: a fused
//! multiply-add exactly where torch's kernels fuse, and scalars that are computed in float64 and rounded
//! once.

mod adadelta;
mod adagrad;
mod adam;
mod average;
mod ftrl;
mod lazy_adam;
mod rmsprop;
mod settings;
mod sgd;

pub use adadelta::Adadelta;
pub(crate) use adadelta::AdadeltaRule;
pub use adagrad::Adagrad;
pub(crate) use adagrad::AdagradRule;
pub(crate) use adam::AdamRule;
pub use adam::{Adam, AdamW};
pub use average::Average;
pub(crate) use average::AverageRule;
pub use ftrl::Ftrl;
pub(crate) use ftrl::FtrlRule;
pub(crate) use lazy_adam::LazyAdamRule;
pub use rmsprop::Rmsprop;
pub(crate) use rmsprop::RmspropRule;
pub use settings::{Setting, Value};
pub use sgd::Sgd;
pub(crate) use sgd::{MomentumRule, SgdRule, SgdStep};

use crate::base::block::Lane;
use crate::base::error::{Error, Kind, Result};
use crate::kernel::real::Real;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Where `eps` is added when a rule divides by the root of a running mean of squares `s`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EpsMode {
    /// `sqrt(s) + eps`: the papers' and torch's form.
    #[default]
    Outside,
    /// `sqrt(s + eps)`: neon's Adagrad.
    Inside,
    /// `sqrt(s + eps) + eps`: neon's `RMSProp`.
    Both,
}

/// An optimizer with its settings, in float64 as in Python.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Optimizer {
    /// Stochastic gradient descent.
    Sgd(Sgd),
    /// Adagrad.
    Adagrad(Adagrad),
    /// `RMSprop`.
    Rmsprop(Rmsprop),
    /// Adadelta.
    Adadelta(Adadelta),
    /// Adam.
    Adam(Adam),
    /// `AdamW`: Adam with decoupled weight decay.
    AdamW(AdamW),
    /// FTRL-proximal.
    Ftrl(Ftrl),
    /// A running average of pushed values.
    Average(Average),
}

/// An optimizer's scalars for one step, rounded to float32: all that the loop over the blocks needs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    Sgd(SgdRule),
    Momentum(MomentumRule),
    Adagrad(AdagradRule),
    Rmsprop(RmspropRule),
    Adadelta(AdadeltaRule),
    Adam(AdamRule),
    Ftrl(FtrlRule),
    Average(AverageRule),
}

/// The scalars for one step that touches only some rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SparseRule {
    Sgd(SgdRule),
    Adagrad(AdagradRule),
    Adam(LazyAdamRule),
    Ftrl(FtrlRule),
}

impl Rule {
    /// The same step with another momentum, if the rule has momentum.
    pub(crate) fn with_momentum(self, momentum: f64) -> Self {
        match self {
            Self::Momentum(rule) => Self::Momentum(rule.with_momentum(momentum as f32)),
            Self::Rmsprop(rule) => Self::Rmsprop(rule.with_momentum(momentum as f32)),
            rule => rule,
        }
    }
}

/// One optimizer step on a run of elements.
pub(crate) trait Step<T = f32>: Copy {
    /// Updates parameters `p` and the state slots (in the order of [`Optimizer::slots`]) with gradient `g`;
    /// all have the same length. A single pass, so that arithmetic and memory access overlap.
    fn step<G: Lane<T>>(&self, p: &mut [T], state: &mut [&mut [T]], g: &[G]);
}

/// Maximum number of state slots of an optimizer.
pub const MAX_SLOTS: usize = 3;

impl fmt::Display for Optimizer {
    /// As written in Python.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut own = *self;
        let settings =
            own.settings().into_iter().map(|setting| format!("{}={}", setting.name, setting.value));
        write!(f, "{}({})", self.title(), settings.collect::<Vec<_>>().join(", "))
    }
}

impl Optimizer {
    /// Every optimizer, with its default settings.
    pub fn all() -> [Self; 8] {
        [
            Self::Sgd(Sgd::default()),
            Self::Adagrad(Adagrad::default()),
            Self::Rmsprop(Rmsprop::default()),
            Self::Adadelta(Adadelta::default()),
            Self::Adam(Adam::default()),
            Self::AdamW(AdamW::default()),
            Self::Ftrl(Ftrl::default()),
            Self::Average(Average::default()),
        ]
    }

    /// The optimizer of this name, with its default settings.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|optimizer| optimizer.name() == name)
    }

    /// The name on the wire, in lower case.
    pub fn name(&self) -> &'static str {
        self.names().0
    }

    /// The name as the papers write it.
    pub fn title(&self) -> &'static str {
        self.names().1
    }

    fn names(&self) -> (&'static str, &'static str) {
        match self {
            Self::Sgd(_) => ("sgd", "SGD"),
            Self::Adagrad(_) => ("adagrad", "Adagrad"),
            Self::Rmsprop(_) => ("rmsprop", "RMSprop"),
            Self::Adadelta(_) => ("adadelta", "Adadelta"),
            Self::Adam(_) => ("adam", "Adam"),
            Self::AdamW(_) => ("adamw", "AdamW"),
            Self::Ftrl(_) => ("ftrl", "Ftrl"),
            Self::Average(_) => ("average", "Average"),
        }
    }

    /// The table of settings, for reading and writing.
    pub fn settings(&mut self) -> Vec<Setting<'_>> {
        match self {
            Self::Sgd(o) => o.settings(),
            Self::Adagrad(o) => o.settings(),
            Self::Rmsprop(o) => o.settings(),
            Self::Adadelta(o) => o.settings(),
            Self::Adam(o) | Self::AdamW(AdamW(o)) => o.settings(),
            Self::Ftrl(o) => o.settings(),
            Self::Average(o) => o.settings(),
        }
    }

    /// Checks every setting as torch does; the error names the argument, what was expected and what arrived.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Sgd(o) => o.validate(),
            Self::Adagrad(o) => o.validate(),
            Self::Rmsprop(o) => o.validate(),
            Self::Adadelta(o) => o.validate(),
            Self::Adam(o) => o.validate(),
            Self::AdamW(o) => o.validate(),
            Self::Ftrl(o) => o.validate(),
            Self::Average(o) => o.validate(),
        }
    }

    /// torch's names of the state tensors that these settings need, in storage order (at most [`MAX_SLOTS`]).
    pub fn slots(&self) -> Vec<&'static str> {
        match self {
            Self::Sgd(o) => o.slots(),
            Self::Adagrad(o) => o.slots(),
            Self::Rmsprop(o) => o.slots(),
            Self::Adadelta(o) => o.slots(),
            Self::Adam(o) => o.slots(),
            Self::AdamW(o) => o.slots(),
            Self::Ftrl(o) => o.slots(),
            Self::Average(o) => o.slots(),
        }
    }

    /// The value that registration fills a state slot with (Adagrad's `initial_accumulator_value`, else 0).
    pub fn initial_state(&self) -> f32 {
        match self {
            Self::Adagrad(o) => o.initial_accumulator_value as f32,
            _ => 0.0,
        }
    }

    /// The learning rate in the settings.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Sgd(o) => o.lr,
            Self::Adagrad(o) => o.lr,
            Self::Rmsprop(o) => o.lr,
            Self::Adadelta(o) => o.lr,
            Self::Adam(o) => o.lr,
            Self::AdamW(o) => o.0.lr,
            Self::Ftrl(o) => o.lr,
            Self::Average(o) => o.lr,
        }
    }

    /// The rate and the factor on the pushed values by which a push with this rate and scale is applied.
    #[inline(always)]
    pub(crate) fn rate_and_factor(&self, lr: f64, scale: f32) -> (f64, f32) {
        match self {
            Self::Average(_) => (lr * f64::from(scale), 1.0),
            _ => (lr, scale),
        }
    }

    /// The momentum in the settings; 0 if the optimizer has none.
    pub fn momentum(&self) -> f64 {
        match self {
            Self::Sgd(o) => o.momentum,
            Self::Rmsprop(o) => o.momentum,
            _ => 0.0,
        }
    }

    /// The scalars of one step. `step` is the number of steps that the slice has taken before this one. `lr`
    /// replaces the settings' rate.
    #[inline(always)]
    pub(crate) fn rule(&self, step: u64, lr: f64) -> Rule {
        match self {
            Self::Sgd(o) => match o.rule(step, lr) {
                SgdStep::Plain(rule) => Rule::Sgd(rule),
                SgdStep::Momentum(rule) => Rule::Momentum(rule),
            },
            Self::Adagrad(o) => Rule::Adagrad(o.rule(step, lr)),
            Self::Rmsprop(o) => Rule::Rmsprop(o.rule(step, lr)),
            Self::Adadelta(o) => Rule::Adadelta(o.rule(step, lr)),
            Self::Adam(o) => Rule::Adam(o.rule(step, lr)),
            Self::AdamW(o) => Rule::Adam(o.rule(step, lr)),
            Self::Ftrl(o) => Rule::Ftrl(o.rule(lr)),
            Self::Average(o) => Rule::Average(o.rule(lr)),
        }
    }

    /// Fails unless the optimizer steps float64 tensors.
    pub fn check_float64(&self) -> Result<()> {
        self.float64_step(0, self.lr()).map(drop)
    }

    /// As [`Optimizer::rule`], for one step of a float64 slice.
    pub(crate) fn float64_step(&self, step: u64, lr: f64) -> Result<SgdStep<f64>> {
        match self {
            Self::Sgd(o) => Ok(o.rule(step, lr)),
            other => {
                Err(Error::new(Kind::DType, "only SGD steps float64 tensors; convert the values to float32")
                    .expected("float32, or SGD", format!("float64 and {}", other.title())))
            }
        }
    }

    /// Fails, with the reason, if these settings require a step to change untouched rows.
    pub fn check_sparse(&self) -> Result<()> {
        self.sparse_rule(0, self.lr()).map(drop)
    }

    /// The scalars of one step that touches only some rows: torch's sparse SGD, Adagrad and `SparseAdam`, and
    /// FTRL.
    pub(crate) fn sparse_rule(&self, step: u64, lr: f64) -> Result<SparseRule> {
        let decays = |weight_decay: f64| (weight_decay != 0.0).then_some("weight_decay shrinks every row");
        let (why, rule) = match self {
            Self::Sgd(o) if o.momentum != 0.0 => (Some("momentum moves every row"), None),
            Self::Sgd(o) => match o.rule(step, lr) {
                SgdStep::Plain(rule) => (decays(o.weight_decay), Some(SparseRule::Sgd(rule))),
                SgdStep::Momentum(_) => (Some("momentum moves every row"), None),
            },
            Self::Adagrad(o) => (decays(o.weight_decay), Some(SparseRule::Adagrad(o.rule(step, lr)))),
            Self::Adam(o) | Self::AdamW(AdamW(o)) if o.amsgrad => {
                (Some("lazy Adam, as torch's SparseAdam, has no amsgrad"), None)
            }
            Self::Adam(o) | Self::AdamW(AdamW(o)) => {
                (decays(o.weight_decay), Some(SparseRule::Adam(LazyAdamRule::new(o, step, lr))))
            }
            Self::Ftrl(o) => (None, Some(SparseRule::Ftrl(o.rule(lr)))),
            Self::Average(_) => (Some("rows that are named twice are summed, which averages nothing"), None),
            Self::Rmsprop(_) => (Some("RMSprop's means decay in every row"), None),
            Self::Adadelta(_) => (Some("Adadelta's means decay in every row"), None),
        };
        match (why, rule) {
            (None, Some(rule)) => Ok(rule),
            (why, _) => Err(Error::new(
                Kind::Precondition,
                format!("the tensor's optimizer takes no sparse pushes: {}", why.unwrap_or_default()),
            )
            .expected(
                "SGD without momentum, Adagrad or Adam without amsgrad, all without weight_decay, or Ftrl",
                self,
            )),
        }
    }
}

// Code for one element that several rules share.

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
