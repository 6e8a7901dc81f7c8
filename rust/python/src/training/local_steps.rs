//! A worker's local step, for all its tensors in one call: `acc <- acc + g`, `W <- fma(-lr, g, W)`.

use crate::arrays::buffer::{Access, Borrowed, borrow, sweep};
use crate::errors::{self, OrRaise};
use fastps_core::block::blocks;
use fastps_core::error::{Error, Kind};
use fastps_core::finite;
use fastps_core::isa::{Isa, Kernel};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Mutex, TryLockError};

/// A worker's parameters, pinned once.
#[pyclass(frozen, module = "fastps._fastps", name = "LocalSteps")]
#[derive(Debug)]
pub(crate) struct LocalSteps {
    tensors: Mutex<Vec<(String, Borrowed)>>,
    isa: Isa,
}

struct Step<'a> {
    params: &'a mut [f32],
    sum: &'a mut [f32],
    gradient: &'a [f32],
    neg_lr: f32,
    first: bool,
}

impl Kernel for Step<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (at, len) in blocks(self.gradient.len()) {
            let g = &self.gradient[at..at + len];
            self.params[at..at + len].iter_mut().zip(g).for_each(|(p, g)| *p = self.neg_lr.mul_add(*g, *p));
            let sum = &mut self.sum[at..at + len];
            if self.first {
                sum.copy_from_slice(g);
            } else {
                sum.iter_mut().zip(g).for_each(|(s, g)| *s += *g);
            }
        }
    }
}

#[pymethods]
impl LocalSteps {
    #[new]
    fn new(py: Python<'_>, params: &Bound<'_, PyDict>) -> PyResult<Self> {
        let mut tensors = Vec::with_capacity(params.len());
        for (name, array) in params {
            let name: String = name.extract()?;
            let memory = borrow(&array, &name, Access::Write)?;
            tensors.push((name, memory));
        }
        Ok(Self { tensors: Mutex::new(tensors), isa: Isa::get().or_raise(py)? })
    }

    /// One step: checks everything, then changes the parameters and the arrays of `sums` (name to array of the
    /// parameter's size). `first`: the sums begin with this gradient.
    fn step(
        &self,
        py: Python<'_>,
        gradients: &Bound<'_, PyDict>,
        sums: &Bound<'_, PyDict>,
        lr: f64,
        first: bool,
        check_finite: bool,
    ) -> PyResult<()> {
        // Never waits: whoever holds it may be waiting for the GIL.
        let mut tensors = match self.tensors.try_lock() {
            Ok(tensors) => tensors,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(errors::config(
                    py,
                    "a worker takes one step at a time",
                    "one thread",
                    "another one",
                ));
            }
        };
        let mut work = Vec::with_capacity(tensors.len());
        let missing = |name: &str, expected: usize, got: usize| {
            let error =
                Error::new(Kind::Config, "a step takes a gradient of every parameter and of nothing else");
            errors::raise(py, &error.tensor(name).expected(format!("{expected} gradients"), format!("{got}")))
        };
        for (name, params) in &mut *tensors {
            let gradient = gradients
                .get_item(&*name)?
                .ok_or_else(|| missing(name, gradients.len() + 1, gradients.len()))?;
            let sum = sums.get_item(&*name)?.ok_or_else(|| missing(name, 1, 0))?;
            let gradient = borrow(&gradient, name, Access::Read)?;
            let sum = borrow(&sum, name, Access::Write)?;
            if gradient.shape() != params.shape() || sum.shape() != params.shape() {
                let error = Error::new(Kind::Shape, "the gradient has another shape").tensor(&**name);
                let error =
                    error.expected(format!("{:?}", params.shape()), format!("{:?}", gradient.shape()));
                return Err(errors::raise(py, &error));
            }
            if gradient.overlaps(params) || gradient.overlaps(&sum) || sum.overlaps(params) {
                let error =
                    Error::new(Kind::Config, "the gradient lies in the worker's own memory").tensor(&**name);
                return Err(errors::raise(py, &error));
            }
            work.push((name, params, sum, gradient));
        }
        if gradients.len() != work.len() {
            let known = |name: &str| work.iter().any(|(n, ..)| **n == name);
            let names: Vec<String> = gradients.keys().extract()?;
            let other = names.into_iter().find(|n| !known(n)).unwrap_or_default();
            return Err(missing(&other, work.len(), gradients.len()));
        }
        let (isa, neg_lr) = (self.isa, -lr as f32);
        let checked = py.detach(|| {
            if check_finite {
                for (name, _, _, gradient) in &work {
                    finite::check(isa, gradient.f32s(), None).map_err(|e| e.tensor(&***name))?;
                }
            }
            for (_, params, sum, gradient) in &mut work {
                let (params, sum) = (params.f32s_mut(), sum.f32s_mut());
                isa.run(Step { params, sum, gradient: gradient.f32s(), neg_lr, first });
            }
            Ok::<_, Error>(())
        });
        drop(work);
        sweep(py);
        checked.or_raise(py)
    }
}
