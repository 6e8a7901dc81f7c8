//! Gradients of a call, whole, sparse or encoded, with their memory borrowed.

use super::buffer::{Access, borrow};
use super::encoded::Encoded;
use super::sparse::Sparse;
use fastps_core::verbs::Gradient;
use pyo3::prelude::*;
use std::sync::Arc;

/// A gradient, whole, sparse or encoded.
pub(crate) fn gradient(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Gradient> {
    if let Ok(sparse) = object.cast::<Sparse>() {
        let sparse = sparse.get().borrow(object.py(), name)?;
        return Ok(Gradient {
            name: name.into(),
            shape: sparse.values.shape().to_vec(),
            values: Arc::new(sparse),
        });
    }
    if let Ok(encoded) = object.cast::<Encoded>() {
        return encoded.get().borrow(object.py(), name);
    }
    whole_gradient(name, object)
}

/// Returns whether a gradient is neither sparse nor encoded.
pub(crate) fn is_array(object: &Bound<'_, PyAny>) -> bool {
    !object.is_instance_of::<Sparse>() && !object.is_instance_of::<Encoded>()
}

/// A gradient of the whole tensor.
pub(crate) fn whole_gradient(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Gradient> {
    let values = borrow(array, name, Access::Read)?;
    Ok(Gradient { name: name.into(), shape: values.shape().to_vec(), values: Arc::new(values) })
}
