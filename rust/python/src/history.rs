//! The past of data directories, and of what is copied of it to buckets.

use crate::call;
use crate::client::Client;
use crate::errors::OrRaise;
use fastps_cli::Target;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::{BTreeMap, BTreeSet};
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

/// A moment: a version; or else the name of a mark, or `WORKER:PUSH`, or on each shard the last of several pushes, by
/// client and number.
type To = (u64, Option<String>, Option<String>, Option<BTreeSet<(u64, u64)>>);

/// The past of a data directory.
#[pyfunction]
pub(crate) fn recorded(py: Python<'_>, dir: PathBuf, norms: bool) -> PyResult<Recorded<'_>> {
    let found = call::run(py, true, move || fastps_cli::recorded(&dir, norms))?.or_raise(py)?;
    let fastps_cli::Recorded { shards, tensors, clients, marks, notes, rows } = found;
    Ok((shards, tensors, clients, marks, notes, PyBytes::new(py, &rows)))
}

/// Fetches the log that a bucket has of the history, or what a moment of it needs, into a folder.
#[pyfunction]
pub(crate) fn fetch_history(py: Python<'_>, url: String, folder: PathBuf, to: Option<To>) -> PyResult<()> {
    call::run(py, true, move || fastps_cli::fetch_history(&url, &folder, to.map(target)))?.or_raise(py)
}

/// Writes a data directory with every tensor as of a moment. Returns what people should know.
#[pyfunction]
pub(crate) fn rewind_to(
    py: Python<'_>,
    dir: PathBuf,
    out: PathBuf,
    to: To,
    shards: Option<u32>,
) -> PyResult<Vec<String>> {
    call::run(py, true, move || fastps_cli::rewind_to(&dir, &out, target(to), shards))?.or_raise(py)
}

/// The tensors of a data directory as of a moment, for reading; and what people should know.
#[pyfunction]
pub(crate) fn moment_of(py: Python<'_>, dir: PathBuf, to: To) -> PyResult<(Client, Vec<String>)> {
    let (past, notes) = call::run(py, true, move || fastps_cli::moment_of(&dir, target(to)))?.or_raise(py)?;
    Ok((Client::past(Arc::new(past)), notes))
}

fn target((version, mark, push, pushes): To) -> Target {
    match (mark, push, pushes) {
        (Some(mark), ..) => Target::Mark(mark),
        (None, Some(push), _) => Target::Push(push),
        (None, None, Some(pushes)) => Target::Pushes(pushes),
        (None, None, None) => Target::Version(version),
    }
}
