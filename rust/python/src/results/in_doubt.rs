//! Slices of a push whose answer is missing.

use crate::call::{self, Here, Seconds};
use crate::errors::OrRaise;
use fastps_core::verbs::{self, Fate};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::ops::Range;
use std::sync::Arc;

/// A slice of a push whose answer is missing.
///
/// Attributes:
///     tensor: Its tensor's name.
///     shard: Index of the shard that has not answered.
///     elements: ``range`` of the tensor's elements, row-major.
#[pyclass(frozen, module = "fastps", name = "InDoubt")]
#[derive(Debug)]
pub(crate) struct InDoubt {
    doubt: Here<Arc<dyn verbs::InDoubt>>,
}

impl InDoubt {
    pub(crate) fn new(doubt: Arc<dyn verbs::InDoubt>) -> Self {
        Self { doubt: Here::new("push", doubt) }
    }
}

#[pymethods]
impl InDoubt {
    #[getter]
    fn tensor(&self, py: Python<'_>) -> PyResult<&str> {
        Ok(self.doubt.get(py)?.tensor())
    }

    #[getter]
    fn shard(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.doubt.get(py)?.shard())
    }

    #[getter]
    fn elements<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        range(py, &self.doubt.get(py)?.elements())
    }

    /// Waits at most `timeout` seconds for the outcome, and reconnects if necessary.
    ///
    /// Returns:
    ///     ``"applied"``, ``"fenced"`` (not applied, and never will be) or ``"unknown"`` (the server no
    ///     longer knows).
    ///
    /// Raises:
    ///     DeadlineError, ConnectionLostError, UnavailableError: The outcome is not known yet; call again.
    #[pyo3(signature = (timeout=Seconds::of(30.0)), text_signature = "($self, timeout=30.0)")]
    fn result(&self, py: Python<'_>, timeout: Seconds) -> PyResult<&'static str> {
        let doubt = self.doubt.get(py)?.clone();
        let timeout = call::duration(py, timeout)?;
        match call::run(py, true, move || doubt.result(timeout))?.or_raise(py)? {
            Fate::Applied { .. } => Ok("applied"),
            Fate::Fenced => Ok("fenced"),
            Fate::Unknown => Ok("unknown"),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let doubt = self.doubt.get(py)?;
        let (tensor, shard, elements) = (doubt.tensor(), doubt.shard(), doubt.elements());
        Ok(format!("<InDoubt tensor {tensor:?}, elements {elements:?}, shard {shard}>"))
    }
}

/// A Python range.
pub(crate) fn range<'py>(py: Python<'py>, elements: &Range<usize>) -> PyResult<Bound<'py, PyAny>> {
    static RANGE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    RANGE.import(py, "builtins", "range")?.call1((elements.start, elements.end))
}
