//! The calls that read values, optimizer state or versions.

use super::values::{Caller, OptimizerState, Pulled, Rows, Ticket};
use crate::base::error::Result;
use crate::tensor::Versions;
use std::sync::Arc;
use std::time::Duration;

/// Reads of tensors: values, rows, optimizer state, versions.
pub trait PullTensors: Send + Sync {
    /// Pulls values into the caller's memory.
    fn pull(&self, names: &[Arc<str>], timeout: Duration, caller: &mut dyn Caller) -> Result<Versions>;
    /// Pulls some rows of tensors into the caller's memory, where the rows of a tensor are contiguous and in
    /// the order given. Returns the versions of the slices that have these rows.
    fn pull_rows(&self, rows: &[Rows], timeout: Duration, caller: &mut dyn Caller) -> Result<Versions>;
    /// Pulls without waiting for the result.
    fn pull_async(&self, names: Vec<Arc<str>>, timeout: Duration) -> Result<Arc<dyn Ticket<Result<Pulled>>>>;
    /// A tensor's optimizer state.
    fn state(&self, name: &str, timeout: Duration) -> Result<OptimizerState>;
    /// Versions of tensors.
    fn versions(&self, names: &[Arc<str>], timeout: Duration) -> Result<Versions>;
}
