//! The past of data directories.

use crate::call;
use crate::errors::OrRaise;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The past of a data directory: shards (index, first and last version, first and last time), names of tensors,
/// names of clients, and a row of 72 bytes for each change.
#[pyfunction]
#[allow(clippy::type_complexity)]
pub(crate) fn recorded(
    py: Python<'_>,
    dir: PathBuf,
    norms: bool,
) -> PyResult<(Vec<(u32, u64, u64, u64, u64)>, Vec<String>, BTreeMap<u64, String>, Bound<'_, PyBytes>)> {
    let found = call::run(py, true, move || fastps_cli::recorded(&dir, norms))?.or_raise(py)?;
    let fastps_cli::Recorded { shards, tensors, clients, rows } = found;
    Ok((shards, tensors, clients, PyBytes::new(py, &rows)))
}

/// Writes a data directory with every tensor at a version. Returns what people should know.
#[pyfunction]
pub(crate) fn rewind_to(
    py: Python<'_>,
    dir: PathBuf,
    out: PathBuf,
    version: u64,
    shards: Option<u32>,
) -> PyResult<Vec<String>> {
    call::run(py, true, move || fastps_cli::rewind_to(&dir, &out, version, shards))?.or_raise(py)
}
