//! Pushes: a list of gradients, lent for the call, kept for a flight, or bound.

use super::settings::PushSettings;
use super::waiting::{Filler, Turn, Waiting, reshaped, targets};
use super::{Client, Shared};
use crate::arguments::{instance, text};
use crate::arrays::buffer::{Access, Borrowed, borrow, glance, is_plain, sweep};
use crate::arrays::gradient::{gradient, is_array};
use crate::arrays::sparse::Sparse;
use crate::call::{self, End, Here};
use crate::codecs::ErrorFeedback;
use crate::errors::{self, OrRaise};
use crate::results::receipts::Receipt;
use crate::results::{Names, Receipts, Versions};
use fastps_core::codec::Codec;
use fastps_core::error::{Error, Kind};
use fastps_core::store::{Bound as Local, Store};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, GradientRef, PushOptions, Pushed, Ticket, Values};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Values by name, receipts, versions.
pub(super) type PushPulled<'py> = (Bound<'py, PyDict>, Receipts, Versions);

/// Gradients whose memory is looked up and pinned once, with their error feedback.
#[pyclass(frozen, module = "fastps._fastps", name = "BoundList")]
#[derive(Debug)]
pub(crate) struct BoundList {
    pub(super) server: Here<Shared>,
    pub(super) list: List,
    pub(super) elements: usize,
    /// Destination of the gradients in a store of this process.
    pub(super) local: Option<Local>,
    pub(super) codec: Option<Codec>,
    #[pyo3(get)]
    pub(super) feedback: Option<Py<ErrorFeedback>>,
    pub(super) busy: Arc<AtomicBool>,
}

impl Client {
    pub(super) fn options(&self, py: Python<'_>, settings: &PushSettings) -> PyResult<PushOptions> {
        if settings.codec == Some(Codec::OneBit) {
            let message = "OneBit needs error feedback; push through a Worker or a bound list";
            return Err(errors::raise(py, &Error::new(Kind::Config, message)));
        }
        settings.options(py, self, settings.codec, None)
    }

    pub(super) fn bound_options(
        &self,
        py: Python<'_>,
        list: &BoundList,
        settings: &PushSettings,
    ) -> PyResult<PushOptions> {
        if settings.codec.is_some() {
            let (expected, got) = ("codec= at bind()", "codec= at a push");
            return Err(errors::config(py, "a bound list has its own codec", expected, got));
        }
        if !Arc::ptr_eq(list.server.get(py)?, self.server.get(py)?) {
            let expected = "one made by this object's bind()";
            return Err(errors::config(py, "wrong bound list", expected, "one of another object"));
        }
        settings.options(py, self, list.codec, list.feedback.as_ref().map(Py::get))
    }

    /// Pushes one gradient and waits.
    pub(super) fn push_one(
        &self,
        py: Python<'_>,
        server: &Shared,
        name: &str,
        grad: &Bound<'_, PyAny>,
        settings: &PushSettings,
    ) -> PyResult<Receipt> {
        let options = self.options(py, settings)?;
        let done = if let Some(store) = self.at_once() {
            push_lent(py, store, &[name], std::slice::from_ref(grad), &options)?
        } else {
            let gradients = Arc::new(vec![gradient(name, grad)?]);
            let done = wait_for(py, server, &gradients, options, None)?;
            drop(gradients);
            sweep(py);
            done
        };
        let receipts = done.or_raise(py)?;
        receipts
            .first()
            .map(Receipt::from)
            .ok_or_else(|| errors::raise(py, &Error::new(Kind::Internal, "a push gave no receipt")))
    }

    /// Pushes a list and waits.
    pub(super) fn push_list(
        &self,
        py: Python<'_>,
        server: &Shared,
        list: &Bound<'_, PyDict>,
        settings: &PushSettings,
    ) -> PyResult<Receipts> {
        let options = self.options(py, settings)?;
        if let Some(store) = self.at_once() {
            return push_lent_list(py, store, list, &options);
        }
        send(py, server, List::borrow(list)?, options, None)
    }

    /// Pushes a bound list and waits.
    pub(super) fn push_bound(
        &self,
        py: Python<'_>,
        server: &Shared,
        list: &BoundList,
        settings: &PushSettings,
    ) -> PyResult<Receipts> {
        let options = self.bound_options(py, list, settings)?;
        let turn = Turn::take(py, &list.busy)?;
        if let (Some(store), Some(bound)) = (self.at_once(), &list.local) {
            let pushed = call::work(py, list.elements, || store.push_bound(bound, &options));
            drop(turn);
            return Ok(Receipts { names: list.list.names.clone(), receipts: pushed.or_raise(py)? });
        }
        send(py, server, list.list.clone(), options, Some(turn))
    }

    pub(super) fn send_async(
        py: Python<'_>,
        server: &Shared,
        list: &List,
        options: PushOptions,
    ) -> PyResult<Arc<dyn Ticket<Pushed>>> {
        let gradients = list.gradients.to_vec();
        py.detach(|| server.push_async(gradients, options)).or_raise(py)
    }

    pub(super) fn send_pull<'py>(
        &self,
        py: Python<'py>,
        server: &Shared,
        list: List,
        mut options: PushOptions,
        out: Option<&Bound<'py, PyDict>>,
        turn: Option<Turn>,
    ) -> PyResult<PushPulled<'py>> {
        let end = End::after(options.timeout);
        let List { names, gradients } = list;
        let tensors: Vec<Arc<str>> = gradients.iter().map(|g| g.name.clone()).collect();
        let into = |specs: &[Arc<TensorSpec>]| targets(py, specs, |_, spec, _| spec.dtype, out);
        let (_, (values, targets)) = self.specs_for(py, server, &tensors, end, into)?;
        let mut waiting = Waiting::new(py, Filler::new(Arc::new(targets)), turn)?;
        options.timeout = end.left();
        let result = py.detach(|| server.push_pull(&gradients, &options, &mut waiting));
        let complete = waiting.end()?;
        drop(gradients);
        sweep(py);
        let (receipts, versions) = result.or_raise(py)?;
        if !complete {
            return Err(reshaped(py));
        }
        Ok((values, Receipts { names, receipts }, Versions(Arc::new(versions))))
    }
}

/// Pushes and waits. After Ctrl-C the push completes in the background; a bound list is taken until then.
pub(super) fn wait_for(
    py: Python<'_>,
    server: &Shared,
    gradients: &Arc<Vec<Gradient>>,
    options: PushOptions,
    turn: Option<Turn>,
) -> PyResult<Pushed> {
    let mut waiting = Waiting::new(py, Filler::default(), turn)?;
    let pushed = py.detach(|| server.push_for(&mut waiting, gradients, &options));
    waiting.end()?;
    Ok(pushed)
}

/// Sends a list of gradients and waits.
pub(super) fn send(
    py: Python<'_>,
    server: &Shared,
    list: List,
    options: PushOptions,
    turn: Option<Turn>,
) -> PyResult<Receipts> {
    let pushed = wait_for(py, server, &list.gradients, options, turn)?;
    drop(list.gradients);
    sweep(py);
    Ok(Receipts { names: list.names, receipts: pushed.or_raise(py)? })
}

/// The gradients of a call: by name, or bound before.
pub(super) enum Gradients<'a, 'py> {
    Listed(&'a Bound<'py, PyDict>),
    Bound(&'a BoundList),
}

impl<'a, 'py> Gradients<'a, 'py> {
    pub(super) fn of(object: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(list) = object.cast::<PyDict>() {
            return Ok(Self::Listed(list));
        }
        let expected = "a mapping of names to arrays, or a bound list";
        Ok(Self::Bound(instance::<BoundList>(object, "name", expected)?.get()))
    }
}

/// Gradients of one push, with their memory borrowed.
#[derive(Clone, Debug)]
pub(super) struct List {
    pub(super) names: Names,
    pub(super) gradients: Arc<Vec<Gradient>>,
}

impl List {
    /// For a push, which may be sparse.
    pub(super) fn borrow(arrays: &Bound<'_, PyDict>) -> PyResult<Self> {
        let (mut names, mut gradients) = (Vec::with_capacity(arrays.len()), Vec::with_capacity(arrays.len()));
        for (name, array) in arrays {
            gradients.push(gradient(text(&name, "name")?, &array)?);
            names.push(name.cast_into::<PyString>()?.unbind());
        }
        Ok(Self { names: Arc::new(names), gradients: Arc::new(gradients) })
    }

    /// For calls that take only whole tensors.
    pub(super) fn borrow_whole(arrays: &Bound<'_, PyDict>) -> PyResult<Self> {
        for (name, array) in arrays {
            if array.is_instance_of::<Sparse>() {
                let error = Error::new(Kind::Config, "bind() and push_pull() take no sparse gradients");
                let error = error.tensor(name.str()?.to_str()?).expected("an array", "Sparse");
                return Err(errors::raise(arrays.py(), &error));
            }
        }
        Self::borrow(arrays)
    }
}

/// Pushes to a store of this process, which has used the arrays when it returns.
pub(super) fn push_lent(
    py: Python<'_>,
    store: &Store,
    names: &[&str],
    arrays: &[Bound<'_, PyAny>],
    options: &PushOptions,
) -> PyResult<Pushed> {
    if let Some(gradients) = glances(names, arrays) {
        return Ok(store.push_borrowed(&gradients, options));
    }
    if !arrays.iter().all(is_array) {
        let all = names.iter().zip(arrays);
        let gradients = all.map(|(name, array)| gradient(name, array)).collect::<PyResult<Vec<_>>>()?;
        let elements = gradients.iter().map(|gradient| gradient.values.view().len()).sum();
        let pushed = call::work(py, elements, || store.push(&gradients, options));
        drop(gradients);
        sweep(py);
        return Ok(pushed);
    }
    let all = names.iter().zip(arrays);
    let memories: Vec<_> =
        all.map(|(name, array)| borrow(array, name, Access::Read)).collect::<PyResult<_>>()?;
    let gradients: Vec<_> = names
        .iter()
        .zip(&memories)
        .map(|(name, memory)| GradientRef::whole(name, memory.shape(), memory.view()))
        .collect();
    let elements = memories.iter().map(Borrowed::len).sum();
    let pushed = call::work(py, elements, || store.push_borrowed(&gradients, options));
    for memory in memories {
        memory.release(py);
    }
    Ok(pushed)
}

/// [`push_lent`] for a dict of arrays.
pub(super) fn push_lent_list(
    py: Python<'_>,
    store: &Store,
    list: &Bound<'_, PyDict>,
    options: &PushOptions,
) -> PyResult<Receipts> {
    let (mut names, mut arrays) = (Vec::with_capacity(list.len()), Vec::with_capacity(list.len()));
    for (name, array) in list {
        names.push(name);
        arrays.push(array);
    }
    let texts = names.iter().map(|name| text(name, "name")).collect::<PyResult<Vec<_>>>()?;
    let receipts = push_lent(py, store, &texts, &arrays, options)?.or_raise(py)?;
    let names = names.into_iter().map(|name| Ok(name.cast_into::<PyString>()?.unbind()));
    Ok(Receipts { names: Arc::new(names.collect::<PyResult<_>>()?), receipts })
}

/// The gradients of a push that keeps the GIL, because it is brief, if a glance at their arrays is enough.
fn glances<'a>(names: &[&'a str], arrays: &'a [Bound<'_, PyAny>]) -> Option<Vec<GradientRef<'a>>> {
    if !arrays.iter().all(is_plain) {
        return None;
    }
    // From here on no Python code runs until the push is done.
    let mut left = call::brief(arrays.len());
    let mut gradients = Vec::with_capacity(arrays.len());
    for (name, array) in names.iter().zip(arrays) {
        let (shape, values) = glance(array)?;
        left = left.checked_sub(values.len())?;
        gradients.push(GradientRef::whole(name, shape, values));
    }
    Some(gradients)
}

#[pymethods]
impl BoundList {
    fn names(&self) -> Vec<&str> {
        self.list.gradients.iter().map(|g| &*g.name).collect()
    }
}
