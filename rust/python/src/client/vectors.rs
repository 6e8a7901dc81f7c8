//! Spaces of vectors, as Python uses them: one method per call of `VectorSpaces`, on plain tuples.

use super::waiting::{Filler, Waiting, reshaped, targets};
use super::{Client, Shared, shared};
use crate::arrays::buffer::sweep;
use crate::arrays::gradient::whole_gradient;
use crate::call::{self, End, Here, Seconds};
use crate::errors::{self, OrRaise};
use fastps_core::batch::{BatchTask, FailureKind};
use fastps_core::error::{Kind, Result};
use fastps_core::portions::Then;
use fastps_core::program::{Command, Op, OpParts, Program};
use fastps_core::spaces::{BatchReport, GivenPortion, PortionReport, ReplicaRequest, SeatRequest};
use fastps_core::tensor::SpaceId;
use fastps_core::verbs::VectorPull;
use fastps_core::verbs::prelude::*;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::sync::Arc;
use std::time::Duration;

/// Code, target, sources, factors, batch.
type OpFields = (u32, u32, Vec<u32>, Vec<f64>, u64);
/// Batch, portions, asked portions, samples, vector, least replicas, backups.
type TaskFields = (u64, u64, u64, u64, u32, u64, bool);
/// Batch, portion, loss, failure, tensor.
type ReportFields = (u64, u64, f64, Option<String>, String);
/// Batch, whether it is over, replicas, finished portions, copies issued, copies won, failures.
type BatchFields =
    (u64, bool, u64, Vec<Option<(f64, String)>>, u64, u64, Vec<(String, u64, &'static str, String)>);
/// Space, tensors, task, portion, likely next portion.
type GivenFields = (u64, Vec<String>, TaskFields, u64, Option<u64>);
/// Name, identifier, tensors, vectors, coordinator.
type SpaceFields = (String, u64, Vec<String>, Vec<String>, Option<String>);

/// The calls for vectors of a store or of servers.
#[pyclass(frozen, module = "fastps._fastps", name = "VectorSpaces")]
#[derive(Debug)]
pub(crate) struct PyVectorSpaces {
    server: Here<Shared>,
    timeout: Duration,
}

impl PyVectorSpaces {
    /// Makes a call without the GIL, from which Ctrl-C returns.
    fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        timeout: Option<Seconds>,
        work: impl FnOnce(&dyn ParameterServer, Duration) -> Result<T> + Send + 'static,
    ) -> PyResult<T> {
        let server = self.server.get(py)?.clone();
        let timeout = timeout.map_or(Ok(self.timeout), |seconds| call::duration(py, seconds))?;
        let done = call::run(py, true, move || work(&*server, timeout))?;
        sweep(py);
        done.or_raise(py)
    }
}

fn strings(names: &[Arc<str>]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

#[pymethods]
impl PyVectorSpaces {
    /// The calls for vectors of a client's parameters, in the client's name.
    #[new]
    fn new(py: Python<'_>, client: &Client) -> PyResult<Self> {
        let server = client.enter(py)?.clone();
        Ok(Self { server: Here::new("client", server), timeout: client.timeout })
    }

    /// Opens a space, or finds it: identifier, whether it is new, largest term, number of the last program.
    fn open(
        &self,
        py: Python<'_>,
        name: &str,
        tensors: Vec<String>,
        vectors: Vec<String>,
        keep_for: f64,
        timeout: Option<Seconds>,
    ) -> PyResult<(u64, bool, u64, u64)> {
        let (name, tensors, vectors) = (Arc::<str>::from(name), shared(tensors), shared(vectors));
        let keep_for = call::duration(py, keep_for)?;
        let opened = self.call(py, timeout, move |spaces, timeout| {
            spaces.open_space(&name, &tensors, &vectors, keep_for, timeout)
        })?;
        Ok((opened.spec.space.id.0, opened.new, opened.term, opened.last))
    }

    fn close(&self, py: Python<'_>, space: u64, timeout: Option<Seconds>) -> PyResult<()> {
        self.call(py, timeout, move |spaces, timeout| spaces.close_space(SpaceId(space), timeout))
    }

    fn list(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Vec<SpaceFields>> {
        let all = self.call(py, timeout, |spaces, timeout| spaces.spaces(timeout))?;
        let fields = all.into_iter().map(|info| {
            let (space, tensors) = (&info.spec.space, strings(&info.spec.tensors));
            let coordinator = info.coordinator.map(|name| name.to_string());
            (space.name.to_string(), space.id.0, tensors, strings(&space.vectors), coordinator)
        });
        Ok(fields.collect())
    }

    /// Takes the coordinator's seat: the term, and the state that a coordinator stored last.
    fn take<'py>(
        &self,
        py: Python<'py>,
        space: u64,
        at_least: u64,
        name: &str,
        timeout: Option<Seconds>,
    ) -> PyResult<(u64, Bound<'py, PyBytes>)> {
        let request = SeatRequest::Take { at_least, name: name.into() };
        let seat = self
            .call(py, timeout, move |spaces, timeout| spaces.coordinate(SpaceId(space), &request, timeout))?;
        Ok((seat.term, PyBytes::new(py, &seat.state)))
    }

    /// Stores the coordinator's state.
    fn store(
        &self,
        py: Python<'_>,
        space: u64,
        term: u64,
        state: &[u8],
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let request = SeatRequest::Store { term, state: state.into() };
        self.call(py, timeout, move |spaces, timeout| {
            spaces.coordinate(SpaceId(space), &request, timeout).map(|_| ())
        })
    }

    /// Leaves the coordinator's seat.
    fn leave(&self, py: Python<'_>, space: u64, term: u64, timeout: Option<Seconds>) -> PyResult<()> {
        self.call(py, timeout, move |spaces, timeout| {
            spaces.coordinate(SpaceId(space), &SeatRequest::Leave { term }, timeout).map(|_| ())
        })
    }

    /// Runs a program: the results of each slice.
    fn run(
        &self,
        py: Python<'_>,
        space: u64,
        term: u64,
        number: u64,
        ops: Vec<OpFields>,
        timeout: Option<Seconds>,
    ) -> PyResult<Vec<Vec<f64>>> {
        let op = |(code, to, from, by, batch)| Op::from_parts(OpParts { code, to, from, by, batch });
        let program = ops.into_iter().map(op).collect::<Result<_>>().and_then(Program::new).or_raise(py)?;
        let command = Command { space: SpaceId(space), term, number };
        self.call(py, timeout, move |spaces, timeout| {
            spaces.run_program(command, &Arc::new(program), timeout)
        })
    }

    /// Pulls a vector: arrays by the names of the space's tensors, which must come in its order.
    #[allow(clippy::too_many_arguments)]
    fn pull<'py>(
        &self,
        py: Python<'py>,
        space: u64,
        names: Vec<String>,
        vector: u32,
        batch: Option<u64>,
        out: Option<&Bound<'py, PyDict>>,
        timeout: Option<Seconds>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let server = self.server.get(py)?;
        let end = End::after(timeout.map_or(Ok(self.timeout), |seconds| call::duration(py, seconds))?);
        let find = || names.iter().map(|name| server.spec(name, end.left())).collect::<Result<Vec<_>>>();
        let specs = py.detach(find).or_raise(py)?;
        let (values, targets) = targets(py, &specs, |_, spec, _| spec.dtype, out)?;
        let pull = VectorPull { space: SpaceId(space), vector, batch };
        let mut waiting = Waiting::new(py, Filler::new(Arc::new(targets)), None)?;
        let pulled = py.detach(|| server.pull_vector(&pull, end.left(), &mut waiting));
        let complete = waiting.end()?;
        sweep(py);
        pulled.or_raise(py)?;
        if complete { Ok(values) } else { Err(reshaped(py)) }
    }

    /// Adds a portion to the sum of a batch. Returns the outcome and the tensor concerned: "added",
    /// "duplicate", "stale" (another batch is open), or the reason why the batch must end: "not_finite",
    /// "outside", "sum_lost".
    fn push_portion(
        &self,
        py: Python<'_>,
        space: u64,
        batch: u64,
        portion: u32,
        gradients: &Bound<'_, PyDict>,
        timeout: Option<Seconds>,
    ) -> PyResult<(&'static str, String)> {
        let borrow = |(name, array): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            whole_gradient(name.extract::<&str>()?, &array)
        };
        let gradients = gradients.iter().map(borrow).collect::<PyResult<Vec<_>>>()?;
        let pushed = self.call(py, timeout, move |spaces, timeout| {
            match spaces.push_portion(SpaceId(space), batch, portion, &gradients, timeout) {
                Ok(true) => Ok(("added", String::new())),
                Ok(false) => Ok(("duplicate", String::new())),
                Err(error) => {
                    let failed = FailureKind::of(error.kind).map(failure_name);
                    let stale = (error.kind == Kind::StalePush).then_some("stale");
                    let tensor = error.tensor.as_deref().unwrap_or_default().to_owned();
                    failed.or(stale).map(|outcome| (outcome, tensor)).ok_or(error)
                }
            }
        });
        sweep(py);
        pushed
    }

    /// Asks replicas for a batch, once, and waits for its end.
    #[allow(clippy::too_many_arguments)]
    fn batch(
        &self,
        py: Python<'_>,
        space: u64,
        term: u64,
        task: TaskFields,
        wait: f64,
        timeout: Option<Seconds>,
    ) -> PyResult<BatchFields> {
        let (task, wait) = (task_of(task), call::duration(py, wait)?);
        let report = self.call(py, timeout, move |spaces, timeout| {
            spaces.batch(SpaceId(space), term, &task, wait, timeout)
        })?;
        Ok(batch_fields(report))
    }

    /// Reports a replica's portion, and asks for the next one.
    #[allow(clippy::too_many_arguments)]
    fn portion(
        &self,
        py: Python<'_>,
        space: &str,
        replica: u64,
        name: &str,
        report: Option<ReportFields>,
        then: &str,
        wait: f64,
        timeout: Option<Seconds>,
    ) -> PyResult<Option<GivenFields>> {
        let then = match then {
            "take" => Then::Take,
            "rest" => Then::Rest,
            "leave" => Then::Leave,
            other => return Err(errors::config(py, "invalid then", "take, rest or leave", other)),
        };
        let report = report.map(|report| report_of(py, report)).transpose()?;
        let request = ReplicaRequest { space: space.into(), replica, name: name.into(), report, then };
        let wait = call::duration(py, wait)?;
        let given =
            self.call(py, timeout, move |spaces, timeout| spaces.batch_portion(&request, wait, timeout))?;
        Ok(given.map(given_fields))
    }
}

fn failure_name(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::NotFinite => "not_finite",
        FailureKind::Outside => "outside",
        FailureKind::SumLost => "sum_lost",
    }
}

fn task_of((batch, portions, asked, samples, vector, min_replicas, backups): TaskFields) -> BatchTask {
    BatchTask { batch, portions, asked, samples, vector, min_replicas, backups }
}

fn report_of(
    py: Python<'_>,
    (batch, portion, loss, failure, tensor): ReportFields,
) -> PyResult<PortionReport> {
    let outcome = match failure.as_deref() {
        None => Ok(loss),
        Some("not_finite") => Err((FailureKind::NotFinite, tensor.into())),
        Some("outside") => Err((FailureKind::Outside, tensor.into())),
        Some("sum_lost") => Err((FailureKind::SumLost, tensor.into())),
        Some(other) => {
            return Err(errors::config(py, "invalid failure", "not_finite, outside or sum_lost", other));
        }
    };
    Ok(PortionReport { batch, portion, outcome })
}

fn batch_fields(report: BatchReport) -> BatchFields {
    let finished = report.finished.into_iter().map(|one| one.map(|one| (one.loss, one.replica.to_string())));
    let failures = report.failures.into_iter().map(|failure| {
        let (replica, tensor) = (failure.replica.to_string(), failure.tensor.to_string());
        (replica, failure.portion, failure_name(failure.kind), tensor)
    });
    let (finished, failures) = (finished.collect(), failures.collect());
    let BatchReport { batch, over, replicas, backups_issued, backups_won, .. } = report;
    (batch, over, replicas, finished, backups_issued, backups_won, failures)
}

fn given_fields(given: GivenPortion) -> GivenFields {
    let BatchTask { batch, portions, asked, samples, vector, min_replicas, backups } = given.task;
    let task = (batch, portions, asked, samples, vector, min_replicas, backups);
    (given.space.0, strings(&given.tensors), task, given.portion, given.likely_next)
}
