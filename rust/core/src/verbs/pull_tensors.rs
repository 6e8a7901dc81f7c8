//! The calls that read values, optimizer state or versions.

use super::values::{Caller, OptimizerState, PullView, Pulled, Rows, Ticket};
use crate::base::error::Result;
use crate::tensor::Versions;
use std::sync::Arc;
use std::time::Duration;

/// Reads of tensors: values, rows, optimizer state, versions.
pub trait PullTensors: Send + Sync {
    /// Pulls values into the caller's memory.
    fn pull(&self, names: &[Arc<str>], timeout: Duration, caller: &mut dyn Caller) -> Result<Versions> {
        self.pull_view(names, PullView::Values, timeout, caller)
    }
    /// Pulls values or averages into the caller's memory. Fails for a tensor that keeps no average.
    fn pull_view(
        &self,
        names: &[Arc<str>],
        view: PullView,
        timeout: Duration,
        caller: &mut dyn Caller,
    ) -> Result<Versions>;
    /// Pulls some rows of tensors into the caller's memory, where the rows of a tensor are contiguous and in
    /// the order given. Returns the versions of the slices that have these rows.
    fn pull_rows(&self, rows: &[Rows], timeout: Duration, caller: &mut dyn Caller) -> Result<Versions>;
    /// Pulls values without waiting for the result.
    fn pull_async(&self, names: Vec<Arc<str>>, timeout: Duration) -> Result<Arc<dyn Ticket<Result<Pulled>>>> {
        self.pull_view_async(names, PullView::Values, timeout)
    }
    /// Pulls values or averages without waiting for the result.
    fn pull_view_async(
        &self,
        names: Vec<Arc<str>>,
        view: PullView,
        timeout: Duration,
    ) -> Result<Arc<dyn Ticket<Result<Pulled>>>>;
    /// A tensor's optimizer state.
    fn state(&self, name: &str, timeout: Duration) -> Result<OptimizerState>;
    /// Versions of tensors.
    fn versions(&self, names: &[Arc<str>], timeout: Duration) -> Result<Versions>;
}
