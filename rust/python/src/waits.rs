//! For what clients wait, as records of the logger "fastps" of Python's `logging`.

use fastps_client::{WaitsFor, on_wait};
use pyo3::prelude::*;

/// Has clients say for what they wait.
pub(crate) fn listen() {
    on_wait(|what, text| {
        // While the interpreter ends, it is told to no logger.
        Python::try_attach(|py| {
            let logged = log(py, what, text);
            logged.unwrap_or_else(|error| error.write_unraisable(py, None));
        });
    });
}

/// A server that is not there is a warning, which Python shows unless it is told otherwise; a slow answer is not.
fn log(py: Python<'_>, what: WaitsFor, text: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("fastps",))?;
    let level = match what {
        WaitsFor::Server => "warning",
        WaitsFor::Answer => "info",
    };
    logger.call_method1(level, ("%s", text)).map(drop)
}
