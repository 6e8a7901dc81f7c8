//! Maps core errors to the exceptions of `fastps.errors`; no other module does.

use fastps_core::error::{Error, Kind, Lost};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule};

fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::UnknownTensor => "UnknownTensorError",
        Kind::Shape => "ShapeError",
        Kind::DType => "DTypeError",
        Kind::NonFinite => "NonFiniteError",
        Kind::Frame => "FrameError",
        Kind::Config | Kind::Precondition => "ConfigError",
        Kind::Capacity => "CapacityError",
        Kind::StaleEpoch => "StaleEpochError",
        Kind::StalePush => "StalePush",
        Kind::Lease => "LeaseError",
        Kind::Fenced => "FencedError",
        Kind::UnknownOutcome => "UnknownOutcomeError",
        Kind::Unauthenticated => "UnauthenticatedError",
        Kind::Denied => "PermissionDeniedError",
        Kind::VersionsLost => "VersionsLost",
        Kind::Unavailable => "UnavailableError",
        Kind::Deadline => "DeadlineError",
        Kind::Connection => "ConnectionLostError",
        _ => "FastpsError",
    }
}

pub(crate) fn module(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let import = || PyModule::import(py, "fastps.errors").map(Bound::unbind);
    Ok(MODULE.get_or_try_init(py, import)?.bind(py))
}

/// A text without tokens, keys and certificates, which were given in the place of something else.
#[pyfunction]
pub(crate) fn without_secrets(text: &str) -> String {
    fastps_core::text::without_secrets(text).into_owned()
}

/// The exception of a core error; its class composes the same text as `Display`.
pub(crate) fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    fields.set_item("tensor", error.tensor.as_deref())?;
    fields.set_item("shard", error.shard)?;
    fields.set_item("expected", error.expected.as_deref())?;
    fields.set_item("got", error.got.as_deref())?;
    fields.set_item("retry_after", error.retry_after_ms.map(|ms| ms as f64 / 1e3))?;
    if error.kind == Kind::VersionsLost {
        fields.set_item("lost", error.lost.iter().map(lost_fields).collect::<Vec<_>>())?;
    }
    module(py)?.getattr(class(error.kind))?.call((error.message.as_str(),), Some(&fields))
}

/// Tensor, shard, own pushes, version seen, version now.
pub(crate) type LostFields = (String, u32, Option<u64>, u64, u64);

pub(crate) fn lost_fields(lost: &Lost) -> LostFields {
    let Lost { tensor, shard, own, seen, now } = lost;
    (tensor.to_string(), *shard, *own, *seen, *now)
}

/// The exception of a core error.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).map_or_else(|e| e, PyErr::from_value)
}

/// The exception of a forked child that uses an object from before the fork.
pub(crate) fn fork(py: Python<'_>, what: &str) -> PyErr {
    let message = format!(
        "this {what} was made before a fork and cannot be used in the child process; make a new one in the child, or \
         start processes with the \"spawn\" method (multiprocessing.set_start_method(\"spawn\"))"
    );
    module(py).and_then(|m| m.getattr("ForkError")?.call1((message,))).map_or_else(|e| e, PyErr::from_value)
}

/// An invalid argument.
pub(crate) fn config(py: Python<'_>, message: &str, expected: &str, got: impl std::fmt::Display) -> PyErr {
    raise(py, &Error::new(Kind::Config, message).expected(expected, got))
}

/// `?` for core results.
pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for Result<T, Error> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}
