//! Sparse gradients and the indices of rows, as Python has them.

use crate::arrays::buffer::{Access, Borrowed, borrow_float32};
use crate::errors;
use fastps_core::error::{Error, Kind};
use fastps_core::verbs::SparseValues;
use numpy::{PyArray1, PyArrayMethods};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// A gradient of some rows of a tensor, or new values for `assign`. The other rows are neither sent nor
/// changed.
///
/// Args:
///     indices: Rows (elements of a flat tensor), as integers in any order. The values of a repeated index
///         are summed in the given order before they are encoded; `assign` keeps the last of them.
///     values: float32, one row for each index, of the shape of the tensor's rows. Used in place, like every
///         array.
///
/// A slice without a named row takes no step. A push without rows changes nothing; its receipt has version 0.
/// Works with all codecs but `fastps.OneBit`, and without error feedback, whose residuals would wait for rows
/// that may never be pushed again.
///
/// >>> import fastps, numpy as np
/// >>> store = fastps.Store()
/// >>> store.register("w", np.zeros(5, np.float32), optimizer=fastps.Adagrad(lr=1.0))
/// >>> store.push("w", fastps.Sparse([3, 0], np.array([4.0, -2.0], np.float32))).version
/// 2
/// >>> store.pull("w")
/// array([ 1.,  0.,  0., -1.,  0.], dtype=float32)
#[pyclass(frozen, module = "fastps", name = "Sparse")]
#[derive(Debug)]
pub(crate) struct Sparse {
    #[pyo3(get)]
    indices: Py<PyAny>,
    #[pyo3(get)]
    values: Py<PyAny>,
}

#[pymethods]
impl Sparse {
    #[new]
    fn new(indices: Py<PyAny>, values: Py<PyAny>) -> Self {
        Self { indices, values }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (indices, values) = (self.indices.bind(py).repr()?, self.values.bind(py).repr()?);
        Ok(format!("Sparse({indices}, {values})"))
    }
}

impl Sparse {
    /// The gradient for a tensor, its values borrowed.
    pub(crate) fn borrow(&self, py: Python<'_>, tensor: &str) -> PyResult<SparseValues<Borrowed>> {
        let indices = indices(self.indices.bind(py), tensor)?;
        Ok(SparseValues { indices, values: borrow_float32(self.values.bind(py), tensor, Access::Read)? })
    }
}

/// A copy of indices from any container, if they are integers.
pub(crate) fn indices(object: &Bound<'_, PyAny>, tensor: &str) -> PyResult<Vec<i64>> {
    let py = object.py();
    let wrong = |kind, message: &str, expected: &str, got: String| {
        errors::raise(py, &Error::new(kind, message).tensor(tensor).expected(expected, got))
    };
    let no_integers = |got| wrong(Kind::DType, "the indices are not integers", "an array of integers", got);
    let Ok(array) = py.import("numpy")?.call_method1("asarray", (object,)) else {
        return Err(no_integers(object.get_type().name()?.to_string()));
    };
    if array.getattr("ndim")?.extract::<usize>()? != 1 {
        let got = array.getattr("shape")?.str()?.to_string();
        return Err(wrong(Kind::Shape, "the indices have not one dimension", "(n,)", got));
    }
    if array.len()? == 0 {
        return Ok(Vec::new());
    }
    let dtype = array.getattr("dtype")?;
    let kind = dtype.getattr("kind")?.cast_into::<PyString>()?;
    let kind = kind.to_str()?;
    if !matches!(kind, "i" | "u") {
        return Err(no_integers(dtype.str()?.to_string()));
    }
    if kind == "u" {
        let most = array.call_method0(intern!(py, "max"))?.extract::<u64>()?;
        if i64::try_from(most).is_err() {
            let at = array.call_method0(intern!(py, "argmax"))?.extract::<usize>()?;
            let message = format!("index {at} is out of range");
            return Err(wrong(Kind::Shape, &message, "a row of the tensor", most.to_string()));
        }
    }
    let array = array.call_method1(intern!(py, "astype"), (intern!(py, "int64"),))?;
    Ok(array.cast_into::<PyArray1<i64>>()?.readonly().as_array().iter().copied().collect())
}
