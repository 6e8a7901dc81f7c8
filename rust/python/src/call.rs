//! Calls of the core and the client: without the GIL, interruptible by Ctrl-C, and never in a forked child.

use crate::errors;
use crate::settings::number;
use fastps_core::error::{Error, Kind};
use fastps_core::verbs::Ticket;
use pyo3::prelude::*;
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a call may take to notice a signal.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

static FORKS: AtomicU32 = AtomicU32::new(0);

/// Called by Python in every forked child: objects made before are unusable there, as their threads are gone.
#[pyfunction]
pub(crate) fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    HELPER.with_borrow_mut(|helper| std::mem::forget(helper.take()));
}

/// Returns whether this process is a forked child.
pub(crate) fn is_forked() -> bool {
    FORKS.load(Ordering::Relaxed) > 0
}

/// An object that relies on threads, which a forked child does not have: in the child its use is an error,
/// and dropping it does nothing, because its destructor could wait for those threads.
#[derive(Debug)]
pub(crate) struct Here<T> {
    value: Option<T>,
    born: u32,
    what: &'static str,
}

impl<T> Here<T> {
    pub(crate) fn new(what: &'static str, value: T) -> Self {
        Self { value: Some(value), born: FORKS.load(Ordering::Relaxed), what }
    }

    /// What it is, in one word.
    pub(crate) fn what(&self) -> &'static str {
        self.what
    }

    /// The value, unless this is a forked child.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&T> {
        match &self.value {
            Some(value) if self.born == FORKS.load(Ordering::Relaxed) => Ok(value),
            _ => Err(errors::fork(py, self.what)),
        }
    }
}

impl<T> Drop for Here<T> {
    fn drop(&mut self) {
        if self.born != FORKS.load(Ordering::Relaxed) {
            std::mem::forget(self.value.take());
        }
    }
}

/// The deadline of a call, shared by all its requests.
#[derive(Clone, Copy)]
pub(crate) struct End(Instant);

impl End {
    pub(crate) fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout)
    }

    /// The time that is left.
    pub(crate) fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}

/// The argument `timeout` of a call: a number, or `ConfigError`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seconds(f64);

impl Seconds {
    pub(crate) const fn of(seconds: f64) -> Self {
        Self(seconds)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Seconds {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        number(&given, "timeout").map(Self)
    }
}

impl From<Seconds> for f64 {
    fn from(seconds: Seconds) -> Self {
        seconds.0
    }
}

/// Reads a timeout in seconds.
pub(crate) fn duration(py: Python<'_>, seconds: impl Into<f64>) -> PyResult<Duration> {
    const LONGEST: f64 = 1e9;
    let seconds = seconds.into();
    if seconds.is_nan() || seconds < 0.0 {
        return Err(errors::config(py, "invalid timeout", "seconds >= 0", seconds));
    }
    Ok(Duration::from_secs_f64(seconds.min(LONGEST)))
}

/// Waits for a ticket and checks for signals in between; `None` after the timeout.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    ticket: &dyn Ticket<T>,
    timeout: Option<Duration>,
) -> PyResult<Option<T>> {
    if timeout == Some(Duration::ZERO) {
        return Ok(py.detach(|| ticket.wait(Duration::ZERO)));
    }
    let end = timeout.and_then(|t| Instant::now().checked_add(t));
    loop {
        let left = end.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()));
        if let Some(value) = py.detach(|| ticket.wait(left.min(SLICE))) {
            return Ok(Some(value));
        }
        py.check_signals()?;
        if end.is_some_and(|end| Instant::now() >= end) {
            return Ok(None);
        }
    }
}

/// Most elements of a push that keeps the GIL: about 10 microseconds by Adam, 3 by SGD.
const BRIEF: usize = 1 << 15;

/// Elements of an array whose step by SGD takes as long as a lock on the array's memory: .1 microseconds.
const SMALL: usize = 1 << 11;

/// Most elements of a push of `arrays` arrays that keeps the GIL: without it each array would be locked,
/// which takes longer than the step if arrays are small.
pub(crate) fn brief(arrays: usize) -> usize {
    arrays.saturating_mul(SMALL).clamp(BRIEF, 4 * BRIEF)
}

/// Does work on `elements` elements in this process; releases the GIL unless the work is brief.
pub(crate) fn work<T: Send>(py: Python<'_>, elements: usize, work: impl FnOnce() -> T + Send) -> T {
    if elements <= BRIEF { work() } else { py.detach(work) }
}

type Job = Box<dyn FnOnce() + Send>;

thread_local! {
    static MAIN: Cell<Option<bool>> = const { Cell::new(None) };
    static HELPER: RefCell<Option<mpsc::Sender<Job>>> = const { RefCell::new(None) };
}

/// Returns whether this is the thread on which Python runs signal handlers.
pub(crate) fn is_main(py: Python<'_>) -> PyResult<bool> {
    if let Some(known) = MAIN.get() {
        return Ok(known);
    }
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?.getattr("ident")?;
    let known = threading.call_method0("get_ident")?.eq(main)?;
    MAIN.set(Some(known));
    Ok(known)
}

/// Runs a call that may take long. A network call of the main thread runs on a helper thread, so that the
/// main thread notices Ctrl-C; it then returns at once, and the call ends (or times out) on its own.
/// Pushes and pulls must not wake another thread and check for signals themselves: see
/// `client::waiting::Waiting`.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    remote: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    if !remote || !is_main(py)? {
        return Ok(py.detach(work));
    }
    let (done, result) = mpsc::sync_channel(1);
    let job: Job = Box::new(move || {
        let _ = done.send(work());
    });
    let helper = match HELPER.take() {
        Some(helper) => helper,
        None => start_helper().map_err(|e| errors::raise(py, &e))?,
    };
    let gone = || errors::raise(py, &Error::new(Kind::Internal, "the thread of a call ended"));
    helper.send(job).map_err(|_| gone())?;
    let mut result = result;
    loop {
        let received;
        (result, received) = py.detach(move || {
            let received = result.recv_timeout(SLICE);
            (result, received)
        });
        match received {
            Ok(value) => {
                HELPER.set(Some(helper));
                return Ok(value);
            }
            // An abandoned helper ends with its job, since its sender is dropped.
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(gone()),
        }
    }
}

fn start_helper() -> Result<mpsc::Sender<Job>, Error> {
    let (send, receive) = mpsc::channel::<Job>();
    std::thread::Builder::new()
        .name("fastps-call".into())
        .spawn(move || receive.into_iter().for_each(|job| job()))
        .map_err(|e| Error::new(Kind::Internal, format!("cannot start a thread: {e}")))?;
    Ok(send)
}
