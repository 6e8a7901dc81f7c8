//! The calls that create, remove and look up tensors.

use crate::base::dtype::View;
use crate::base::error::Result;
use crate::tensor::TensorSpec;
use std::sync::Arc;
use std::time::Duration;

/// The tensors that exist: created, removed, looked up.
pub trait TensorRegistry: Send + Sync {
    /// Creates a tensor; does nothing if it exists with the same spec.
    fn register(&self, spec: TensorSpec, values: View<'_>, timeout: Duration) -> Result<()>;
    /// Removes a tensor.
    fn unregister(&self, name: &str, timeout: Duration) -> Result<()>;
    /// The spec of a tensor.
    fn spec(&self, name: &str, timeout: Duration) -> Result<Arc<TensorSpec>>;
    /// The names of all tensors, sorted.
    fn names(&self, timeout: Duration) -> Result<Vec<Arc<str>>>;
    /// How long ago each of these tensors last changed, to about a second; `None` if it has not changed since
    /// the server's start, or in process.
    fn last_changes(&self, names: &[Arc<str>], timeout: Duration) -> Result<Vec<Option<Duration>>>;
}
