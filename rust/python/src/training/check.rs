//! Checks of gradients that wait for a push, by the code that checks the push.

use crate::arrays::buffer::sweep;
use crate::arrays::gradient::gradient as read_gradient;
use crate::errors::OrRaise;
use fastps_core::error::Error;
use fastps_core::isa::Isa;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::outgoing::{check_finite, check_form};
use fastps_core::sparse::check_indices;
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::PushOptions;
use pyo3::prelude::*;
use std::time::Duration;

/// A float32 tensor that gradients are compared with; its other settings allow every gradient.
pub(super) fn spec_of(name: &str, shape: &[u64]) -> TensorSpec {
    TensorSpec::new(name, shape.to_vec(), Optimizer::Sgd(Sgd::default()))
}

/// Raises the error that an uncompressed push of a gradient to a tensor of this shape would raise.
#[pyfunction]
#[pyo3(signature = (name, gradient, shape, finite))]
pub(crate) fn check_gradient(
    py: Python<'_>,
    name: &str,
    gradient: &Bound<'_, PyAny>,
    shape: Vec<u64>,
    finite: bool,
) -> PyResult<()> {
    let spec = spec_of(name, &shape);
    let gradient = read_gradient(name, gradient)?;
    let isa = Isa::get().or_raise(py)?;
    let options = PushOptions {
        codec: None,
        lr: None,
        scale: None,
        weight: None,
        based_on: None,
        correction: None,
        note: None,
        feedback: None,
        every_slice: false,
        check_finite: finite,
        timeout: Duration::ZERO,
    };
    let checked = py.detach(|| {
        let given = gradient.borrow();
        check_form(std::iter::once((given, &spec)), &options, false)?;
        given.indices.map(|indices| check_indices(&spec, indices)).transpose()?;
        check_finite(isa, std::iter::once(given), &options, None)?;
        Ok::<_, Error>(())
    });
    drop(gradient);
    sweep(py);
    checked.or_raise(py)
}
