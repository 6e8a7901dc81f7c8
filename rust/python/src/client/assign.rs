//! Assignments of many tensors in one call.

use super::Client;
use super::push::List;
use crate::arrays::buffer::sweep;
use crate::call::Seconds;
use crate::errors::OrRaise;
use crate::results::Receipts;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Replaces the values of tensors, or of some of their rows, by name.
#[pyfunction]
pub(crate) fn assign_all(
    py: Python<'_>,
    client: &Bound<'_, Client>,
    values: &Bound<'_, PyDict>,
    timeout: Option<Seconds>,
) -> PyResult<Receipts> {
    let client = client.get();
    let (server, timeout) = (client.enter(py)?, client.timeout(py, timeout)?);
    let List { names, gradients } = List::borrow(values)?;
    let assigned = client.call(py, server, move |server| server.assign_all(&gradients, timeout))?;
    sweep(py);
    Ok(Receipts { names, receipts: assigned.or_raise(py)? })
}
