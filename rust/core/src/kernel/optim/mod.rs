//! Optimizers, one file each, with formula and paper in its header and torch's argument names, defaults and
//! state names. The operations are those of torch's single-tensor CPU code with an IEEE square root: a fused
//! multiply-add exactly where torch's kernels fuse, and scalars that are computed in float64 and rounded
//! once. The lists at the top of this file name each optimizer and each rule once.

mod adadelta;
mod adagrad;
mod adam;
mod algorithm;
mod average;
mod ftrl;
mod lazy_adam;
mod lion;
mod list;
mod rmsprop;
mod schedule_free;
mod schedule_free_adamw;
mod schedule_free_sgd;
mod settings;
mod sgd;

pub use adadelta::Adadelta;
pub use adagrad::Adagrad;
pub use adam::{Adam, AdamW};
pub use average::Average;
pub use ftrl::Ftrl;
pub use lion::Lion;
pub use rmsprop::Rmsprop;
pub use schedule_free_adamw::ScheduleFreeAdamW;
pub use schedule_free_sgd::ScheduleFreeSgd;
pub use settings::{Setting, Value};
pub use sgd::Sgd;

use adadelta::AdadeltaRule;
use adagrad::AdagradRule;
use adam::AdamRule;
pub(crate) use algorithm::lerp;
use algorithm::{Algorithm, AsItCame, Changed, Prepare, split_eps};
use average::AverageRule;
use ftrl::FtrlRule;
use lazy_adam::LazyAdamRule;
use lion::LionRule;
use rmsprop::RmspropRule;
use schedule_free_adamw::ScheduleFreeAdamWRule;
use schedule_free_sgd::ScheduleFreeSgdRule;
use settings::SettingsTable;
use sgd::MomentumRule;
pub(crate) use sgd::{SgdRule, SgdStep};

use crate::base::block::Lane;
use crate::base::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

list::optimizers! {
    /// Stochastic gradient descent.
    Sgd: "sgd", "SGD";
    /// Adagrad.
    Adagrad: "adagrad", "Adagrad";
    /// `RMSprop`.
    Rmsprop: "rmsprop", "RMSprop";
    /// Adadelta.
    Adadelta: "adadelta", "Adadelta";
    /// Adam.
    Adam: "adam", "Adam";
    /// `AdamW`: Adam with decoupled weight decay.
    AdamW: "adamw", "AdamW";
    /// Lion.
    Lion: "lion", "Lion";
    /// FTRL-proximal.
    Ftrl: "ftrl", "Ftrl";
    /// A running average of pushed values.
    Average: "average", "Average";
    /// Schedule-Free SGD.
    ScheduleFreeSgd: "schedule_free_sgd", "ScheduleFreeSGD";
    /// Schedule-Free `AdamW`.
    ScheduleFreeAdamW: "schedule_free_adamw", "ScheduleFreeAdamW";
}

list::rules! {
    /// An optimizer's scalars for one step, rounded to float32: all that the loop over the blocks needs.
    Rule {
        Sgd(SgdRule), Momentum(MomentumRule), Adagrad(AdagradRule), Rmsprop(RmspropRule),
        Adadelta(AdadeltaRule), Adam(AdamRule), Lion(LionRule), Ftrl(FtrlRule), Average(AverageRule),
        ScheduleFreeSgd(ScheduleFreeSgdRule), ScheduleFreeAdamW(ScheduleFreeAdamWRule),
    }
}

list::rules! {
    /// The scalars for one step that touches only some rows.
    SparseRule { Sgd(SgdRule), Adagrad(AdagradRule), Adam(LazyAdamRule), Ftrl(FtrlRule) }
}

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
    /// The most state slots that its settings need.
    const SLOTS: usize;
    /// Updates parameters `p` and the state slots (in the order of [`Optimizer::slots`]) with gradient `g`;
    /// all have the same length. A single pass, so that arithmetic and memory access overlap.
    fn step<G: Lane<T>>(&self, p: &mut [T], state: &mut [&mut [T]], g: &[G]);
}

/// Code that is compiled once per rule.
pub(crate) trait WithRule {
    /// Runs with the rule of a step.
    fn run_with(self, rule: impl Step);
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
    /// The optimizer of this name, with its default settings.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|optimizer| optimizer.name() == name)
    }

    /// Returns whether its state holds an average of the values.
    pub fn keeps_average(&self) -> bool {
        self.average_weight().is_some()
    }

    /// Fails if a push cannot have this learning rate.
    pub fn check_rate(&self, lr: Option<f64>) -> Result<()> {
        let Some(lr) = lr.filter(|lr| *lr != self.lr() && self.keeps_average()) else {
            return Ok(());
        };
        let why =
            "the optimizer weighs its average by one rate for all steps; leave lr= out, and use no schedule";
        Err(Error::new(Kind::Config, why).expected(format!("lr={}", self.lr()), lr))
    }

    /// Fails unless the optimizer steps float64 tensors.
    pub fn check_float64(&self) -> Result<()> {
        self.float64_step(0, self.lr()).map(drop)
    }

    /// As [`Optimizer::rule`], for one step of a float64 slice.
    pub(crate) fn float64_step(&self, step: u64, lr: f64) -> Result<SgdStep<f64>> {
        match self {
            Self::Sgd(sgd) => Ok(sgd.step_of(step, lr)),
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
        self.try_sparse_rule(step, lr).map_err(|reason| {
            Error::new(
                Kind::Precondition,
                format!("the tensor's optimizer takes no sparse pushes: {reason}"),
            )
            .expected(
                "SGD without momentum, Adagrad or Adam without amsgrad, all without weight_decay, or Ftrl",
                self,
            )
        })
    }
}
