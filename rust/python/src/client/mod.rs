//! A client of a store or of servers, with one method per verb. Each method converts its arguments, makes one
//! call for the whole list without the GIL, and converts the result.

mod assign;
mod exchange;
mod far_exchange;
mod flight;
mod portion;
mod pull;
mod pull_flight;
mod push;
mod report;
mod settings;
mod state;
mod vectors;
mod waiting;

pub(crate) use assign::assign_all;
pub(crate) use exchange::Exchange;
pub(crate) use flight::PushFlight;
pub(crate) use pull_flight::PullFlight;
pub(crate) use push::BoundList;
pub(crate) use settings::PushSettings;
pub(crate) use vectors::PyVectorSpaces;

use crate::arguments::{Name, Names, instance, text as read_text};
use crate::arrays::buffer::{Access, array, borrow, borrow_as_is, empty, sweep};
use crate::arrays::gradient::gradient;
use crate::arrays::shared_view::SharedView;
use crate::arrays::sparse;
use crate::call::{self, End, Here, Seconds};
use crate::codecs::ErrorFeedback;
use crate::errors::{self, OrRaise};
use crate::openmp::Threads;
use crate::results::Versions;
use crate::results::receipts::Receipt;
use crate::settings::codec::read_codec;
use crate::settings::group::read_mode;
use crate::settings::optimizer::{optimizer_object, read_optimizer};
use crate::settings::tensor::{
    apply_name, average_object, read_apply, read_average, read_dtype, read_rounding,
};
use exchange::{Outcome, Together};
use fastps_core::codec::Codec;
use fastps_core::error::{Error, Kind};
use fastps_core::mode::{Epoch, MembershipRequest, Mode, Presence};
use fastps_core::outgoing::{check_codec, check_shape};
use fastps_core::rounding::Rounding;
use fastps_core::store::{Store, StoreMemory, StoreOptions};
use fastps_core::tensor::TensorSpec;
use fastps_core::text;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{NewTensor, PullOptions, PushOptions, Rows, Values};
use flight::Unread;
use pull::{pull_into, pull_rows_into};
use push::{Gradients, List, PushPulled};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use state::read_state;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use waiting::{Reading, Turn, target, targets};

/// Shape, dtype, apply, group, optimizer, average, rounding and seed.
type SpecFields<'py> = (
    Bound<'py, PyTuple>,
    &'static str,
    &'static str,
    String,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<&'static str>,
    Option<u64>,
);

/// A store in this process, or servers.
type Shared = Arc<dyn ParameterServer>;

/// The compiled half of `fastps.Store` and of what `fastps.connect` returns.
#[pyclass(frozen, module = "fastps._fastps", name = "Client")]
#[derive(Debug)]
pub(crate) struct Client {
    server: Here<Shared>,
    /// The same server, if it is a store in this process.
    local: Option<Arc<Store>>,
    check_finite: bool,
    timeout: Duration,
    unread: Arc<Unread>,
    closed: AtomicBool,
    /// Kind and address of the object, for errors.
    title: String,
    /// Set when its pushes wait for those of other workers, so they must not hold the GIL meanwhile.
    waits: AtomicBool,
}

/// Whether the version that a worker computes for goes on without it.
#[pyclass(frozen, module = "fastps._fastps", name = "Listener")]
#[derive(Debug)]
pub(crate) struct Listener(fastps_core::verbs::Listener);

#[pymethods]
impl Listener {
    fn heard(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.heard())
    }
}

impl Client {
    /// A client of the servers at these addresses.
    pub(crate) fn remote(server: Shared, addresses: &str, check_finite: bool, timeout: Duration) -> Self {
        let title = format!("client of {addresses}");
        Self::of(Here::new("client", server), None, title, check_finite, timeout)
    }

    fn local(store: Store, check_finite: bool, timeout: Duration) -> Self {
        let store = Arc::new(store);
        let server = Here::new("store", store.clone() as Shared);
        Self::of(server, Some(store), "store".to_owned(), check_finite, timeout)
    }

    /// A client of tensors that never change.
    pub(crate) fn past(server: Shared) -> Self {
        let server = Here::new("store", server);
        Self::of(server, None, "store of a past moment".to_owned(), true, Duration::from_secs(30))
    }

    fn of(
        server: Here<Shared>,
        local: Option<Arc<Store>>,
        title: String,
        check_finite: bool,
        timeout: Duration,
    ) -> Self {
        let (closed, waits) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { server, local, check_finite, timeout, unread: Arc::default(), closed, title, waits }
    }

    /// The start of every verb: checks for a fork and raises the unread error of an earlier push.
    fn enter(&self, py: Python<'_>) -> PyResult<&Shared> {
        let server = self.server.get(py)?;
        if self.closed.load(Ordering::Relaxed) {
            let title = &self.title;
            let (what, cure) = match self.server.what() {
                "store" => ("store", "make another one"),
                what => (what, "connect again"),
            };
            let message = format!("this {title} is closed; {cure}");
            return Err(errors::config(py, &message, &format!("an open {what}"), "a closed one"));
        }
        sweep(py);
        self.unread.raise(py)?;
        Ok(server)
    }

    fn timeout(&self, py: Python<'_>, seconds: Option<Seconds>) -> PyResult<Duration> {
        seconds.map_or(Ok(self.timeout), |seconds| call::duration(py, seconds))
    }

    /// The store of this process, if a push to it does not wait.
    fn at_once(&self) -> Option<&Arc<Store>> {
        self.local.as_ref().filter(|_| !self.waits.load(Ordering::Relaxed))
    }

    /// Calls the server without the GIL.
    fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        server: &Shared,
        work: impl FnOnce(&Shared) -> T + Send + 'static,
    ) -> PyResult<T> {
        let server = server.clone();
        call::run(py, self.local.is_none(), move || work(&server))
    }
}

fn shared(names: Vec<String>) -> Vec<Arc<str>> {
    names.into_iter().map(Arc::from).collect()
}

#[pymethods]
impl Client {
    /// A new store in this process.
    #[staticmethod]
    #[pyo3(signature = (threads, memory_limit, check_finite, shared=false, address=None))]
    fn store(
        py: Python<'_>,
        threads: Option<usize>,
        memory_limit: Option<u64>,
        check_finite: bool,
        shared: bool,
        address: Option<String>,
    ) -> PyResult<Self> {
        let memory = match address {
            Some(address) => StoreMemory::Opened(address),
            None if shared => StoreMemory::Shared,
            None => StoreMemory::Private,
        };
        let mut options = StoreOptions { threads, memory, ..StoreOptions::default() };
        options.memory_limit = memory_limit.unwrap_or(options.memory_limit);
        let store = Store::new(options).or_raise(py)?;
        Ok(Self::local(store, check_finite, Duration::from_secs(30)))
    }

    /// The default timeout of a call, in seconds.
    #[getter(timeout)]
    fn default_timeout(&self) -> f64 {
        self.timeout.as_secs_f64()
    }

    /// The address by which other processes open the store, if it is shared; also in a forked child.
    #[getter]
    fn address(&self) -> Option<String> {
        self.local.as_ref()?.address()
    }

    /// A view of the values of a tensor in a shared store.
    fn view(&self, py: Python<'_>, name: Name) -> PyResult<SharedView> {
        self.enter(py)?;
        let Some(store) = &self.local else {
            let whose = if self.server.what() == "store" { "past" } else { "a server's" };
            let why = format!("{whose} values cannot be viewed in place; use pull()");
            let error = Error::new(Kind::Config, why);
            return Err(errors::raise(py, &error.tensor(&*name)));
        };
        Ok(SharedView::new(store.live(&name).or_raise(py)?))
    }

    fn another(&self, py: Python<'_>, name: Option<Name>, timeout: Option<Seconds>) -> PyResult<Self> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, timeout)?);
        if let Some(store) = &self.local {
            return Ok(Self::local(store.sibling(), self.check_finite, timeout));
        }
        let name = name.map(|name| text::printable(&name));
        let other = move |server: &Shared| server.another_within(name.as_deref(), timeout);
        let other = self.call(py, server, other)?.or_raise(py)?;
        let title = self.title.clone();
        Ok(Self::of(Here::new(self.server.what(), other), None, title, self.check_finite, timeout))
    }

    /// Registers tensors with these values by name. `rules`: the optimizer of all of them, or a dict of
    /// optimizers by name.
    #[allow(clippy::too_many_arguments)]
    fn register(
        &self,
        py: Python<'_>,
        values: &Bound<'_, PyDict>,
        rules: &Bound<'_, PyAny>,
        apply: &str,
        group: &str,
        average: Option<&Bound<'_, PyAny>>,
        element: (Option<String>, Option<String>, Option<u64>),
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let server = self.enter(py)?;
        let (apply, average) = (read_apply(py, apply)?, average.map(read_average).transpose()?);
        let (dtype, rounding, seed) = element;
        let by_name = rules.cast::<PyDict>().ok();
        let one = if by_name.is_none() { Some(read_optimizer(rules)?) } else { None };
        let mut tensors = Vec::with_capacity(values.len());
        for (name, array) in values {
            let name = read_text(&name, "name")?;
            let initial = borrow_as_is(&array, name)?;
            let dtype = read_dtype(py, name, dtype.as_deref(), initial.dtype())?;
            // Values of bfloat16 become those of a float32 tensor.
            let initial =
                if initial.dtype() == dtype { initial } else { borrow(&array, name, Access::Read)? };
            let optimizer = match (&one, by_name) {
                (Some(one), _) => *one,
                (None, rules) => {
                    let rule = rules.and_then(|rules| rules.get_item(name).transpose()).transpose()?;
                    read_optimizer(&rule.unwrap_or_else(|| py.None().into_bound(py)))?
                }
            };
            let spec = TensorSpec {
                name: name.into(),
                shape: initial.shape().to_vec(),
                dtype,
                apply,
                group: group.into(),
                optimizer,
                average,
                rounding: read_rounding(py, name, dtype, (rounding.as_deref(), seed))?,
            };
            tensors.push((spec, initial));
        }
        let timeout = self.timeout(py, timeout)?;
        let work = move |server: &Shared| {
            let new = tensors
                .iter()
                .map(|(spec, initial)| NewTensor { spec: spec.clone(), values: initial.view() });
            server.register_all(new.collect(), timeout)
        };
        let done = self.call(py, server, work)?;
        sweep(py);
        done.or_raise(py)
    }

    fn unregister(&self, py: Python<'_>, name: Name, timeout: Option<Seconds>) -> PyResult<()> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, timeout)?);
        self.call(py, server, move |server| server.unregister(&name, timeout))?.or_raise(py)
    }

    /// Pushes one gradient of the tensor named `what`, a dict of gradients by name, or a bound list; and
    /// waits.
    fn push<'py>(
        &self,
        py: Python<'py>,
        what: &Bound<'py, PyAny>,
        grad: Option<&Bound<'py, PyAny>>,
        settings: &PushSettings,
    ) -> PyResult<Bound<'py, PyAny>> {
        let server = self.enter(py)?;
        if let (Ok(name), Some(grad)) = (what.cast::<PyString>(), grad) {
            let receipt = self.push_one(py, server, read_text(name, "name")?, grad, settings)?;
            return Ok(Bound::new(py, receipt)?.into_any());
        }
        let receipts = match Gradients::of(what)? {
            Gradients::Listed(list) => self.push_list(py, server, list, settings)?,
            Gradients::Bound(list) => self.push_bound(py, server, list, settings)?,
        };
        Ok(Bound::new(py, receipts)?.into_any())
    }

    /// Starts to push a dict of gradients by name, or a bound list. `tracked`: the next call raises an error
    /// that is not read. `every_slice`: slices without a row of a sparse gradient take part, too. `flight`: a
    /// new one, which the caller has noted already.
    #[pyo3(signature = (what, settings, tracked, every_slice=false, flight=None))]
    fn push_async<'py>(
        &self,
        py: Python<'py>,
        what: &Bound<'py, PyAny>,
        settings: &PushSettings,
        tracked: bool,
        every_slice: bool,
        flight: Option<Bound<'py, PushFlight>>,
    ) -> PyResult<Bound<'py, PushFlight>> {
        let server = self.enter(py)?;
        let flight = flight.map_or_else(|| Bound::new(py, PushFlight::default()), Ok)?;
        if flight.get().begun(py) {
            return Err(errors::config(
                py,
                "the push has begun already",
                "a new flight",
                "one that was used",
            ));
        }
        let (list, options, turn) = match Gradients::of(what)? {
            Gradients::Listed(list) => (List::borrow(list)?, self.options(py, settings)?, None),
            Gradients::Bound(list) => {
                let options = self.bound_options(py, list, settings)?;
                (list.list.clone(), options, Some(Turn::take(py, &list.busy)?))
            }
        };
        let ticket = Self::send_async(py, server, &list, PushOptions { every_slice, ..options })?;
        flight.get().start(ticket, list.names, turn, &self.unread, tracked);
        Ok(flight)
    }

    /// Pushes a dict of gradients by name, or a bound list, and pulls the same tensors.
    fn push_pull<'py>(
        &self,
        py: Python<'py>,
        what: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyDict>>,
        settings: &PushSettings,
    ) -> PyResult<PushPulled<'py>> {
        let server = self.enter(py)?;
        match Gradients::of(what)? {
            Gradients::Listed(list) => {
                let options = self.options(py, settings)?;
                self.send_pull(py, server, List::borrow_whole(list)?, options, out, None)
            }
            Gradients::Bound(list) => {
                let options = self.bound_options(py, list, settings)?;
                let turn = Turn::take(py, &list.busy)?;
                self.send_pull(py, server, list.list.clone(), options, out, Some(turn))
            }
        }
    }

    /// A worker's tensors and arrays, for `exchange`, with the codec of its gradients; None if they do not
    /// allow it.
    fn exchange_of(
        &self,
        py: Python<'_>,
        params: &Bound<'_, PyDict>,
        codec: Option<&Bound<'_, PyAny>>,
        feedback: Option<Py<ErrorFeedback>>,
    ) -> PyResult<Option<Exchange>> {
        let server = self.enter(py)?;
        let codec = codec.map(|codec| read_codec(Some(codec))).transpose()?;
        let (targets, place) = match &self.local {
            Some(store) => match exchange::in_process(py, store, params)? {
                Some(both) => both,
                None => return Ok(None),
            },
            None => self.over_servers(py, server, params)?,
        };
        Ok(Exchange::new(server, params, targets, place, codec, feedback))
    }

    /// Pushes gradients, of some tensors or of all, with rates by name if they differ, reports the step to
    /// `groups`, and pulls everything into the worker's arrays. Returns receipts, versions, a failure after the
    /// checks, and the groups where the step was reported but others are still behind, so that nothing was
    /// pulled; None if nothing was done, because something is wrong or unusual. `threads`: how many threads
    /// torch has, which then do the work; 0: the store's own do. `flight`: with servers it begins with the
    /// push; with a store, if a policy holds the push. If others are waited for and the push is not done soon,
    /// everything else is missing.
    #[allow(clippy::too_many_arguments)]
    fn exchange(
        &self,
        py: Python<'_>,
        list: &Exchange,
        gradients: &Bound<'_, PyDict>,
        rates: Option<&Bound<'_, PyDict>>,
        settings: &PushSettings,
        threads: u32,
        groups: Vec<String>,
        flight: Option<PyRef<'_, PushFlight>>,
    ) -> PyResult<Option<Outcome>> {
        if self.closed.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let server = self.enter(py)?;
        if !list.is_of(py, server)? {
            return Ok(None);
        }
        let options = list.options(py, self, settings)?;
        let together = Together { groups, flight: flight.as_deref(), unread: &self.unread };
        let Some(store) = &self.local else {
            let waits = self.waits.load(Ordering::Relaxed) || !together.groups.is_empty();
            return list.step_far(py, server, gradients, options, rates, &together, waits);
        };
        if self.waits.load(Ordering::Relaxed) && together.flight.is_none() {
            return Ok(None);
        }
        let team = Threads::of_torch(threads);
        list.step(py, (store, team.as_ref()), gradients, &options, rates, &together)
    }

    #[pyo3(signature = (name, out, view, timeout, codec=None))]
    fn pull<'py>(
        &self,
        py: Python<'py>,
        name: Name,
        out: Option<&Bound<'py, PyAny>>,
        view: &Bound<'py, PyAny>,
        timeout: Option<Seconds>,
        codec: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Versions)> {
        let reading = Reading::read(view, codec)?;
        let (server, end) = (self.enter(py)?, End::after(self.timeout(py, timeout)?));
        let names = vec![Arc::<str>::from(&*name)];
        let into = |specs: &[Arc<TensorSpec>]| {
            let spec = &specs[0];
            let (value, into) = match out {
                Some(out) => {
                    let arriving = |array| reading.arriving(spec, Some(array));
                    (out.clone(), target(py, spec, arriving, out)?)
                }
                None => empty(py, reading.arriving(spec, None), &spec.shape)?,
            };
            let options = reading.options(py, specs, std::iter::once(into.arriving()))?;
            Ok((value, into, options))
        };
        let (_, (value, into, options)) = self.specs_for(py, server, &names, end, into)?;
        let versions = pull_into(py, server, (&names[..], &options), Arc::new(vec![into]), end.left())?;
        Ok((value, versions))
    }

    #[pyo3(signature = (names, out, view, timeout, codec=None))]
    fn pull_list<'py>(
        &self,
        py: Python<'py>,
        names: Names,
        out: Option<&Bound<'py, PyDict>>,
        view: &Bound<'py, PyAny>,
        timeout: Option<Seconds>,
        codec: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyDict>, Versions)> {
        let reading = Reading::read(view, codec)?;
        let (server, end) = (self.enter(py)?, End::after(self.timeout(py, timeout)?));
        let names = names.0;
        let into = |specs: &[Arc<TensorSpec>]| reading.targets(py, specs, out);
        let (_, (values, targets, options)) = self.specs_for(py, server, &names, end, into)?;
        let versions = pull_into(py, server, (&names[..], &options), Arc::new(targets), end.left())?;
        Ok((values, versions))
    }

    /// `rows` are indices by name.
    fn pull_rows<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'py, PyDict>,
        out: Option<&Bound<'py, PyDict>>,
        timeout: Option<Seconds>,
    ) -> PyResult<(Bound<'py, PyDict>, Versions)> {
        let (server, end) = (self.enter(py)?, End::after(self.timeout(py, timeout)?));
        let mut wanted = Vec::with_capacity(rows.len());
        for (name, indices) in rows {
            let name = read_text(&name, "name")?;
            let indices = sparse::indices(&indices, name)?;
            wanted.push(Rows { name: name.into(), indices });
        }
        let names: Vec<_> = wanted.iter().map(|rows| rows.name.clone()).collect();
        // The rows pulled from a tensor form a tensor with as many rows.
        let shaped = |(spec, rows): (&Arc<TensorSpec>, &Rows)| {
            let mut spec = TensorSpec::clone(spec);
            spec.shape.first_mut().into_iter().for_each(|first| *first = rows.indices.len() as u64);
            Arc::new(spec)
        };
        let into = |specs: &[Arc<TensorSpec>]| {
            let shaped: Vec<_> = specs.iter().zip(&wanted).map(shaped).collect();
            targets(py, &shaped, |_, spec, _| spec.dtype, out)
        };
        let (_, (values, targets)) = self.specs_for(py, server, &names, end, into)?;
        let versions = pull_rows_into(py, server, &wanted, targets, end.left())?;
        Ok((values, versions))
    }

    /// `into`: the arrays that are to be filled, by name, if some are of bfloat16.
    fn pull_async(
        &self,
        py: Python<'_>,
        names: Names,
        into: Option<&Bound<'_, PyDict>>,
        timeout: Option<Seconds>,
    ) -> PyResult<PullFlight> {
        let (server, end) = (self.enter(py)?, End::after(self.timeout(py, timeout)?));
        let names = names.0;
        let options = |specs: &[Arc<TensorSpec>]| {
            if into.is_none() {
                return Ok(PullOptions::default());
            }
            let (_, targets, options) = Reading::default().targets(py, specs, into)?;
            for target in targets {
                target.release(py);
            }
            Ok(options)
        };
        let (specs, options) = self.specs_for(py, server, &names, end, options)?;
        let ticket = py.detach(|| server.pull_async_as(names, options.clone(), end.left())).or_raise(py)?;
        Ok(PullFlight::start(ticket, specs, options))
    }

    fn bind(
        &self,
        py: Python<'_>,
        list: &Bound<'_, PyDict>,
        codec: Option<&Bound<'_, PyAny>>,
        feedback: Option<&Bound<'_, PyAny>>,
        timeout: Option<Seconds>,
    ) -> PyResult<BoundList> {
        let (server, end) = (self.enter(py)?, End::after(self.timeout(py, timeout)?));
        let codec = codec.map(|codec| read_codec(Some(codec))).transpose()?;
        let feedback = feedback
            .map(|given| instance::<ErrorFeedback>(given, "feedback", "a fastps.ErrorFeedback or None"))
            .transpose()?;
        let list = List::borrow_whole(list)?;
        let gradients = &list.gradients;
        let tensors: Vec<_> = gradients.iter().map(|g| g.name.clone()).collect();
        let check = |specs: &[Arc<TensorSpec>]| {
            gradients.iter().zip(specs).try_for_each(|(gradient, spec)| {
                check_codec(spec, codec, feedback.is_some()).or_raise(py)?;
                check_shape(gradient.borrow(), spec).or_raise(py)
            })
        };
        let (specs, ()) = self.specs_for(py, server, &tensors, end, check)?;
        // Float32 loses nothing; the other codecs need a residual.
        let feedback = match feedback.map(|given| given.clone().unbind()) {
            None if !matches!(codec, None | Some(Codec::Float32)) => {
                Some(Py::new(py, ErrorFeedback::default())?)
            }
            given => given,
        };
        let server = Here::new("bound list", server.clone());
        let elements = specs.iter().map(|spec| spec.elements()).sum();
        let local =
            self.local.as_ref().map(|store| store.bind(gradients.clone())).transpose().or_raise(py)?;
        Ok(BoundList { server, list, elements, local, codec, feedback, busy: Arc::default() })
    }

    fn assign(
        &self,
        py: Python<'_>,
        name: Name,
        values: &Bound<'_, PyAny>,
        timeout: Option<Seconds>,
    ) -> PyResult<Receipt> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, timeout)?);
        let values = gradient(&name, values)?;
        let receipt = self.call(py, server, move |server| server.assign(&values, timeout))?;
        sweep(py);
        receipt.or_raise(py).map(|r| Receipt::from(&r))
    }

    fn state<'py>(
        &self,
        py: Python<'py>,
        name: Name,
        timeout: Option<Seconds>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let (server, end) = (self.enter(py)?, End::after(self.timeout(py, timeout)?));
        let work = move |server: &Shared| {
            Ok::<_, Error>((server.spec(&name, end.left())?, server.state(&name, end.left())?))
        };
        let (spec, state) = self.call(py, server, work)?.or_raise(py)?;
        let dict = PyDict::new(py);
        dict.set_item("step", state.steps)?;
        for (slot, values) in &state.slots {
            dict.set_item(slot, array(py, &spec.shape, values.view())?)?;
        }
        sweep(py);
        Ok(dict)
    }

    /// `steps` has one number, for all slices, or one for each; `slots` the arrays by name.
    fn load_state(
        &self,
        py: Python<'_>,
        name: Name,
        steps: Vec<u64>,
        slots: &Bound<'_, PyDict>,
        timeout: Option<Seconds>,
    ) -> PyResult<Receipt> {
        let (server, end) = (self.enter(py)?, End::after(self.timeout(py, timeout)?));
        let state = |specs: &[Arc<TensorSpec>]| read_state(py, &specs[0], &steps, slots);
        let (_, state) = self.specs_for(py, server, &[Arc::from(&*name)], end, state)?;
        let receipt = self.call(py, server, move |server| server.load_state(&name, &state, end.left()))?;
        sweep(py);
        receipt.or_raise(py).map(|r| Receipt::from(&r))
    }

    fn names(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Vec<String>> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, timeout)?);
        let names = self.call(py, server, move |server| server.names(timeout))?.or_raise(py)?;
        Ok(names.iter().map(ToString::to_string).collect())
    }

    /// ``(shape, dtype, apply, group, optimizer, average, rounding, seed)``.
    #[allow(clippy::type_complexity)]
    fn spec<'py>(&self, py: Python<'py>, name: Name, timeout: Option<Seconds>) -> PyResult<SpecFields<'py>> {
        let (server, end) = (self.enter(py)?, End::after(self.timeout(py, timeout)?));
        let spec = self.specs(py, server, &[Arc::from(&*name)], end)?.remove(0);
        let optimizer = optimizer_object(py, &spec.optimizer)?;
        let shape = PyTuple::new(py, &spec.shape)?;
        let average = spec.average.map(|average| average_object(py, average)).transpose()?;
        let (rounding, seed) = (spec.rounding.map(Rounding::name), spec.rounding.and_then(Rounding::seed));
        let (dtype, apply, group) = (spec.dtype.name(), apply_name(spec.apply), spec.group.to_string());
        Ok((shape, dtype, apply, group, optimizer, average, rounding, seed))
    }

    fn versions(&self, py: Python<'_>, names: Names, timeout: Option<Seconds>) -> PyResult<Versions> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, timeout)?);
        let names = names.0;
        let versions = self.call(py, server, move |server| server.versions(&names, timeout))?;
        Ok(Versions(Arc::new(versions.or_raise(py)?)))
    }

    /// Seconds since the last change of each tensor; None if it has not changed since the server's start.
    fn last_changes(
        &self,
        py: Python<'_>,
        names: Names,
        timeout: Option<Seconds>,
    ) -> PyResult<Vec<Option<f64>>> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, timeout)?);
        let names = names.0;
        let last = self.call(py, server, move |server| server.last_changes(&names, timeout))?.or_raise(py)?;
        Ok(last.into_iter().map(|ago| ago.map(|ago| ago.as_secs_f64())).collect())
    }

    /// Joins a group with a rank and a name; returns the number of its workers and the names of some.
    /// `presence`: whether it is idle, or else rouses the idle ones, and run and epoch of its portions.
    fn join(
        &self,
        py: Python<'_>,
        group: String,
        mode: &Bound<'_, PyAny>,
        seat: (Option<u32>, String),
        presence: Option<(bool, u64, u64)>,
        timeout: Option<Seconds>,
    ) -> PyResult<(u64, Vec<String>)> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, timeout)?);
        let mode = read_mode(mode)?;
        let presence = match presence {
            None => Presence::Active,
            Some((true, run, epoch)) => Presence::Idle(Epoch { run, epoch }),
            Some((false, run, epoch)) => Presence::Rouses(Epoch { run, epoch }),
        };
        let (rank, name) = seat;
        let seat = MembershipRequest { mode, rank, name: text::printable(&name), presence };
        let joined =
            self.call(py, server, move |server| server.join(&group, &seat, timeout))?.or_raise(py)?;
        self.waits.fetch_or(matches!(mode, Mode::Sync(_)), Ordering::Relaxed);
        Ok((joined.present, joined.workers))
    }

    fn leave(&self, py: Python<'_>, group: String, warm: bool, timeout: Option<Seconds>) -> PyResult<()> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, timeout)?);
        self.call(py, server, move |server| server.leave(&group, warm, timeout))?.or_raise(py)
    }

    /// Reports `steps` more steps, and waits for the turn of the next one. Returns the steps of the slowest
    /// worker, and whether this worker leads a warm start.
    fn advance(
        &self,
        py: Python<'_>,
        group: String,
        warm: bool,
        steps: u64,
        timeout: Option<Seconds>,
    ) -> PyResult<(u64, bool)> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, timeout)?);
        let server = server.clone();
        let may_wait = self.local.is_none() || !timeout.is_zero();
        let clocks =
            call::run(py, may_wait, move || server.advance(&group, warm, steps, timeout))?.or_raise(py)?;
        Ok((clocks.slowest, clocks.leads))
    }

    /// Listens while a gradient is computed at these versions of a tensor.
    fn listen(&self, py: Python<'_>, name: &str, at: &Bound<'_, Versions>) -> PyResult<Listener> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, None)?);
        let (name, at) = (Arc::from(name), at.get().0.clone());
        let listener = self.call(py, server, move |server| server.listen(&name, &at, timeout))?;
        listener.or_raise(py).map(Listener)
    }

    /// Makes the versions of a store whose grace is over at this time of a virtual clock, in seconds; from then
    /// on, no other clock does.
    fn end_graces(&self, py: Python<'_>, now: f64) -> PyResult<()> {
        self.enter(py)?;
        if let Some(store) = &self.local {
            py.detach(|| store.end_graces((now * 1e3) as u64));
        }
        Ok(())
    }

    /// Asks for a portion of samples. `samples`: name, n, size, seed; `at`: the run, epoch and finished
    /// portion that the worker knows. Returns run, epoch, unfinished portions, portion, and whether the epoch
    /// is over.
    #[allow(clippy::too_many_arguments)]
    fn portion(
        &self,
        py: Python<'_>,
        samples: (String, u64, u64, u64),
        worker: u64,
        at: (u64, u64, Option<u64>),
        then: &str,
        wait: f64,
        timeout: Option<Seconds>,
    ) -> PyResult<portion::Given> {
        let (server, timeout, wait) =
            (self.enter(py)?, self.timeout(py, timeout)?, call::duration(py, wait)?);
        let ask = portion::ask(py, samples, worker, at, then)?;
        // In process, too: threads wait for each other, and the main one must notice Ctrl-C.
        let server = server.clone();
        let answer = call::run(py, true, move || server.portion(&ask, wait, timeout))?;
        answer.or_raise(py).map(portion::given)
    }

    fn stats<'py>(&self, py: Python<'py>, timeout: Option<Seconds>) -> PyResult<Bound<'py, PyDict>> {
        let (server, timeout) = (self.enter(py)?, self.timeout(py, timeout)?);
        let stats = self.call(py, server, move |server| server.stats(timeout))?.or_raise(py)?;
        let counters = |list: &[(String, u64)]| {
            let dict = PyDict::new(py);
            list.iter().try_for_each(|(name, value)| dict.set_item(name, value)).map(|()| dict)
        };
        let shards = stats.shards.iter().map(|(address, list)| {
            let shard = PyDict::new(py);
            shard.set_item("address", address)?;
            shard.set_item("counters", counters(list)?)?;
            Ok(shard)
        });
        let result = PyDict::new(py);
        result.set_item("client", counters(&stats.client)?)?;
        result.set_item("shards", shards.collect::<PyResult<Vec<_>>>()?)?;
        let workers = stats.workers.iter().map(|state| report::worker_object(py, state));
        result.set_item("workers", workers.collect::<PyResult<Vec<_>>>()?)?;
        let groups = stats.groups.iter().map(|state| report::group_object(py, state));
        result.set_item("groups", groups.collect::<PyResult<Vec<_>>>()?)?;
        Ok(result)
    }

    /// Replaces the worker's report; `fields` are those of `WorkerReport` by name.
    fn report(&self, py: Python<'_>, fields: &Bound<'_, PyDict>) -> PyResult<()> {
        let report = report::read_report(fields)?;
        self.server.get(py)?.report(report).or_raise(py)
    }

    /// Names the present moment in the servers' logs.
    fn mark(&self, py: Python<'_>, name: String, timeout: Option<Seconds>) -> PyResult<()> {
        let (server, timeout) = (self.server.get(py)?, self.timeout(py, timeout)?);
        self.call(py, server, move |server| server.mark(&name, timeout))?.or_raise(py)
    }

    /// Waits for pushes in progress, at most the timeout, and ends the session; raises an unread error.
    fn close(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<()> {
        let (server, timeout) = (self.server.get(py)?, self.timeout(py, timeout)?);
        if self.closed.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let begin = std::time::Instant::now();
        while !self.unread.all_done() && begin.elapsed() < timeout {
            py.detach(|| std::thread::sleep(Duration::from_millis(1)));
            py.check_signals()?;
        }
        self.call(py, server, move |server| server.close(timeout.saturating_sub(begin.elapsed())))?;
        sweep(py);
        self.unread.raise_last(py)
    }

    #[getter]
    fn closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// What restarted servers lost: tensor, shard, own pushes, version seen, version now. After the first
    /// call, other calls no longer raise it.
    fn lost(&self, py: Python<'_>) -> PyResult<Vec<errors::LostFields>> {
        Ok(self.server.get(py)?.lost().iter().map(errors::lost_fields).collect())
    }

    /// The number of tensors that are known here, without asking a server.
    #[getter]
    fn known_tensors(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.server.get(py)?.known_tensors())
    }

    /// The address of each server and how it is reached.
    #[getter]
    fn transport(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        Ok(self.server.get(py)?.transport())
    }

    #[getter]
    fn check_finite(&self) -> bool {
        self.check_finite
    }

    /// This client's incarnation.
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.server.get(py)?.client())
    }
}
