//! A worker's step in one call: gradients go in and values come out. Here on a store of this process;
//! `far_exchange` has the servers.

use super::far_exchange::Far;
use super::flight::{PushFlight, Unread};
use super::settings::PushSettings;
use super::{Client, Shared};
use crate::arguments::text;
use crate::arrays::buffer::{Access, Borrowed, borrow, glance, is_plain, try_borrow};
use crate::call::{self, Here};
use crate::codecs::ErrorFeedback;
use crate::errors::{self, OrRaise};
use crate::openmp::Threads;
use crate::results::failure::raise_push;
use crate::results::{Names, Receipts, Versions};
use fastps_core::codec::Codec;
use fastps_core::dtype::View;
use fastps_core::error::{Error, Kind};
use fastps_core::store::{Exchange as Tensors, Exchanged, How, Outcome as Done, Store, Team};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{GradientRef, PushOptions, Values};
use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A store, and the threads that work in place of the store's.
type By<'a> = (&'a Store, Option<&'a Threads>);

/// Receipts, versions of the installed values, the failure, and the groups where the step was reported but may
/// not end yet. All are missing if the push, whose flight has begun, waits for those of others.
pub(super) type Outcome = (Option<Receipts>, Option<Versions>, Option<Py<PyBaseException>>, Vec<String>);

/// What waits for other workers in a step.
pub(super) struct Together<'a> {
    /// Groups where the step is reported before values are pulled.
    pub(super) groups: Vec<String>,
    /// With servers, begins with the push; with a store, if a policy holds it. Without one, the exchange waits.
    pub(super) flight: Option<&'a PushFlight>,
    pub(super) unread: &'a Arc<Unread>,
}

/// Where a worker's tensors are.
#[derive(Debug)]
pub(super) enum Place {
    Store(Tensors),
    Servers(Far),
}

/// A worker's tensors and the targets of their values: looked up and pinned once.
#[pyclass(frozen, module = "fastps._fastps", name = "Exchange")]
#[derive(Debug)]
pub(crate) struct Exchange {
    server: Here<Shared>,
    pub(super) names: Names,
    pub(super) place: Place,
    pub(super) targets: Arc<Vec<Borrowed>>,
    pub(super) codec: Option<Codec>,
    feedback: Option<Py<ErrorFeedback>>,
    /// Addresses of the targets, ascending; none overlap.
    spans: Vec<Range<usize>>,
    elements: usize,
}

/// The targets of a worker's values, and its tensors in a store; `None` if targets are of a wrong type.
pub(super) fn in_process(
    py: Python<'_>,
    store: &Store,
    params: &Bound<'_, PyDict>,
) -> PyResult<Option<(Vec<Borrowed>, Place)>> {
    let (mut names, mut targets) = (Vec::with_capacity(params.len()), Vec::with_capacity(params.len()));
    for (name, array) in params {
        let name = text(&name, "name")?;
        targets.push(borrow(&array, name, Access::Write)?);
        names.push(Arc::<str>::from(name));
    }
    let all: Vec<_> = names.into_iter().zip(targets.iter().map(Borrowed::shape)).collect();
    let tensors = store.exchange_of(&all).or_raise(py)?;
    let fitted = targets.into_iter().zip(tensors.dtypes()).map(|(target, dtype)| target.for_values_of(dtype));
    Ok(fitted.collect::<Option<Vec<_>>>().map(|targets| (targets, Place::Store(tensors))))
}

#[pymethods]
impl Exchange {
    /// True if the tensors are on servers.
    #[getter]
    fn is_far(&self) -> bool {
        matches!(self.place, Place::Servers(_))
    }
}

impl Exchange {
    /// `None` if targets share memory: the order in which they are filled would matter.
    pub(super) fn new(
        server: &Shared,
        params: &Bound<'_, PyDict>,
        targets: Vec<Borrowed>,
        place: Place,
        codec: Option<Codec>,
        feedback: Option<Py<ErrorFeedback>>,
    ) -> Option<Self> {
        let mut spans: Vec<_> = targets.iter().map(Borrowed::addresses).collect();
        spans.sort_unstable_by_key(|span| span.start);
        if spans.windows(2).any(|pair| pair[0].end > pair[1].start) {
            return None;
        }
        let elements = targets.iter().map(Borrowed::len).sum();
        let names = params.keys().iter().filter_map(|name| Some(name.cast_into::<PyString>().ok()?.unbind()));
        let (server, names) = (Here::new("worker", server.clone()), Arc::new(names.collect()));
        Some(Self { server, names, place, targets: Arc::new(targets), codec, feedback, spans, elements })
    }

    pub(super) fn is_of(&self, py: Python<'_>, server: &Shared) -> PyResult<bool> {
        Ok(Arc::ptr_eq(self.server.get(py)?, server))
    }

    /// The gradient of each tensor; `None` if one is of another tensor, or if there are none.
    pub(super) fn given<'py>(
        &self,
        gradients: &Bound<'py, PyDict>,
    ) -> PyResult<Option<Vec<Option<Bound<'py, PyAny>>>>> {
        let (mut given, mut left) = (Vec::with_capacity(self.names.len()), gradients.len());
        for name in self.names.iter() {
            let gradient = gradients.get_item(name)?;
            left -= usize::from(gradient.is_some());
            given.push(gradient);
        }
        Ok((left == 0 && !gradients.is_empty()).then_some(given))
    }

    pub(super) fn rates(&self, rates: &Bound<'_, PyDict>) -> PyResult<Vec<Option<f64>>> {
        let of = |name: &Py<PyString>| rates.get_item(name)?.map(|rate| rate.extract()).transpose();
        self.names.iter().map(of).collect()
    }

    /// The options of a step's push, with the codec of these tensors.
    pub(super) fn options(
        &self,
        py: Python<'_>,
        client: &Client,
        settings: &PushSettings,
    ) -> PyResult<PushOptions> {
        settings.options(py, client, self.codec, self.feedback.as_ref().map(Py::get))
    }

    /// Takes the step in one call if possible; `None` if nothing was done, so that the ordinary way reports
    /// the reason.
    pub(super) fn step(
        &self,
        py: Python<'_>,
        by: By<'_>,
        gradients: &Bound<'_, PyDict>,
        options: &PushOptions,
        rates: Option<&Bound<'_, PyDict>>,
        together: &Together<'_>,
    ) -> PyResult<Option<Outcome>> {
        if rates.is_some() && matches!(self.codec, Some(Codec::Int8 { seed: Some(_) })) {
            return Ok(None); // whose random numbers depend on the number of pushes, one for each rate
        }
        let rates = rates.map_or(Ok(Vec::new()), |rates| self.rates(rates))?;
        let names = self.names.iter().map(|name| name.bind(py).to_str()).collect::<PyResult<Vec<_>>>()?;
        let Some(given) = self.given(gradients)? else { return Ok(None) };
        if let Some(gradients) = self.glances(&names, &given, together) {
            let done = self.exchange(by, &gradients, options, &rates, together);
            return Ok(self.outcome(py, &given, done, together));
        }
        let mut lent = Vec::with_capacity(given.len());
        for gradient in &given {
            let memory = gradient.as_ref().map(|gradient| try_borrow(gradient, Access::Read)).transpose()?;
            match memory.transpose() {
                Ok(memory) => lent.push(memory),
                Err(_) => return Ok(None),
            }
        }
        let gradients: Vec<_> =
            names.iter().zip(&lent).map(|(name, memory)| Some(whole(name, memory.as_ref()?))).collect();
        let done = py.detach(|| self.exchange(by, &gradients, options, &rates, together));
        lent.into_iter().flatten().for_each(|memory| memory.release(py));
        Ok(self.outcome(py, &given, done, together))
    }

    /// The gradients of a step that keeps the GIL, because it will be over at once.
    fn glances<'a>(
        &self,
        names: &[&'a str],
        given: &'a [Option<Bound<'_, PyAny>>],
        together: &Together<'_>,
    ) -> Option<Vec<Option<GradientRef<'a>>>> {
        // Another thread may have the residuals, or wait for this worker.
        let meets = self.feedback.is_some() || together.flight.is_some() || !together.groups.is_empty();
        let lets_go = meets || self.elements > call::brief(given.len());
        if lets_go || !given.iter().flatten().all(is_plain) {
            return None;
        }
        // From here on no Python code runs until the step is done.
        let of = |(name, gradient): (&&'a str, &'a Option<Bound<'_, PyAny>>)| match gradient {
            None => Some(None),
            Some(gradient) => {
                let (shape, values) = glance(gradient)?;
                Some(Some(GradientRef::whole(name, shape, values)))
            }
        };
        names.iter().zip(given).map(of).collect()
    }

    /// Pushes and pulls; `None` if nothing was done.
    fn exchange(
        &self,
        (store, team): By<'_>,
        gradients: &[Option<GradientRef<'_>>],
        options: &PushOptions,
        rates: &[Option<f64>],
        together: &Together<'_>,
    ) -> Option<(Done, Vec<String>)> {
        let Place::Store(tensors) = &self.place else { return None };
        if gradients.iter().flatten().any(|gradient| self.is_filled(gradient.values)) {
            return None;
        }
        let fit = AtomicBool::new(true);
        let take = |k: usize, at: usize, bytes: &[u8]| {
            if !self.targets[k].write(at, bytes) {
                fit.store(false, Ordering::Relaxed);
            }
        };
        let waits = Mutex::new(Vec::new());
        // All groups are told before any is waited for.
        let report = || {
            let behind = |group: &&String| store.advance(group, false, 1, Duration::ZERO).is_err();
            let behind: Vec<_> = together.groups.iter().filter(behind).cloned().collect();
            let pulls = behind.is_empty();
            *waits.lock().unwrap_or_else(PoisonError::into_inner) = behind;
            pulls
        };
        let how = How {
            rates,
            team: team.map(|threads| threads as &dyn Team),
            before_pull: (!together.groups.is_empty()).then_some(&report as &(dyn Fn() -> bool + Sync)),
            leaves_held: together.flight.is_some(),
        };
        let mut done = store.exchange(tensors, gradients, options, how, &take).ok()?;
        if let (false, Done::Done(exchanged)) = (fit.into_inner(), &mut done) {
            exchanged.versions = Some(Err(Error::new(Kind::Internal, "a tensor does not fit its array")));
        }
        Some((done, waits.into_inner().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Returns whether a gradient overlaps the targets, which are filled while gradients are still read.
    pub(super) fn is_filled(&self, gradient: View<'_>) -> bool {
        let Range { start, end } = gradient.bytes().as_ptr_range();
        let next = self.spans.partition_point(|span| span.end <= start as usize);
        self.spans.get(next).is_some_and(|span| span.start < end as usize)
    }

    fn outcome(
        &self,
        py: Python<'_>,
        given: &[Option<Bound<'_, PyAny>>],
        done: Option<(Done, Vec<String>)>,
        together: &Together<'_>,
    ) -> Option<Outcome> {
        let (done, waits) = done?;
        let Exchanged { pushed, versions } = match done {
            Done::Done(exchanged) => exchanged,
            Done::Held(ticket) => {
                if let Some(flight) = together.flight {
                    flight.start(ticket, self.names_of(py, given), None, together.unread, false);
                }
                return Some((None, None, None, Vec::new()));
            }
        };
        let versions = versions.transpose();
        let failed = pushed.as_ref().err().map(|error| raise_push(py, error));
        let failed = failed.or_else(|| versions.as_ref().err().map(|error| errors::raise(py, error)));
        let receipts = pushed.ok().map(|receipts| Receipts { names: self.names_of(py, given), receipts });
        let versions = versions.ok().flatten().map(|versions| Versions(Arc::new(versions)));
        Some((receipts, versions, failed.map(|error| error.into_value(py)), waits))
    }

    /// The names of the pushed tensors.
    pub(super) fn names_of(&self, py: Python<'_>, given: &[Option<Bound<'_, PyAny>>]) -> Names {
        if given.iter().all(Option::is_some) {
            return self.names.clone();
        }
        let pushed = self.names.iter().zip(given).filter(|(_, gradient)| gradient.is_some());
        Arc::new(pushed.map(|(name, _)| name.clone_ref(py)).collect())
    }
}

fn whole<'a>(name: &'a str, memory: &'a Borrowed) -> GradientRef<'a> {
    GradientRef::whole(name, memory.shape(), memory.view())
}
