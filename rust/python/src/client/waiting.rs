//! Resources of a call while its thread waits: arrays that a pull fills, and the turn of a bound list.

use crate::arrays::buffer::{Access, Borrowed, borrow, empty};
use crate::call;
use crate::errors::{self, OrRaise, raise};
use crate::settings::codec::read_codec;
use crate::settings::tensor::read_view;
use fastps_core::codec::Codec;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind};
use fastps_core::tensor::TensorSpec;
use fastps_core::text::shape;
use fastps_core::verbs::{self, PullOptions, PullView};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The right to push a bound list, which admits one push at a time.
#[derive(Debug)]
pub(crate) struct Turn(Arc<AtomicBool>);

impl Turn {
    pub(crate) fn take(py: Python<'_>, busy: &Arc<AtomicBool>) -> PyResult<Self> {
        if busy.swap(true, Ordering::Acquire) {
            let got = "a second one before the first was done";
            return Err(errors::config(py, "a bound list admits one push at a time", "one push", got));
        }
        Ok(Self(busy.clone()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The error for a tensor that was registered again with another shape while it was pulled.
pub(crate) fn reshaped(py: Python<'_>) -> PyErr {
    raise(
        py,
        &Error::new(
            Kind::Shape,
            "a tensor was registered anew, with another shape or dtype, during the call; call again",
        ),
    )
}

/// Arrays that a pull fills; tracks whether all of their bytes arrived.
#[derive(Default)]
pub(crate) struct Filler {
    targets: Arc<Vec<Borrowed>>,
    /// Bytes of each array that have not arrived yet.
    missing: Vec<usize>,
    misfit: bool,
}

impl Filler {
    pub(crate) fn new(targets: Arc<Vec<Borrowed>>) -> Self {
        let missing = targets.iter().map(Borrowed::bytes_to_fill).collect();
        Self { targets, missing, misfit: false }
    }

    fn is_full(&self) -> bool {
        !self.misfit && self.missing.iter().all(|missing| *missing == 0)
    }
}

/// A thread that waits for a push or a pull. If the main thread notices Ctrl-C, it leaves the call: nothing
/// more is written to its arrays, and the call ends on its own.
pub(crate) struct Waiting {
    filler: Filler,
    turn: Option<Turn>,
    is_main: bool,
    interrupt: Option<PyErr>,
}

impl Waiting {
    pub(crate) fn new(py: Python<'_>, filler: Filler, turn: Option<Turn>) -> PyResult<Self> {
        Ok(Self { filler, turn, is_main: call::is_main(py)?, interrupt: None })
    }

    /// Releases the arrays; returns whether they are filled.
    pub(crate) fn end(self) -> PyResult<bool> {
        self.interrupt.map_or(Ok(self.filler.is_full()), Err)
    }
}

impl verbs::Caller for Waiting {
    fn take(&mut self, k: usize, at: usize, bytes: &[u8]) {
        let filler = &mut self.filler;
        filler.misfit |= !filler.targets[k].write(at, bytes);
        filler.missing[k] = filler.missing[k].saturating_sub(bytes.len());
    }

    fn leaves(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        if !self.is_main {
            return None;
        }
        let checked = Python::attach(|py: Python<'_>| -> PyResult<()> { py.check_signals() });
        self.interrupt = Some(checked.err()?);
        let turn = self.turn.take();
        Some(Box::new(|| drop(turn)))
    }
}

/// What a pull reads of tensors.
#[derive(Clone, Copy, Default)]
pub(crate) struct Reading {
    view: PullView,
    /// Set if all of it arrives in bfloat16; else only what an array of bfloat16 gets.
    bfloat16: bool,
}

impl Reading {
    /// Reads the arguments of a pull.
    pub(crate) fn read(view: &Bound<'_, PyAny>, codec: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let codec = codec.map(|codec| read_codec(Some(codec))).transpose()?;
        if let Some(other) = codec.filter(|codec| *codec != Codec::BFloat16) {
            let got = format!("fastps.{}()", other.id().name());
            let expected = "fastps.BFloat16(), or None";
            return Err(errors::config(view.py(), "a pull has no such codec", expected, got));
        }
        Ok(Self { view: read_view(view)?, bfloat16: codec.is_some() })
    }

    /// The type in which a tensor arrives for an array of this type, or for a new one.
    pub(crate) fn arriving(self, spec: &TensorSpec, array: Option<DType>) -> DType {
        let own = self.view.dtype(spec);
        let narrow = self.bfloat16 || array == Some(DType::BFloat16);
        if narrow && own == DType::Float32 { DType::BFloat16 } else { own }
    }

    /// The options of a pull whose tensors arrive in these types; fails if a tensor has not what it reads.
    pub(crate) fn options(
        self,
        py: Python<'_>,
        specs: &[Arc<TensorSpec>],
        arriving: impl Iterator<Item = DType>,
    ) -> PyResult<PullOptions> {
        let Self { view, bfloat16 } = self;
        let narrow = |(spec, dtype): (&Arc<TensorSpec>, DType)| bfloat16 || dtype != view.dtype(spec);
        let options = PullOptions { view, bfloat16: specs.iter().zip(arriving).map(narrow).collect() };
        options.check(specs.iter().map(|spec| &**spec)).or_raise(py)?;
        Ok(options)
    }

    /// The targets of a pull of a list, and its options.
    pub(crate) fn targets<'py>(
        self,
        py: Python<'py>,
        specs: &[Arc<TensorSpec>],
        out: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<(Bound<'py, PyDict>, Vec<Borrowed>, PullOptions)> {
        let (values, targets) = targets(py, specs, |_, spec, array| self.arriving(spec, array), out)?;
        let options = self.options(py, specs, targets.iter().map(Borrowed::arriving))?;
        Ok((values, targets, options))
    }
}

/// The targets of a pull: the caller's arrays, or new ones. `arriving`: in which type the values of the k-th
/// tensor arrive for an array of some type, or for a new one.
pub(crate) fn targets<'py>(
    py: Python<'py>,
    specs: &[Arc<TensorSpec>],
    arriving: impl Fn(usize, &TensorSpec, Option<DType>) -> DType,
    out: Option<&Bound<'py, PyDict>>,
) -> PyResult<(Bound<'py, PyDict>, Vec<Borrowed>)> {
    let values = PyDict::new(py);
    let mut targets = Vec::with_capacity(specs.len());
    for (k, spec) in specs.iter().enumerate() {
        let (array, target) = match out {
            None => empty(py, arriving(k, spec, None), &spec.shape)?,
            Some(out) => {
                let given = out.get_item(&*spec.name)?.ok_or_else(|| {
                    let error =
                        Error::new(Kind::Config, "out= has no array for a tensor").tensor(spec.name.clone());
                    raise(py, &error.expected("an array for every name", format!("{} arrays", out.len())))
                })?;
                let target = target(py, spec, |array| arriving(k, spec, Some(array)), &given)?;
                (given, target)
            }
        };
        values.set_item(&*spec.name, array)?;
        targets.push(target);
    }
    Ok((values, targets))
}

/// The caller's array as a target.
pub(crate) fn target(
    py: Python<'_>,
    spec: &TensorSpec,
    arriving: impl Fn(DType) -> DType,
    array: &Bound<'_, PyAny>,
) -> PyResult<Borrowed> {
    let target = borrow(array, &spec.name, Access::Write)?;
    let given = target.dtype();
    let arriving = arriving(given);
    let Some(target) = target.for_values_of(arriving) else {
        let expected = if arriving == DType::Float64 { arriving.name() } else { "float32 or bfloat16" };
        let error = Error::new(Kind::DType, "wrong dtype of the array in out=").tensor(spec.name.clone());
        return Err(raise(py, &error.expected(expected, given.name())));
    };
    if target.shape() == spec.shape {
        return Ok(target);
    }
    let error = Error::new(Kind::Shape, "wrong shape of the array in out=").tensor(spec.name.clone());
    Err(raise(py, &error.expected(shape(&spec.shape), shape(target.shape()))))
}
