//! The calls that read values, optimizer state or versions.

use super::pull_options::PullOptions;
use super::values::{Caller, OptimizerState, Pulled, Rows, Ticket};
use crate::base::error::Result;
use crate::tensor::Versions;
use std::sync::Arc;
use std::time::Duration;

/// Reads of tensors: values, rows, optimizer state, versions.
pub trait PullTensors: Send + Sync {
    /// Pulls values into the caller's memory.
    fn pull(&self, names: &[Arc<str>], timeout: Duration, caller: &mut dyn Caller) -> Result<Versions> {
        self.pull_as(names, &PullOptions::default(), timeout, caller)
    }
    /// Pulls values or averages into the caller's memory, in the types that the options say. Fails for a tensor
    /// that keeps no average, or is not to be had in bfloat16.
    fn pull_as(
        &self,
        names: &[Arc<str>],
        options: &PullOptions,
        timeout: Duration,
        caller: &mut dyn Caller,
    ) -> Result<Versions>;
    /// Pulls some rows of tensors into the caller's memory, where the rows of a tensor are contiguous and in
    /// the order given. Returns the versions of the slices that have these rows.
    fn pull_rows(&self, rows: &[Rows], timeout: Duration, caller: &mut dyn Caller) -> Result<Versions>;
    /// Pulls values without waiting for the result.
    fn pull_async(&self, names: Vec<Arc<str>>, timeout: Duration) -> Result<Arc<dyn Ticket<Result<Pulled>>>> {
        self.pull_async_as(names, PullOptions::default(), timeout)
    }
    /// As [`PullTensors::pull_as`], without waiting for the result.
    fn pull_async_as(
        &self,
        names: Vec<Arc<str>>,
        options: PullOptions,
        timeout: Duration,
    ) -> Result<Arc<dyn Ticket<Result<Pulled>>>>;
    /// A tensor's optimizer state.
    fn state(&self, name: &str, timeout: Duration) -> Result<OptimizerState>;
    /// Versions of tensors.
    fn versions(&self, names: &[Arc<str>], timeout: Duration) -> Result<Versions>;
}
