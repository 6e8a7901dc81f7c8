//! Pushes in progress.

use super::waiting::Turn;
use crate::arrays::buffer::sweep;
use crate::call::{self, Here, Seconds};
use crate::errors::{self, OrRaise};
use crate::results::failure::raise_push;
use crate::results::{Names, Receipts};
use fastps_core::fault::fault;
use fastps_core::verbs::{Pushed, Ticket};
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The pushes of one client whose results are not read yet.
#[derive(Debug, Default)]
pub(crate) struct Unread {
    flights: Mutex<Vec<Arc<Flight>>>,
    /// Set when some of them may be done.
    finished: AtomicBool,
}

impl Unread {
    fn add(&self, flight: Arc<Flight>) {
        lock(&self.flights).push(flight);
    }

    /// Returns whether no push is under way.
    pub(crate) fn all_done(&self) -> bool {
        lock(&self.flights).iter().all(|f| f.ticket.is_done())
    }

    /// Raises the unread error of a push that has reported its end.
    pub(crate) fn raise(&self, py: Python<'_>) -> PyResult<()> {
        if self.finished.swap(false, Ordering::Acquire) { self.raise_last(py) } else { Ok(()) }
    }

    /// Raises the unread error of any push that has ended, reported or not.
    pub(crate) fn raise_last(&self, py: Python<'_>) -> PyResult<()> {
        let mut failed = None;
        // Taken out first: no thread may wait for the lock while it holds the GIL.
        let mut done: Vec<_> = lock(&self.flights).extract_if(.., |flight| flight.ticket.is_done()).collect();
        done.retain(|flight| {
            if flight.read.load(Ordering::Acquire) {
                return false;
            }
            // A push past its deadline may have to end first, and ending it may call back into Python.
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
        failed.map_or(Ok(()), |error| Err(raise_push(py, &error)))
    }
}

/// The state that a push in progress shares with the thread that ends it.
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

/// A push that was sent.
#[derive(Debug)]
struct Begun {
    flight: Here<Arc<Flight>>,
    names: Names,
    unread: Option<Arc<Unread>>,
}

/// A push in progress, or one that has not begun: a caller may note it before its first frame leaves, so that
/// no exception of a signal handler can come between the two.
#[pyclass(frozen, module = "fastps._fastps", name = "PushFlight")]
#[derive(Debug, Default)]
pub(crate) struct PushFlight(OnceLock<Begun>);

impl PushFlight {
    /// `tracked`: the next call on the client raises an error that is not read.
    pub(crate) fn start(
        &self,
        ticket: Arc<dyn Ticket<Pushed>>,
        names: Names,
        turn: Option<Turn>,
        unread: &Arc<Unread>,
        tracked: bool,
    ) {
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
        let begun = Begun { flight: Here::new("push handle", flight), names, unread };
        self.0.get_or_init(|| begun);
    }

    fn get(&self, py: Python<'_>) -> PyResult<&Begun> {
        let not_begun = || errors::config(py, "the push has not begun", "a push that was sent", "a new one");
        self.0.get().ok_or_else(not_begun)
    }
}

#[pymethods]
impl PushFlight {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    #[getter]
    pub(super) fn begun(&self, py: Python<'_>) -> bool {
        let noted = |begun: &Begun| {
            !fault("flight_not_noted") || begun.flight.get(py).is_ok_and(|flight| flight.ticket.is_done())
        };
        self.0.get().is_some_and(noted)
    }

    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let begun = self.get(py)?;
        let done = begun.flight.get(py)?.ticket.is_done();
        if done && let Some(unread) = &begun.unread {
            // A caller that saw this gets the error with the next call, even if the callback runs a moment
            // later.
            unread.finished.store(true, Ordering::Release);
        }
        Ok(done)
    }

    /// The receipts; None after the timeout in seconds (None: no limit).
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Option<Receipts>> {
        let begun = self.get(py)?;
        let flight = begun.flight.get(py)?;
        let timeout = timeout.map(|t| call::duration(py, t)).transpose()?;
        let Some(pushed) = call::wait(py, &*flight.ticket, timeout)? else { return Ok(None) };
        flight.read.store(true, Ordering::Release);
        // A caller with the result may push the list again, even if the callback runs a moment later.
        drop(lock(&flight.turn).take());
        sweep(py);
        let receipts = pushed.or_raise(py)?;
        Ok(Some(Receipts { names: begun.names.clone(), receipts }))
    }

    /// Calls `callback()` once when done, from any thread; at once if it is done already.
    fn on_done(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        let flight = self.get(py)?.flight.get(py)?;
        lock(&flight.callbacks).push(callback);
        if flight.ended.load(Ordering::Acquire) {
            flight.end();
        }
        Ok(())
    }
}
