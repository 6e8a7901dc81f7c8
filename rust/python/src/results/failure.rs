//! The exceptions of failed pushes.

use super::in_doubt::{InDoubt, range};
use super::receipts::Receipt;
use crate::errors::{OrRaise, exception, module, raise};
use fastps_core::verbs::{PartialPush, PushError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

fn partial<'py>(py: Python<'py>, push: &PartialPush) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    let receipts = PyDict::new(py);
    for (name, receipt) in &push.receipts {
        receipts.set_item(&**name, Receipt::from(receipt))?;
    }
    let refused = PyList::empty(py);
    for (name, elements, error) in &push.refused {
        refused.append((&**name, range(py, elements)?, exception(py, error)?))?;
    }
    let applied = PyList::empty(py);
    for (name, elements, slice) in &push.applied {
        applied.append((&**name, range(py, elements)?, slice.version))?;
    }
    let in_doubt = PyList::empty(py);
    for doubt in &push.in_doubt {
        in_doubt.append(InDoubt::new(doubt.clone()))?;
    }
    let message = format!(
        "a push succeeded in part ({} tensors applied, {} slices refused, {} slices in doubt): {}",
        receipts.len(),
        refused.len(),
        in_doubt.len(),
        push.error
    );
    fields.set_item("error", exception(py, &push.error)?)?;
    fields.set_item("receipts", receipts)?;
    fields.set_item("refused", refused)?;
    fields.set_item("applied", applied)?;
    fields.set_item("in_doubt", in_doubt)?;
    module(py)?.getattr("PartialPush")?.call((message,), Some(&fields))
}

/// The exception of a failed push.
pub(crate) fn raise_push(py: Python<'_>, error: &PushError) -> PyErr {
    match error {
        PushError::Refused(error) => raise(py, error),
        PushError::Partial(push) => partial(py, push).map_or_else(|e| e, PyErr::from_value),
    }
}

impl<T> OrRaise<T> for Result<T, PushError> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise_push(py, &error))
    }
}
