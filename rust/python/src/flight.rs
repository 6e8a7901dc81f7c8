//! Calls under way, and slices whose answer is missing.

use crate::buffer::{Access, borrow, empty, sweep};
use crate::call::{self, Here};
use crate::errors::{self, OrRaise, raise};
use crate::values::{Names, Receipts, Versions, range};
use fastps_core::error::{Error, Kind};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::{self, Fate, Pulled, Pushed, Ticket};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A bound list admits one push at a time; this is the one.
#[derive(Debug)]
pub(crate) struct Turn(Arc<AtomicBool>);

impl Turn {
    pub(crate) fn take(py: Python<'_>, busy: &Arc<AtomicBool>) -> PyResult<Self> {
        if busy.swap(true, Ordering::Acquire) {
            let got = "a second one before the first was done";
            return Err(errors::config(py, "a bound list admits one push at a time", "one push", got));
        }
        Ok(Self(busy.clone()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The pushes of one client that nobody has asked about yet.
#[derive(Debug, Default)]
pub(crate) struct Unread {
    flights: Mutex<Vec<Arc<Flight>>>,
    /// Whether some of them may be done.
    finished: AtomicBool,
}

impl Unread {
    fn add(&self, flight: Arc<Flight>) {
        lock(&self.flights).push(flight);
    }

    /// Whether no push is under way.
    pub(crate) fn all_done(&self) -> bool {
        lock(&self.flights).iter().all(|f| f.ticket.is_done())
    }

    /// Raises the error of a push that nobody has read, if it has told that it is finished.
    pub(crate) fn raise(&self, py: Python<'_>) -> PyResult<()> {
        if self.finished.swap(false, Ordering::Acquire) { self.raise_last(py) } else { Ok(()) }
    }

    /// The same, even if the push is only just finished and has not told yet.
    pub(crate) fn raise_last(&self, py: Python<'_>) -> PyResult<()> {
        let mut failed = None;
        // Taken out first: nobody may wait for the lock with the GIL.
        let mut done: Vec<_> = lock(&self.flights).extract_if(.., |flight| flight.ticket.is_done()).collect();
        done.retain(|flight| {
            if flight.read.load(Ordering::Acquire) {
                return false;
            }
            // Whose time is up may have to end first, and whoever ends it may call Python back.
            match py.detach(|| flight.ticket.wait(Duration::ZERO)) {
                Some(Err(error)) if failed.is_none() => {
                    flight.read.store(true, Ordering::Release);
                    drop(lock(&flight.turn).take());
                    failed = Some(error);
                    false
                }
                Some(Err(_)) => {
                    self.finished.store(true, Ordering::Release);
                    true
                }
                Some(Ok(_)) => false,
                None => true,
            }
        });
        lock(&self.flights).append(&mut done);
        failed.map_or(Ok(()), |error| Err(errors::raise_push(py, &error)))
    }
}

/// What a push under way shares with the thread that ends it.
pub(crate) struct Flight {
    ticket: Arc<dyn Ticket<Pushed>>,
    read: AtomicBool,
    turn: Mutex<Option<Turn>>,
    callbacks: Mutex<Vec<Py<PyAny>>>,
    ended: AtomicBool,
}

impl std::fmt::Debug for Flight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flight").field("done", &self.ticket.is_done()).finish_non_exhaustive()
    }
}

impl Flight {
    fn end(&self) {
        self.ended.store(true, Ordering::Release);
        drop(lock(&self.turn).take());
        let callbacks = std::mem::take(&mut *lock(&self.callbacks));
        if !callbacks.is_empty() {
            Python::try_attach(|py| {
                for callback in callbacks {
                    if let Err(error) = callback.call0(py) {
                        error.write_unraisable(py, None);
                    }
                }
            });
        }
    }
}

/// A push under way.
#[pyclass(frozen, module = "fastps._fastps", name = "PushFlight")]
#[derive(Debug)]
pub(crate) struct PushFlight {
    flight: Here<Arc<Flight>>,
    names: Names,
    unread: Option<Arc<Unread>>,
}

impl PushFlight {
    /// `tracked`: an error that nobody reads is raised by the next call on the client.
    pub(crate) fn start(
        ticket: Arc<dyn Ticket<Pushed>>,
        names: Names,
        turn: Option<Turn>,
        unread: &Arc<Unread>,
        tracked: bool,
    ) -> Self {
        let flight = Arc::new(Flight {
            ticket,
            read: AtomicBool::new(false),
            turn: Mutex::new(turn),
            callbacks: Mutex::default(),
            ended: AtomicBool::new(false),
        });
        let unread = tracked.then(|| unread.clone());
        if let Some(unread) = &unread {
            unread.add(flight.clone());
        }
        let (ended, tracker) = (flight.clone(), unread.clone());
        flight.ticket.on_done(Box::new(move || {
            if let Some(unread) = tracker {
                unread.finished.store(true, Ordering::Release);
            }
            ended.end();
        }));
        Self { flight: Here::new("push handle", flight), names, unread }
    }
}

#[pymethods]
impl PushFlight {
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let done = self.flight.get(py)?.ticket.is_done();
        if done && let Some(unread) = &self.unread {
            // Whoever has seen this gets the error with the next call, even if the callback comes a moment later.
            unread.finished.store(true, Ordering::Release);
        }
        Ok(done)
    }

    /// The receipts; None after the timeout in seconds (None waits for ever).
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Receipts>> {
        let flight = self.flight.get(py)?;
        let timeout = timeout.map(|t| call::duration(py, t)).transpose()?;
        let Some(pushed) = call::wait(py, &*flight.ticket, timeout)? else { return Ok(None) };
        flight.read.store(true, Ordering::Release);
        // Whoever has the result may push the list again, even if the callback comes a moment later.
        drop(lock(&flight.turn).take());
        sweep(py);
        let receipts = pushed.or_raise(py)?;
        Ok(Some(Receipts { names: self.names.clone(), receipts }))
    }

    /// Calls `callback()` once when done, from any thread; at once if it is.
    fn on_done(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        let flight = self.flight.get(py)?;
        lock(&flight.callbacks).push(callback);
        if flight.ended.load(Ordering::Acquire) {
            flight.end();
        }
        Ok(())
    }
}

type PullTicket = Arc<dyn Ticket<Result<Pulled, Error>>>;

/// A pull under way.
#[pyclass(frozen, module = "fastps._fastps", name = "PullFlight")]
pub(crate) struct PullFlight {
    ticket: Here<PullTicket>,
    specs: Vec<Arc<TensorSpec>>,
}

impl PullFlight {
    pub(crate) fn start(ticket: PullTicket, specs: Vec<Arc<TensorSpec>>) -> Self {
        Self { ticket: Here::new("pull handle", ticket), specs }
    }
}

#[pymethods]
impl PullFlight {
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.ticket.get(py)?.is_done())
    }

    /// Copies the values into `out` (name to array; new arrays if None) and tells their versions; None after the
    /// timeout in seconds (None waits for ever).
    fn install<'py>(
        &self,
        py: Python<'py>,
        out: Option<&Bound<'py, PyDict>>,
        timeout: Option<f64>,
    ) -> PyResult<Option<(Bound<'py, PyDict>, Versions)>> {
        let ticket = self.ticket.get(py)?;
        let timeout = timeout.map(|t| call::duration(py, t)).transpose()?;
        let Some(pulled) = call::wait(py, &**ticket, timeout)? else { return Ok(None) };
        let pulled = pulled.or_raise(py)?;
        let (values, targets) = targets(py, &self.specs, out)?;
        let fits = py.detach(|| {
            targets.iter().zip(&pulled.values).all(|(target, values)| {
                target.len() == values.len() && target.write(0, values.view().bytes())
            })
        });
        drop(targets);
        sweep(py);
        if !fits {
            return Err(reshaped(py));
        }
        Ok(Some((values, Versions(Arc::new(pulled.versions)))))
    }
}

/// The error of a tensor that was registered anew with another shape while it was pulled.
pub(crate) fn reshaped(py: Python<'_>) -> PyErr {
    raise(py, &Error::new(Kind::Shape, "a tensor changed its shape during the call; call again"))
}

/// Arrays that a pull fills; notices if a part stayed as it was.
#[derive(Default)]
pub(crate) struct Filler {
    targets: Vec<crate::buffer::Borrowed>,
    /// Bytes of each that did not come yet.
    missing: Vec<usize>,
    misfit: bool,
}

impl Filler {
    pub(crate) fn new(targets: Vec<crate::buffer::Borrowed>) -> Self {
        let missing = targets.iter().map(|target| target.dtype().size() * target.len()).collect();
        Self { targets, missing, misfit: false }
    }

    fn is_full(&self) -> bool {
        !self.misfit && self.missing.iter().all(|missing| *missing == 0)
    }
}

/// A thread that waits for a push or a pull. The main thread notices Ctrl-C; then it is gone, nothing more is written to
/// the arrays, and the call comes to its end by itself.
pub(crate) struct Waiting {
    filler: Filler,
    turn: Option<Turn>,
    is_main: bool,
    interrupt: Option<PyErr>,
}

impl Waiting {
    pub(crate) fn new(py: Python<'_>, filler: Filler, turn: Option<Turn>) -> PyResult<Self> {
        Ok(Self { filler, turn, is_main: call::is_main(py)?, interrupt: None })
    }

    /// Lets go of the arrays; tells whether they are filled.
    pub(crate) fn end(self) -> PyResult<bool> {
        self.interrupt.map_or(Ok(self.filler.is_full()), Err)
    }
}

impl verbs::Caller for Waiting {
    fn take(&mut self, k: usize, at: usize, bytes: &[u8]) {
        let filler = &mut self.filler;
        filler.misfit |= !filler.targets[k].write(at, bytes);
        filler.missing[k] = filler.missing[k].saturating_sub(bytes.len());
    }

    fn leaves(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        if !self.is_main {
            return None;
        }
        let checked = Python::attach(|py: Python<'_>| -> PyResult<()> { py.check_signals() });
        self.interrupt = Some(checked.err()?);
        let turn = self.turn.take();
        Some(Box::new(|| drop(turn)))
    }
}

/// Where pulled values go: the caller's arrays, or new ones.
pub(crate) fn targets<'py>(
    py: Python<'py>,
    specs: &[Arc<TensorSpec>],
    out: Option<&Bound<'py, PyDict>>,
) -> PyResult<(Bound<'py, PyDict>, Vec<crate::buffer::Borrowed>)> {
    let values = PyDict::new(py);
    let mut targets = Vec::with_capacity(specs.len());
    for spec in specs {
        let (array, target) = match out {
            None => empty(py, spec.dtype, &spec.shape)?,
            Some(out) => {
                let given = out.get_item(&*spec.name)?.ok_or_else(|| {
                    let error =
                        Error::new(Kind::Config, "out= has no array for a tensor").tensor(spec.name.clone());
                    raise(py, &error.expected("an array for every name", format!("{} arrays", out.len())))
                })?;
                let target = target(py, spec, &given)?;
                (given, target)
            }
        };
        values.set_item(&*spec.name, array)?;
        targets.push(target);
    }
    Ok((values, targets))
}

/// The caller's array as a target.
pub(crate) fn target(
    py: Python<'_>,
    spec: &TensorSpec,
    array: &Bound<'_, PyAny>,
) -> PyResult<crate::buffer::Borrowed> {
    let target = borrow(array, &spec.name, Access::Write)?;
    if target.shape() == spec.shape {
        return Ok(target);
    }
    let error = Error::new(Kind::Shape, "the array of out= has another shape").tensor(spec.name.clone());
    Err(raise(py, &error.expected(format!("{:?}", spec.shape), format!("{:?}", target.shape()))))
}

/// A slice of a push whose answer is missing.
///
/// Attributes:
///     tensor: Its tensor's name.
///     shard: Index of the shard that has not answered.
///     elements: ``range`` of the tensor's elements, row-major.
#[pyclass(frozen, module = "fastps", name = "InDoubt")]
#[derive(Debug)]
pub(crate) struct InDoubt {
    doubt: Here<Arc<dyn verbs::InDoubt>>,
}

impl InDoubt {
    pub(crate) fn new(doubt: Arc<dyn verbs::InDoubt>) -> Self {
        Self { doubt: Here::new("push", doubt) }
    }
}

#[pymethods]
impl InDoubt {
    #[getter]
    fn tensor(&self, py: Python<'_>) -> PyResult<&str> {
        Ok(self.doubt.get(py)?.tensor())
    }

    #[getter]
    fn shard(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.doubt.get(py)?.shard())
    }

    #[getter]
    fn elements<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        range(py, &self.doubt.get(py)?.elements())
    }

    /// Waits at most `timeout` seconds until the server tells, reconnecting if need be.
    ///
    /// Returns:
    ///     ``"applied"``, ``"fenced"`` (not applied, and never will be) or ``"unknown"`` (nobody can tell any more).
    ///
    /// Raises:
    ///     DeadlineError, ConnectionLostError, UnavailableError: It could not be found out yet; ask again.
    #[pyo3(signature = (timeout=30.0))]
    fn result(&self, py: Python<'_>, timeout: f64) -> PyResult<&'static str> {
        let doubt = self.doubt.get(py)?.clone();
        let timeout = call::duration(py, timeout)?;
        match call::run(py, true, move || doubt.result(timeout))?.or_raise(py)? {
            Fate::Applied { .. } => Ok("applied"),
            Fate::Fenced => Ok("fenced"),
            Fate::Unknown => Ok("unknown"),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let doubt = self.doubt.get(py)?;
        let (tensor, shard, elements) = (doubt.tensor(), doubt.shard(), doubt.elements());
        Ok(format!("<InDoubt tensor {tensor:?}, elements {elements:?}, shard {shard}>"))
    }
}
