//! A Python callable that finds a cluster's servers.

use crate::errors;
use fastps_client::Resolver;
use fastps_core::error::{Error, Kind, Result};
use pyo3::prelude::*;
use std::sync::Arc;

/// A callable that returns a list of addresses, and raises errors that name it: `fastps.connect` wraps the
/// user's.
#[derive(Debug)]
struct Callable {
    name: String,
    callable: Py<PyAny>,
}

/// The resolver of this name.
pub(crate) fn of(name: &str, callable: Py<PyAny>) -> Arc<dyn Resolver> {
    Arc::new(Callable { name: name.to_owned(), callable })
}

impl Resolver for Callable {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn resolve(&self, is_open: &dyn Fn() -> bool) -> Result<Vec<String>> {
        let asked = Python::try_attach(|py| {
            // The client may have been closed while this thread waited for the GIL.
            if !is_open() {
                return Err(Error::new(Kind::Connection, "this client is closed"));
            }
            let addresses = self.callable.call0(py).and_then(|answer| answer.extract(py));
            addresses.map_err(|error| self.failed(py, &error))
        });
        asked.unwrap_or_else(|| Err(Error::new(Kind::Connection, "the interpreter is shutting down")))
    }
}

impl Callable {
    fn failed(&self, py: Python<'_>, error: &PyErr) -> Error {
        let is = |class: &str| {
            let class = errors::module(py).and_then(|errors| errors.getattr(class));
            class.is_ok_and(|class| error.is_instance(py, &class))
        };
        let kind = if is("ConfigError") { Kind::Config } else { Kind::Connection };
        if is("FastpsError") {
            return Error::new(kind, error.value(py).to_string());
        }
        // Such as SystemExit.
        Error::new(kind, format!("the resolver {} raised {error}", self.name))
    }
}
