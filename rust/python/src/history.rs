//! The past of data directories, and of what is copied of it to buckets.

use crate::call;
use crate::client::Client;
use crate::errors::OrRaise;
use fastps_cli::Target;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Shards (index, first and last version, first and last time), tensors, clients, marks (name, version, time),
/// notes, and a row of 88 bytes for each change and client.
type Recorded<'py> = (
    Vec<(u32, u64, u64, u64, u64)>,
    Vec<String>,
    BTreeMap<u64, String>,
    Vec<(String, u64, u64)>,
    Vec<String>,
    Bound<'py, PyBytes>,
);

/// The past of a data directory.
#[pyfunction]
pub(crate) fn recorded(py: Python<'_>, dir: PathBuf, norms: bool) -> PyResult<Recorded<'_>> {
    let found = call::run(py, true, move || fastps_cli::recorded(&dir, norms))?.or_raise(py)?;
    let fastps_cli::Recorded { shards, tensors, clients, marks, notes, rows } = found;
    Ok((shards, tensors, clients, marks, notes, PyBytes::new(py, &rows)))
}

/// Fetches the log that a bucket has of the history, or what a version of it needs, into a folder.
#[pyfunction]
pub(crate) fn fetch_history(
    py: Python<'_>,
    url: String,
    folder: PathBuf,
    version: Option<u64>,
) -> PyResult<()> {
    call::run(py, true, move || fastps_cli::fetch_history(&url, &folder, version))?.or_raise(py)
}

/// Writes a data directory with every tensor at a version, or at a mark. Returns what people should know.
#[pyfunction]
pub(crate) fn rewind_to(
    py: Python<'_>,
    dir: PathBuf,
    out: PathBuf,
    version: u64,
    mark: Option<String>,
    shards: Option<u32>,
) -> PyResult<Vec<String>> {
    let to = target(version, mark);
    call::run(py, true, move || fastps_cli::rewind_to(&dir, &out, to, shards))?.or_raise(py)
}

/// The tensors of a data directory at a version, or at a mark, for reading; and what people should know.
#[pyfunction]
pub(crate) fn moment_of(
    py: Python<'_>,
    dir: PathBuf,
    version: u64,
    mark: Option<String>,
) -> PyResult<(Client, Vec<String>)> {
    let to = target(version, mark);
    let (past, notes) = call::run(py, true, move || fastps_cli::moment_of(&dir, to))?.or_raise(py)?;
    Ok((Client::past(Arc::new(past)), notes))
}

fn target(version: u64, mark: Option<String>) -> Target {
    mark.map_or(Target::Version(version), Target::Mark)
}
