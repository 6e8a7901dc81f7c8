//! Gradients of a call, whole or sparse, with their memory borrowed.

use super::buffer::{Access, borrow};
use super::sparse::Sparse;
use fastps_core::verbs::Gradient;
use pyo3::prelude::*;
use std::sync::Arc;

/// A gradient, whole or sparse.
pub(crate) fn gradient(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Gradient> {
    let Ok(sparse) = array.cast::<Sparse>() else {
        return whole_gradient(name, array);
    };
    let sparse = sparse.get().borrow(array.py(), name)?;
    Ok(Gradient { name: name.into(), shape: sparse.values.shape().to_vec(), values: Arc::new(sparse) })
}

/// A gradient of the whole tensor.
pub(crate) fn whole_gradient(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Gradient> {
    let values = borrow(array, name, Access::Read)?;
    Ok(Gradient { name: name.into(), shape: values.shape().to_vec(), values: Arc::new(values) })
}
