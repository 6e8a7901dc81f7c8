//! Pulls: what the tensors are, and their values into memory of the caller.

use super::waiting::{Filler, Waiting, reshaped};
use super::{Client, Shared};
use crate::arrays::buffer::{Borrowed, sweep};
use crate::call::End;
use crate::errors::OrRaise;
use crate::results::Versions;
use fastps_core::error::{Error, Kind};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::{self, PullOptions, Rows};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

impl Client {
    pub(super) fn specs(
        &self,
        py: Python<'_>,
        server: &Shared,
        names: &[Arc<str>],
        end: End,
    ) -> PyResult<Vec<Arc<TensorSpec>>> {
        let find = |server: &Shared, names: &[Arc<str>], end: End| {
            names.iter().map(|n| server.spec(n, end.left())).collect::<Result<Vec<_>, _>>()
        };
        // Usually the map is known, and no server has to be asked.
        match py.detach(|| find(server, names, End::after(Duration::ZERO))) {
            Err(error) if is_not_known_yet(&error) => {
                let names = names.to_vec();
                self.call(py, server, move |server| find(server, &names, end))?.or_raise(py)
            }
            found => found.or_raise(py),
        }
    }

    /// The specs of these tensors, and what `check` makes of them. Before it fails, servers are asked again:
    /// another client may have removed a tensor and registered one of the same name.
    pub(super) fn specs_for<T>(
        &self,
        py: Python<'_>,
        server: &Shared,
        names: &[Arc<str>],
        end: End,
        mut check: impl FnMut(&[Arc<TensorSpec>]) -> PyResult<T>,
    ) -> PyResult<(Vec<Arc<TensorSpec>>, T)> {
        let specs = self.specs(py, server, names, end)?;
        let error = match check(&specs) {
            Ok(made) => return Ok((specs, made)),
            Err(error) => error,
        };
        if self.local.is_some() {
            return Err(error);
        }
        server.doubt_specs();
        match self.specs(py, server, names, end) {
            Ok(present) if present != specs => check(&present).map(|made| (present, made)),
            _ => Err(error),
        }
    }
}

/// Returns whether a server must be asked. Every other error goes to the caller: some are reported only once.
fn is_not_known_yet(error: &Error) -> bool {
    matches!(error.kind, Kind::Deadline | Kind::Connection | Kind::Unavailable)
}

/// Pulls into the caller's arrays.
pub(super) fn pull_into(
    py: Python<'_>,
    server: &Shared,
    asked: (&[Arc<str>], &PullOptions),
    targets: Arc<Vec<Borrowed>>,
    timeout: Duration,
) -> PyResult<Versions> {
    try_pull_into(py, server, asked, targets, timeout)?
}

/// As [`pull_into`]; the outer error is that of a caller that no longer waits.
pub(super) fn try_pull_into(
    py: Python<'_>,
    server: &Shared,
    (names, options): (&[Arc<str>], &PullOptions),
    targets: Arc<Vec<Borrowed>>,
    timeout: Duration,
) -> PyResult<PyResult<Versions>> {
    fill(py, targets, |waiting| server.pull_as(names, options, timeout, waiting))
}

/// Pulls rows into the caller's arrays.
pub(super) fn pull_rows_into(
    py: Python<'_>,
    server: &Shared,
    rows: &[Rows],
    targets: Vec<Borrowed>,
    timeout: Duration,
) -> PyResult<Versions> {
    fill(py, Arc::new(targets), |waiting| server.pull_rows(rows, timeout, waiting))?
}

fn fill(
    py: Python<'_>,
    targets: Arc<Vec<Borrowed>>,
    pull: impl FnOnce(&mut Waiting) -> Result<verbs::Versions, Error> + Send,
) -> PyResult<PyResult<Versions>> {
    let mut waiting = Waiting::new(py, Filler::new(targets), None)?;
    let versions = py.detach(|| pull(&mut waiting));
    let complete = waiting.end()?;
    sweep(py);
    Ok(versions
        .or_raise(py)
        .and_then(|versions| if complete { Ok(Versions(Arc::new(versions))) } else { Err(reshaped(py)) }))
}
