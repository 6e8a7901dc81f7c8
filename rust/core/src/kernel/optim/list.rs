//! The lists of `mod.rs`: an optimizer or a rule that stands in one of them is dispatched everywhere.

/// Generates [`super::Optimizer`] from a list of `Settings: "name on the wire", "name in the papers";`.
macro_rules! optimizers {
    ($($(#[$doc:meta])* $settings:ident: $name:literal, $title:literal;)*) => {
        /// An optimizer with its settings, in float64 as in Python.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        pub enum Optimizer {
            $($(#[$doc])* $settings($settings),)*
        }

        impl Optimizer {
            /// Every optimizer, with its default settings.
            pub fn all() -> [Self; [$($name),*].len()] {
                [$(Self::$settings($settings::default())),*]
            }

            /// The name on the wire, in lower case.
            pub fn name(&self) -> &'static str {
                match self { $(Self::$settings(_) => $name,)* }
            }

            /// The name as the papers write it.
            pub fn title(&self) -> &'static str {
                match self { $(Self::$settings(_) => $title,)* }
            }

            /// The table of settings, for reading and writing.
            pub fn settings(&mut self) -> Vec<Setting<'_>> {
                match self { $(Self::$settings(o) => o.settings(),)* }
            }

            /// Checks every setting as torch does; the error names the argument, what was expected and what
            /// arrived.
            pub fn validate(&self) -> Result<()> {
                match self { $(Self::$settings(o) => o.validate(),)* }
            }

            /// torch's names of the state tensors that these settings need, in storage order (at most
            /// [`MAX_SLOTS`]).
            pub fn slots(&self) -> Vec<&'static str> {
                match self { $(Self::$settings(o) => o.slots(),)* }
            }

            /// The value that registration fills a state slot with (Adagrad's `initial_accumulator_value`,
            /// else 0).
            pub fn initial_state(&self) -> f32 {
                match self { $(Self::$settings(o) => o.initial_state(),)* }
            }

            /// The learning rate in the settings.
            pub fn lr(&self) -> f64 {
                match self { $(Self::$settings(o) => o.lr(),)* }
            }

            /// The momentum in the settings; 0 if the optimizer has none.
            pub fn momentum(&self) -> f64 {
                match self { $(Self::$settings(o) => o.momentum(),)* }
            }

            /// Adam's `beta1`; `None` if the optimizer has none.
            pub fn beta1(&self) -> Option<f64> {
                match self { $(Self::$settings(o) => o.beta1(),)* }
            }

            /// The weight w by which `lerp(values, first slot, w)` is the average, if the optimizer keeps
            /// one. An assignment sets that slot, too, and a push has no rate of its own.
            pub(crate) fn average_weight(&self) -> Option<f32> {
                match self { $(Self::$settings(o) => o.average_weight(),)* }
            }

            /// Returns whether it has a momentum, which asynchrony adds to.
            pub fn has_momentum(&self) -> bool {
                self.momentum() > 0.0 || self.beta1().is_some()
            }

            /// The rate and the factor on the pushed values by which a push with this rate and scale is
            /// applied.
            #[inline(always)]
            pub(crate) fn rate_and_factor(&self, lr: f64, scale: f32) -> (f64, f32) {
                match self { $(Self::$settings(o) => o.rate_and_factor(lr, scale),)* }
            }

            /// The largest term that a step at the rate `lr` computes of gradients up to `largest`.
            #[inline(always)]
            pub(crate) fn largest_term(&self, lr: f64, largest: f64) -> f64 {
                match self { $(Self::$settings(o) => o.largest_term(lr, largest),)* }
            }

            /// The scalars of one step. `step` is the number of steps that the slice has taken before this
            /// one. `lr` replaces the settings' rate.
            #[inline(always)]
            pub(crate) fn rule(&self, step: u64, lr: f64) -> Rule {
                match self { $(Self::$settings(o) => o.rule(step, lr).into(),)* }
            }

            /// As [`Optimizer::rule`], with `beta1` in place of Adam's own.
            #[cold]
            pub(crate) fn matched_rule(&self, step: u64, lr: f64, beta1: f64) -> Rule {
                match self { $(Self::$settings(o) => o.matched_rule(step, lr, beta1).into(),)* }
            }

            fn try_sparse_rule(&self, step: u64, lr: f64) -> std::result::Result<SparseRule, &'static str> {
                match self { $(Self::$settings(o) => o.sparse_rule(step, lr),)* }
            }
        }
    };
}
pub(super) use optimizers;

/// Generates an enum of rules from the list of its variants.
macro_rules! rules {
    ($(#[$doc:meta])* $name:ident { $($variant:ident($rule:ty)),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) enum $name {
            $($variant($rule),)*
        }

        impl $name {
            /// Runs the code that is compiled for this rule.
            #[inline(always)]
            pub(crate) fn select(self, code: impl WithRule) {
                match self { $(Self::$variant(rule) => code.run_with(rule),)* }
            }
        }

        $(impl From<$rule> for $name {
            #[inline(always)]
            fn from(rule: $rule) -> Self {
                Self::$variant(rule)
            }
        })*
    };
}
pub(super) use rules;
