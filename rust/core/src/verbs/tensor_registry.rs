//! The calls that create, remove and look up tensors.

use crate::base::dtype::View;
use crate::base::error::Result;
use crate::tensor::TensorSpec;
use std::sync::Arc;
use std::time::Duration;

/// A tensor to be registered.
#[derive(Clone, Debug)]
pub struct NewTensor<'a> {
    /// What it is.
    pub spec: TensorSpec,
    /// Its initial values, row-major.
    pub values: View<'a>,
}

/// The tensors that exist: created, removed, looked up.
pub trait TensorRegistry: Send + Sync {
    /// Creates tensors of different names; leaves those alone that exist with the same spec. After a failure
    /// each is there whole or not at all; the error names the first that was refused, and says what became
    /// of the others.
    fn register_all(&self, tensors: Vec<NewTensor<'_>>, timeout: Duration) -> Result<()>;
    /// Creates a tensor; does nothing if it exists with the same spec.
    fn register(&self, spec: TensorSpec, values: View<'_>, timeout: Duration) -> Result<()> {
        self.register_all(vec![NewTensor { spec, values }], timeout)
    }
    /// Removes a tensor.
    fn unregister(&self, name: &str, timeout: Duration) -> Result<()>;
    /// The spec of a tensor.
    fn spec(&self, name: &str, timeout: Duration) -> Result<Arc<TensorSpec>>;
    /// Has the specs looked up anew by the next call, because something does not fit what is known of them.
    fn doubt_specs(&self) {}
    /// The names of all tensors, sorted.
    fn names(&self, timeout: Duration) -> Result<Vec<Arc<str>>>;
    /// How long ago each of these tensors last changed, to about a second; `None` if it has not changed since
    /// the server's start, or in process.
    fn last_changes(&self, names: &[Arc<str>], timeout: Duration) -> Result<Vec<Option<Duration>>>;
}
