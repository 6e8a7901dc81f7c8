//! Pushes: a list of gradients, lent for the call, kept for a flight, or bound.

use super::flight::PushFlight;
use super::waiting::{Filler, Turn, Waiting, reshaped, targets};
use super::{Client, Shared};
use crate::arrays::buffer::{Access, Borrowed, borrow, glance, is_plain, sweep};
use crate::arrays::sparse::Sparse;
use crate::call::{self, Here};
use crate::codecs::ErrorFeedback;
use crate::errors::{self, OrRaise};
use crate::results::{Names, Receipts, Versions};
use crate::settings::codec::read_codec;
use fastps_core::codec::Codec;
use fastps_core::correction::Correction;
use fastps_core::error::{Error, Kind};
use fastps_core::store::{Bound as Local, Store};
use fastps_core::verbs::{Gradient, GradientRef, ParameterServer, PushOptions, Pushed, Values};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Values by name, receipts, versions.
pub(super) type PushPulled<'py> = (Bound<'py, PyDict>, Receipts, Versions);

/// How a push is made: ``(codec, lr, scale, based_on, timeout, correction)``.
pub(super) type How<'py> = (
    Option<Bound<'py, PyAny>>,
    Option<f64>,
    Option<f32>,
    Option<Bound<'py, Versions>>,
    Option<f64>,
    Option<Staleness>,
);

/// What is to become of a stale gradient: ``(delay_adaptive, max_staleness, reject, momentum_matching)``.
type Staleness = (bool, Option<u64>, bool, bool);

/// Gradients whose memory is looked up and pinned once, with their error feedback.
#[pyclass(frozen, module = "fastps._fastps", name = "BoundList")]
#[derive(Debug)]
pub(crate) struct BoundList {
    pub(super) server: Here<Shared>,
    pub(super) list: List,
    pub(super) elements: usize,
    /// Where the gradients go in a store of this process.
    pub(super) local: Option<Local>,
    pub(super) codec: Codec,
    #[pyo3(get)]
    pub(super) feedback: Option<Py<ErrorFeedback>>,
    pub(super) busy: Arc<AtomicBool>,
}

impl Client {
    pub(super) fn options(
        &self,
        py: Python<'_>,
        how: &How<'_>,
        feedback: Option<&ErrorFeedback>,
    ) -> PyResult<PushOptions> {
        let (codec, lr, scale, based_on, timeout, correction) = how;
        let codec = read_codec(codec.as_ref())?;
        if codec == Codec::OneBit && feedback.is_none() {
            let error = Error::new(
                Kind::Config,
                "OneBit needs error feedback; push through a Worker or a bound list",
            );
            return Err(errors::raise(py, &error));
        }
        Ok(PushOptions {
            codec,
            lr: *lr,
            scale: *scale,
            based_on: based_on.as_ref().map(|v| v.get().0.clone()),
            correction: correction.map(|(delay_adaptive, max_staleness, reject, momentum_matching)| {
                Correction { delay_adaptive, max_staleness, reject, momentum_matching }
            }),
            feedback: feedback.map(|f| f.0.clone()),
            every_slice: false,
            check_finite: self.check_finite,
            timeout: self.timeout(py, *timeout)?,
        })
    }

    pub(super) fn bound_options(
        &self,
        py: Python<'_>,
        list: &BoundList,
        how: &How<'_>,
    ) -> PyResult<PushOptions> {
        if how.0.is_some() {
            return Err(errors::config(
                py,
                "a bound list has its codec",
                "codec= at bind()",
                "codec= at a push",
            ));
        }
        if !Arc::ptr_eq(list.server.get(py)?, self.server.get(py)?) {
            return Err(errors::config(
                py,
                "wrong bound list",
                "one made by this object's bind()",
                "one of another",
            ));
        }
        let feedback = list.feedback.as_ref().map(Py::get);
        let mut options = self.options(py, &(None, how.1, how.2, how.3.clone(), how.4, how.5), feedback)?;
        options.codec = list.codec;
        Ok(options)
    }

    pub(super) fn send_async(
        &self,
        py: Python<'_>,
        server: &Shared,
        list: &List,
        options: PushOptions,
        turn: Option<Turn>,
        tracked: bool,
    ) -> PyResult<PushFlight> {
        let gradients = list.gradients.to_vec();
        let ticket = py.detach(|| server.push_async(gradients, options)).or_raise(py)?;
        Ok(PushFlight::start(ticket, list.names.clone(), turn, &self.unread, tracked))
    }

    pub(super) fn send_pull<'py>(
        &self,
        py: Python<'py>,
        server: &Shared,
        list: List,
        options: PushOptions,
        out: Option<&Bound<'py, PyDict>>,
        turn: Option<Turn>,
    ) -> PyResult<PushPulled<'py>> {
        let List { names, gradients } = list;
        let tensors: Vec<Arc<str>> = gradients.iter().map(|g| g.name.clone()).collect();
        let specs = self.specs(py, server, &tensors, options.timeout)?;
        let (values, targets) = targets(py, &specs, out)?;
        let mut waiting = Waiting::new(py, Filler::new(targets), turn)?;
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

/// Pushes and waits. After Ctrl-C the push comes to its end by itself; a bound list is taken until then.
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

/// Gradients of one push, their memory looked at.
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
            let name = name.cast_into::<PyString>()?;
            gradients.push(pushed(name.to_str()?, &array)?);
            names.push(name.unbind());
        }
        Ok(Self { names: Arc::new(names), gradients: Arc::new(gradients) })
    }

    /// For what takes whole tensors alone.
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

/// Pushes to a store of this process, which is done with the arrays when it returns.
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
    if arrays.iter().any(Bound::is_instance_of::<Sparse>) {
        let all = names.iter().zip(arrays);
        let gradients = all.map(|(name, array)| pushed(name, array)).collect::<PyResult<Vec<_>>>()?;
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
        .map(|(name, memory)| GradientRef {
            name,
            shape: memory.shape(),
            values: memory.view(),
            indices: None,
        })
        .collect();
    let elements = memories.iter().map(Borrowed::len).sum();
    let pushed = call::work(py, elements, || store.push_borrowed(&gradients, options));
    for memory in memories {
        memory.release(py);
    }
    Ok(pushed)
}

/// The same of a dict of arrays.
pub(super) fn push_lent_list(
    py: Python<'_>,
    store: &Store,
    list: &Bound<'_, PyDict>,
    options: &PushOptions,
) -> PyResult<Receipts> {
    let (mut names, mut arrays) = (Vec::with_capacity(list.len()), Vec::with_capacity(list.len()));
    for (name, array) in list {
        names.push(name.cast_into::<PyString>()?.unbind());
        arrays.push(array);
    }
    let texts = names.iter().map(|name| name.bind(py).to_str()).collect::<PyResult<Vec<_>>>()?;
    let receipts = push_lent(py, store, &texts, &arrays, options)?.or_raise(py)?;
    Ok(Receipts { names: Arc::new(names), receipts })
}

/// The gradients of a push that keeps the GIL, because it will be over at once, if a glance at their arrays is enough.
fn glances<'a>(names: &[&'a str], arrays: &'a [Bound<'_, PyAny>]) -> Option<Vec<GradientRef<'a>>> {
    if !arrays.iter().all(is_plain) {
        return None;
    }
    // From here on no Python code runs until the push is done.
    let mut left = call::BRIEF;
    let mut gradients = Vec::with_capacity(arrays.len());
    for (name, array) in names.iter().zip(arrays) {
        let (shape, values) = glance(array)?;
        left = left.checked_sub(values.len())?;
        gradients.push(GradientRef { name, shape, values, indices: None });
    }
    Some(gradients)
}

/// A gradient of a push, whole or sparse, whose memory is kept.
pub(super) fn pushed(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Gradient> {
    let Ok(sparse) = array.cast::<Sparse>() else {
        return gradient(name, array);
    };
    let sparse = sparse.get().borrow(array.py(), name)?;
    Ok(Gradient { name: name.into(), shape: sparse.values.shape().to_vec(), values: Arc::new(sparse) })
}

/// A gradient whose memory is kept.
pub(super) fn gradient(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Gradient> {
    let values = borrow(array, name, Access::Read)?;
    Ok(Gradient { name: name.into(), shape: values.shape().to_vec(), values: Arc::new(values) })
}

#[pymethods]
impl BoundList {
    fn names(&self) -> Vec<&str> {
        self.list.gradients.iter().map(|g| &*g.name).collect()
    }
}
