//! Receipts of pushes.

use fastps_core::verbs;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple, PyType};
use std::sync::Arc;

/// The result of a push for one tensor; a receipt always means "applied".
///
/// Attributes:
///     version: Smallest version of the tensor's slices right after the push; versions count every change.
///     staleness: Changes by others between the version that the push was based on and the push (largest of
///         the slices); None if the base is unknown.
///     duplicate: A slice had already applied this push, and was not changed again.
///     scale: Smallest factor applied to the gradient.
///     duplicates: Number of such slices.
///     momentum: Smallest momentum of a slice's step (beta1 of Adam and AdamW); None if the optimizer has none,
///         for sparse gradients, and for a repeated push.
#[pyclass(frozen, module = "fastps", name = "Receipt")]
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Receipt {
    #[pyo3(get)]
    version: u64,
    #[pyo3(get)]
    staleness: Option<u64>,
    #[pyo3(get)]
    duplicate: bool,
    #[pyo3(get)]
    scale: f32,
    #[pyo3(get)]
    duplicates: u64,
    #[pyo3(get)]
    momentum: Option<f64>,
}

impl From<&verbs::Receipt> for Receipt {
    fn from(r: &verbs::Receipt) -> Self {
        let &verbs::Receipt { version, staleness, duplicate, duplicates, scale, momentum, .. } = r;
        Self { version, staleness, duplicate, scale, duplicates, momentum }
    }
}

#[pymethods]
impl Receipt {
    #[classattr]
    fn __match_args__(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        PyTuple::new(py, ["version", "staleness", "duplicate", "scale", "duplicates", "momentum"])
    }

    #[new]
    #[pyo3(signature = (version, staleness, duplicate, scale, duplicates=0, momentum=None))]
    fn new(
        version: u64,
        staleness: Option<u64>,
        duplicate: bool,
        scale: f32,
        duplicates: u64,
        momentum: Option<f64>,
    ) -> Self {
        Self { version, staleness, duplicate, scale, duplicates, momentum }
    }

    fn __repr__(&self) -> String {
        let staleness = self.staleness.map_or_else(|| "None".to_owned(), |s| s.to_string());
        let duplicate = if self.duplicate { "True" } else { "False" };
        let momentum = self.momentum.map_or_else(|| "None".to_owned(), |m| format!("{m:?}"));
        let (version, scale, duplicates) = (self.version, self.scale, self.duplicates);
        format!(
            "Receipt(version={version}, staleness={staleness}, duplicate={duplicate}, scale={scale:?}, duplicates={duplicates}, momentum={momentum})"
        )
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| self == other.get())
    }

    fn __hash__(&self) -> u64 {
        self.version ^ self.staleness.map_or(1 << 63, |s| s << 32) ^ u64::from(self.duplicate) << 31
    }

    #[allow(clippy::type_complexity)]
    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> (Bound<'py, PyType>, (u64, Option<u64>, bool, f32, u64, Option<f64>)) {
        let r = slf.get();
        (slf.get_type(), (r.version, r.staleness, r.duplicate, r.scale, r.duplicates, r.momentum))
    }
}

/// The tensors of a call, in order.
pub(crate) type Names = Arc<Vec<Py<PyString>>>;

/// Receipts of one call, converted to Python objects when they are accessed.
#[pyclass(frozen, module = "fastps._fastps", name = "Receipts")]
#[derive(Debug)]
pub(crate) struct Receipts {
    pub(crate) names: Names,
    pub(crate) receipts: Vec<verbs::Receipt>,
}

#[pymethods]
impl Receipts {
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.names.iter().map(|name| name.bind(py)))
    }

    fn at(&self, py: Python<'_>, name: &Bound<'_, PyAny>) -> PyResult<Receipt> {
        let given = name.cast::<PyString>().ok().and_then(|name| name.to_str().ok());
        let is = |n: &Py<PyString>| given.is_some_and(|given| n.bind(py).to_str().is_ok_and(|n| n == given));
        let found = self.names.iter().position(is).and_then(|i| self.receipts.get(i));
        found.map(Receipt::from).ok_or_else(|| PyKeyError::new_err(name.clone().unbind()))
    }

    fn __len__(&self) -> usize {
        self.receipts.len()
    }

    /// Bytes of all bodies as sent.
    fn bytes(&self) -> u64 {
        self.receipts.iter().map(|r| r.bytes).sum()
    }

    /// The largest staleness of all tensors; None if no base was known.
    fn staleness(&self) -> Option<u64> {
        self.receipts.iter().filter_map(|r| r.staleness).max()
    }

    /// The smallest momentum of a step; None if no receipt has one.
    fn momentum(&self) -> Option<f64> {
        self.receipts.iter().filter_map(|r| r.momentum).reduce(f64::min)
    }

    /// The smallest factor applied to a gradient.
    fn scale(&self) -> f32 {
        self.receipts.iter().map(|r| r.scale).fold(f32::INFINITY, f32::min)
    }
}
