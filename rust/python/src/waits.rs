//! Waits of clients, as records of the logger "fastps" of Python's `logging`.

use fastps_client::{WaitsFor, on_wait};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

/// Makes clients log their waits.
pub(crate) fn listen() {
    on_wait(|what, text| {
        // Nothing is logged while the interpreter shuts down.
        Python::try_attach(|py| {
            if let Err(error) = log(py, what, text) {
                report(py, error);
            }
        });
    });
}

/// Logs an unreachable server as a warning, which Python shows by default, and a slow answer as information.
fn log(py: Python<'_>, what: WaitsFor, text: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("fastps",))?;
    let level = match what {
        WaitsFor::Server => "warning",
        WaitsFor::Answer => "info",
    };
    logger.call_method1(level, ("%s", text)).map(drop)
}

/// Reports an error that logging raised. A Ctrl-C that Python noticed meanwhile is raised by the call that
/// waits, which checks for signals.
fn report(py: Python<'_>, error: PyErr) {
    let interrupted = error.is_instance_of::<PyKeyboardInterrupt>(py);
    if interrupted && py.import("_thread").and_then(|thread| thread.call_method0("interrupt_main")).is_ok() {
        return;
    }
    error.write_unraisable(py, None);
}
