//! Pulls in progress.

use super::waiting::{reshaped, targets};
use crate::arrays::buffer::sweep;
use crate::call::{self, Here, Seconds};
use crate::errors::OrRaise;
use crate::results::Versions;
use fastps_core::error::Error;
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::{PullOptions, Pulled, Ticket};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;

type PullTicket = Arc<dyn Ticket<Result<Pulled, Error>>>;

/// A pull in progress.
#[pyclass(frozen, module = "fastps._fastps", name = "PullFlight")]
pub(crate) struct PullFlight {
    ticket: Here<PullTicket>,
    specs: Vec<Arc<TensorSpec>>,
    options: PullOptions,
}

impl PullFlight {
    pub(crate) fn start(ticket: PullTicket, specs: Vec<Arc<TensorSpec>>, options: PullOptions) -> Self {
        Self { ticket: Here::new("pull handle", ticket), specs, options }
    }
}

#[pymethods]
impl PullFlight {
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.ticket.get(py)?.is_done())
    }

    /// Copies the values into `out` (name to array; new arrays if None) and returns them with their versions;
    /// None after the timeout in seconds (None: no limit).
    fn install<'py>(
        &self,
        py: Python<'py>,
        out: Option<&Bound<'py, PyDict>>,
        timeout: Option<Seconds>,
    ) -> PyResult<Option<(Bound<'py, PyDict>, Versions)>> {
        let ticket = self.ticket.get(py)?;
        let timeout = timeout.map(|t| call::duration(py, t)).transpose()?;
        let Some(pulled) = call::wait(py, &**ticket, timeout)? else { return Ok(None) };
        let pulled = pulled.or_raise(py)?;
        let (values, targets) = targets(py, &self.specs, |k, spec, _| self.options.dtype(k, spec), out)?;
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
