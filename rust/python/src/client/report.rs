//! Reports of workers, and the workers and groups in statistics.

use fastps_core::text::printable;
use fastps_core::verbs::{GroupState, WorkerReport, WorkerState};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A report from a dictionary with the names of its fields; those that are missing or None are unset.
pub(super) fn read_report(fields: &Bound<'_, PyDict>) -> PyResult<WorkerReport> {
    fn field<'py, T>(fields: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<T>>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        match fields.get_item(name)?.filter(|value| !value.is_none()) {
            None => Ok(None),
            Some(value) => value.extract().map(Some).map_err(Into::into),
        }
    }
    // Servers take no name that a terminal does not show as it is.
    let label = |fields, name| Ok::<_, PyErr>(printable(&field::<String>(fields, name)?.unwrap_or_default()));
    Ok(WorkerReport {
        rank: field(fields, "rank")?,
        host: label(fields, "host")?,
        steps: field(fields, "steps")?.unwrap_or_default(),
        loss: field(fields, "loss")?,
        pushes: field(fields, "pushes")?.unwrap_or_default(),
        bytes: field(fields, "bytes")?.unwrap_or_default(),
        staleness_p50: field(fields, "staleness_p50")?,
        staleness_p99: field(fields, "staleness_p99")?,
        waited: field(fields, "waited")?,
        momentum: field(fields, "momentum")?,
        rejected: field(fields, "rejected")?.unwrap_or_default(),
        scaled: field(fields, "scaled")?.unwrap_or_default(),
        mode: field(fields, "mode")?.unwrap_or_default(),
        codec: field(fields, "codec")?.unwrap_or_default(),
        step_seconds: field(fields, "step_seconds")?,
        name: label(fields, "name")?,
    })
}

/// A client's session as a dictionary.
pub(super) fn worker_object<'py>(py: Python<'py>, state: &WorkerState) -> PyResult<Bound<'py, PyDict>> {
    let object = PyDict::new(py);
    object.set_item("session", state.session)?;
    object.set_item("name", state.shown_name())?;
    object.set_item("frames_applied", state.applied)?;
    object.set_item("idle_s", state.idle.as_secs_f64())?;
    let report = state.report.as_ref().map(|report| report_object(py, report)).transpose()?;
    object.set_item("report", report)?;
    Ok(object)
}

fn report_object<'py>(py: Python<'py>, report: &WorkerReport) -> PyResult<Bound<'py, PyDict>> {
    let object = PyDict::new(py);
    object.set_item("rank", report.rank)?;
    object.set_item("host", &report.host)?;
    object.set_item("steps", report.steps)?;
    object.set_item("step_seconds", report.step_seconds)?;
    object.set_item("loss", report.loss)?;
    object.set_item("pushes", report.pushes)?;
    object.set_item("bytes", report.bytes)?;
    object.set_item("staleness_p50", report.staleness_p50)?;
    object.set_item("staleness_p99", report.staleness_p99)?;
    object.set_item("momentum", report.momentum)?;
    object.set_item("waited", report.waited)?;
    object.set_item("rejected", report.rejected)?;
    object.set_item("scaled", report.scaled)?;
    object.set_item("mode", &report.mode)?;
    object.set_item("codec", &report.codec)?;
    Ok(object)
}

/// A group as a dictionary.
pub(super) fn group_object<'py>(py: Python<'py>, state: &GroupState) -> PyResult<Bound<'py, PyDict>> {
    let object = PyDict::new(py);
    object.set_item("name", &state.name)?;
    object.set_item("mode", &state.mode)?;
    object.set_item("workers", state.workers)?;
    object.set_item("slowest", state.slowest)?;
    object.set_item("fastest", state.fastest)?;
    Ok(object)
}
