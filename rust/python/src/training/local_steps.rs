//! A worker's local steps, for all its tensors in one call; the arithmetic is the core's.

use super::check::spec_of;
use crate::arrays::buffer::{Access, Borrowed, borrow, borrow_float32, sweep};
use crate::errors::{self, OrRaise};
use fastps_core::error::{Error, Kind};
use fastps_core::finite;
use fastps_core::isa::Isa;
use fastps_core::local_step::local_step;
use fastps_core::outgoing::check_shape;
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::{GradientRef, Values};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Mutex, TryLockError};

/// A worker's parameters, pinned once.
#[pyclass(frozen, module = "fastps._fastps", name = "LocalSteps")]
#[derive(Debug)]
pub(crate) struct LocalSteps {
    tensors: Mutex<Vec<(TensorSpec, Borrowed)>>,
    isa: Isa,
}

#[pymethods]
impl LocalSteps {
    #[new]
    fn new(py: Python<'_>, params: &Bound<'_, PyDict>) -> PyResult<Self> {
        let mut tensors = Vec::with_capacity(params.len());
        for (name, array) in params {
            let name: String = name.extract()?;
            let memory = borrow_float32(&array, &name, Access::Write)?;
            tensors.push((spec_of(&name, memory.shape()), memory));
        }
        Ok(Self { tensors: Mutex::new(tensors), isa: Isa::get().or_raise(py)? })
    }

    /// One step: checks everything, then changes the parameters and the arrays of `sums` (name to array of
    /// the parameter's size). `first`: the sums begin with this gradient.
    fn step(
        &self,
        py: Python<'_>,
        gradients: &Bound<'_, PyDict>,
        sums: &Bound<'_, PyDict>,
        lr: f64,
        first: bool,
        check_finite: bool,
    ) -> PyResult<()> {
        // Never waits: the thread that holds the lock may be waiting for the GIL.
        let mut tensors = match self.tensors.try_lock() {
            Ok(tensors) => tensors,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let message = "a worker takes one step at a time";
                return Err(errors::config(py, message, "one thread", "another one"));
            }
        };
        let mut work = Vec::with_capacity(tensors.len());
        let missing = |name: &str, expected: usize, got: usize| {
            let error = Error::new(
                Kind::Config,
                "a local step needs a gradient of every parameter and of no other tensor",
            );
            errors::raise(py, &error.tensor(name).expected(format!("{expected} gradients"), format!("{got}")))
        };
        for (spec, params) in &mut *tensors {
            let (spec, name) = (&*spec, &*spec.name);
            let gradient = gradients
                .get_item(name)?
                .ok_or_else(|| missing(name, gradients.len() + 1, gradients.len()))?;
            let sum = sums.get_item(name)?.ok_or_else(|| missing(name, 1, 0))?;
            let gradient = borrow(&gradient, name, Access::Read)?;
            let sum = borrow(&sum, name, Access::Write)?;
            for values in [&gradient, &sum] {
                let (shape, values) = (values.shape(), values.view());
                check_shape(GradientRef::whole(name, shape, values), spec).or_raise(py)?;
            }
            if gradient.overlaps(params) || gradient.overlaps(&sum) || sum.overlaps(params) {
                let error = Error::new(Kind::Config, "the gradient shares memory with the worker's arrays");
                return Err(errors::raise(py, &error.tensor(name)));
            }
            work.push((name, params, sum, gradient));
        }
        if gradients.len() != work.len() {
            let known = |name: &str| work.iter().any(|(n, ..)| *n == name);
            let names: Vec<String> = gradients.keys().extract()?;
            let other = names.into_iter().find(|n| !known(n)).unwrap_or_default();
            return Err(missing(&other, work.len(), gradients.len()));
        }
        let isa = self.isa;
        let checked = py.detach(|| {
            if check_finite {
                for (name, _, _, gradient) in &work {
                    finite::check(isa, gradient.f32s(), None).map_err(|e| e.tensor(*name))?;
                }
            }
            for (_, params, sum, gradient) in &mut work {
                let (params, sum) = (params.f32s_mut(), sum.f32s_mut());
                local_step(isa, params, sum, gradient.f32s(), lr, first);
            }
            Ok::<_, Error>(())
        });
        drop(work);
        sweep(py);
        checked.or_raise(py)
    }
}
