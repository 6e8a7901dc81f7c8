//! What a pull reads of tensors, and the types in which it comes.

use super::values::Caller;
use crate::base::dtype::DType;
use crate::base::error::Result;
use crate::base::isa::Isa;
use crate::kernel::rounding;
use crate::tensor::TensorSpec;
use std::fmt;

/// What a pull reads of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullView {
    /// The values, which gradients change.
    #[default]
    Values,
    /// Their average.
    Average,
}

impl PullView {
    /// The type in which a tensor's values or averages come.
    pub fn dtype(self, spec: &TensorSpec) -> DType {
        match self {
            Self::Values => spec.dtype,
            Self::Average => spec.dtype.computed(),
        }
    }
}

/// Options of a pull.
#[derive(Clone, Debug, Default)]
pub struct PullOptions {
    /// What it reads of every tensor.
    pub view: PullView,
    /// Set for each tensor whose values come in bfloat16, rounded to nearest even; those after the last: no.
    pub bfloat16: Vec<bool>,
}

impl PullOptions {
    /// Returns whether the k-th tensor's values come in bfloat16 whatever its type.
    pub fn in_bfloat16(&self, k: usize) -> bool {
        self.bfloat16.get(k).copied().unwrap_or(false)
    }

    /// The type in which the k-th tensor's values or averages come.
    pub fn dtype(&self, k: usize, spec: &TensorSpec) -> DType {
        if self.in_bfloat16(k) { DType::BFloat16 } else { self.view.dtype(spec) }
    }

    /// Fails for a tensor that keeps no such view, or is not to be had in bfloat16.
    pub fn check<'a>(&self, specs: impl Iterator<Item = &'a TensorSpec>) -> Result<()> {
        for (k, spec) in specs.enumerate() {
            if self.view == PullView::Average {
                spec.need_average()?;
            }
            if self.in_bfloat16(k) {
                spec.need_float32("a pull in bfloat16")?;
            }
        }
        Ok(())
    }
}

/// A caller of values in bfloat16 that arrive in float32: hands them on rounded to nearest even.
pub struct RoundingCaller<'a> {
    isa: Isa,
    /// Set for each tensor that is rounded; those after the last are not.
    rounded: Vec<bool>,
    caller: &'a mut dyn Caller,
    values: Vec<u8>,
}

impl<'a> RoundingCaller<'a> {
    /// For these tensors, pulled as they are.
    pub fn new<'s>(
        isa: Isa,
        options: &PullOptions,
        specs: impl Iterator<Item = &'s TensorSpec>,
        caller: &'a mut dyn Caller,
    ) -> Self {
        let differs = |(k, spec)| options.dtype(k, spec) != options.view.dtype(spec);
        Self { isa, rounded: specs.enumerate().map(differs).collect(), caller, values: Vec::new() }
    }
}

impl Caller for RoundingCaller<'_> {
    fn take(&mut self, tensor: usize, first_element: usize, values: &[u8]) {
        if !self.rounded.get(tensor).copied().unwrap_or(false) {
            return self.caller.take(tensor, first_element, values);
        }
        self.values.clear();
        rounding::append_nearest(self.isa, values, &mut self.values);
        self.caller.take(tensor, first_element, &self.values);
    }

    fn leaves(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        self.caller.leaves()
    }
}

impl fmt::Debug for RoundingCaller<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RoundingCaller").field("rounded", &self.rounded).finish_non_exhaustive()
    }
}
