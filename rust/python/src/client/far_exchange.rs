//! A worker's step over servers in one call: pushes, waits for others as far as its mode asks, and pulls.

use super::exchange::{Exchange, Outcome, Place, Together};
use super::pull::try_pull_into;
use super::waiting::Reading;
use super::{Client, Shared};
use crate::arguments::text;
use crate::arrays::buffer::{Access, Borrowed, sweep, try_borrow};
use crate::call::{self, End};
use crate::results::Receipts;
use crate::results::failure::raise_push;
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::{Gradient, PullOptions, PushOptions, Values};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;
use std::time::Duration;

/// How long a step waits for others before its caller, which shows long waits, goes on with that.
const PATIENCE: Duration = Duration::from_millis(250);

/// What a step asks servers for.
#[derive(Debug)]
pub(super) struct Far {
    names: Vec<Arc<str>>,
    pull: PullOptions,
    /// Limit on a call that is not the push.
    timeout: Duration,
}

impl Client {
    /// The targets of a worker's values, and its tensors on servers.
    pub(super) fn over_servers(
        &self,
        py: Python<'_>,
        server: &Shared,
        params: &Bound<'_, PyDict>,
    ) -> PyResult<(Vec<Borrowed>, Place)> {
        let names = params.keys().iter().map(|name| Ok(text(&name, "name")?.into()));
        let names = names.collect::<PyResult<Vec<Arc<str>>>>()?;
        let into = |specs: &[Arc<TensorSpec>]| Reading::default().targets(py, specs, Some(params));
        let end = End::after(self.timeout);
        let (_, (_, targets, pull)) = self.specs_for(py, server, &names, end, into)?;
        Ok((targets, Place::Servers(Far { names, pull, timeout: self.timeout })))
    }
}

impl Exchange {
    /// Takes the step in one call if possible; `None` if nothing was done, so that the ordinary way reports
    /// the reason. The flight has begun before anything is waited for. `waits`: others are waited for, and the
    /// values are those after that.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn step_far(
        &self,
        py: Python<'_>,
        server: &Shared,
        gradients: &Bound<'_, PyDict>,
        mut options: PushOptions,
        rates: Option<&Bound<'_, PyDict>>,
        together: &Together<'_>,
        waits: bool,
    ) -> PyResult<Option<Outcome>> {
        let (Place::Servers(far), Some(flight)) = (&self.place, together.flight) else { return Ok(None) };
        // A loss is reported before a step is taken.
        let Some(given) = self.given(gradients)?.filter(|_| !server.has_lost()) else { return Ok(None) };
        if let Some(rates) = rates {
            let rates = self.rates(rates)?;
            let mut pushed =
                rates.into_iter().zip(&given).filter_map(|(rate, given)| given.as_ref().map(|_| rate));
            options.lr = pushed.next().flatten();
            if pushed.any(|rate| rate != options.lr) {
                return Ok(None); // a push has one rate
            }
        }
        let Some(gradients) = self.lent(far, &given)? else { return Ok(None) };
        let Ok(ticket) = py.detach(|| server.begin_push(gradients, options)) else { return Ok(None) };
        let names = self.names_of(py, &given);
        flight.start(ticket.clone(), names.clone(), None, together.unread, false);
        let pull = || {
            let asked = (&far.names[..], &far.pull);
            try_pull_into(py, server, asked, self.targets.clone(), far.timeout)
        };
        // On its connections a pull follows the push, so its values contain that.
        let early = if waits { None } else { Some(pull()?) };
        let Some(pushed) = call::wait(py, &*ticket, waits.then_some(PATIENCE))? else {
            return Ok(Some((None, None, None, Vec::new())));
        };
        sweep(py);
        let receipts = match pushed {
            Ok(receipts) => Receipts { names, receipts },
            Err(error) => {
                let failed = Some(raise_push(py, &error).into_value(py));
                return Ok(Some((None, early.and_then(Result::ok), failed, Vec::new())));
            }
        };
        let behind = report(py, server, &together.groups)?;
        if !behind.is_empty() {
            return Ok(Some((Some(receipts), None, None, behind)));
        }
        let pulled = early.map_or_else(pull, Ok)?;
        let (versions, failed) = match pulled {
            Ok(versions) => (Some(versions), None),
            Err(error) => (None, Some(error.into_value(py))),
        };
        Ok(Some((Some(receipts), versions, failed, behind)))
    }

    /// The gradients of a step; `None` if one is no array, or shares memory with a target.
    fn lent(&self, far: &Far, given: &[Option<Bound<'_, PyAny>>]) -> PyResult<Option<Vec<Gradient>>> {
        let mut gradients = Vec::with_capacity(given.len());
        for (name, gradient) in far.names.iter().zip(given) {
            let Some(gradient) = gradient else { continue };
            let Ok(memory) = try_borrow(gradient, Access::Read)? else { return Ok(None) };
            if self.is_filled(memory.view()) {
                return Ok(None);
            }
            let shape = memory.shape().to_vec();
            gradients.push(Gradient { name: name.clone(), shape, values: Arc::new(memory) });
        }
        Ok(Some(gradients))
    }
}

/// Reports the step to these groups; returns those where others are behind, or that did not answer.
fn report(py: Python<'_>, server: &Shared, groups: &[String]) -> PyResult<Vec<String>> {
    if groups.is_empty() {
        return Ok(Vec::new());
    }
    // All are told before one is waited for: two workers may be behind in each other's next group.
    let patience = if groups.len() == 1 { PATIENCE } else { Duration::ZERO };
    let (server, groups) = (server.clone(), groups.to_vec());
    let ask = move |group: &String| server.advance(group, false, 1, patience).is_err();
    call::run(py, true, move || groups.into_iter().filter(ask).collect())
}
