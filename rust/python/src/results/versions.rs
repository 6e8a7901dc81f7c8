//! Versions of tensors.

use crate::arguments::instance;
use fastps_core::verbs;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use std::sync::Arc;

/// Versions of tensors, from a pull or `versions()`: pass them to later pushes as ``based_on=``. They can be
/// compared and are otherwise opaque; ``v[name]`` is the smallest version of the tensor's slices.
#[pyclass(frozen, module = "fastps", name = "Versions", mapping)]
#[derive(Clone, Debug)]
pub(crate) struct Versions(pub(crate) Arc<verbs::Versions>);

impl Versions {
    fn of(&self, name: &Bound<'_, PyAny>) -> PyResult<&[verbs::SliceVersion]> {
        self.find(name).ok_or_else(|| PyKeyError::new_err(name.clone().unbind()))
    }

    /// As a mapping, which has no entry for what is no name.
    fn find(&self, name: &Bound<'_, PyAny>) -> Option<&[verbs::SliceVersion]> {
        self.0.tensor(name.cast::<PyString>().ok()?.to_str().ok()?)
    }
}

#[pymethods]
impl Versions {
    fn __getitem__(&self, name: &Bound<'_, PyAny>) -> PyResult<u64> {
        Ok(self.of(name)?.iter().map(|s| s.version).min().unwrap_or(0))
    }

    /// The versions of a tensor's slices, in order.
    fn slices<'py>(&self, py: Python<'py>, name: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.of(name)?.iter().map(|s| s.version))
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
        self.find(name).is_some()
    }

    fn __len__(&self) -> usize {
        self.0.tensors().len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(PyTuple::new(py, self.names())?.try_iter()?.into_any())
    }

    /// Names of the tensors.
    fn names(&self) -> Vec<&str> {
        self.0.tensors().iter().map(|(n, _)| &**n).collect()
    }

    /// These versions with later ones of some tensors.
    fn updated(&self, later: &Bound<'_, PyAny>) -> PyResult<Self> {
        let later = instance::<Self>(later, "later", "fastps.Versions")?;
        Ok(Self(Arc::new(self.0.updated(&later.get().0))))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| self.0 == other.get().0)
    }

    fn __hash__(&self) -> u64 {
        self.0.tensors().iter().flat_map(|(_, s)| s).fold(0, |h, s| h.rotate_left(7) ^ s.version)
    }

    fn __repr__(&self) -> String {
        let slices = |v: &[verbs::SliceVersion]| {
            v.iter().map(|s| s.version.to_string()).collect::<Vec<_>>().join(", ")
        };
        let each = self.0.tensors().iter().map(|(n, v)| format!("{n:?}: [{}]", slices(v)));
        format!("<Versions {{{}}}>", each.collect::<Vec<_>>().join(", "))
    }
}
