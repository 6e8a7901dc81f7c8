//! Optimizer state, as Python has it.

use crate::arguments::text as read_text;
use crate::arrays::buffer::{Access, try_borrow};
use crate::errors;
use fastps_core::error::{Error, Kind};
use fastps_core::tensor::TensorSpec;
use fastps_core::text;
use fastps_core::verbs::{OptimizerState, Values};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A copy of a tensor's state: `steps` has one number, for all slices, or one for each; `slots` the arrays by
/// name.
pub(super) fn read_state(
    py: Python<'_>,
    spec: &TensorSpec,
    steps: &[u64],
    slots: &Bound<'_, PyDict>,
) -> PyResult<OptimizerState> {
    let refuse = |error: Error| errors::raise(py, &error.tensor(spec.name.clone()));
    let expected = spec.slots();
    let given = slots.keys();
    let given = given.iter().map(|slot| read_text(&slot, "name of a state").map(str::to_owned));
    let given = given.collect::<PyResult<Vec<_>>>()?;
    if given.len() != expected.len() || given.iter().any(|slot| !expected.contains(&&**slot)) {
        let error = Error::new(Kind::Config, "wrong state names").expected(
            format!("step, {}", text::names(expected.iter().copied())),
            format!("step, {}", text::names(given.iter().map(String::as_str))),
        );
        return Err(refuse(error));
    }
    let steps = match (steps, spec.slice_count()) {
        ([all], slices) => vec![*all; slices],
        (each, slices) if each.len() == slices => each.to_vec(),
        (each, slices) => {
            let expected = match slices {
                1 => "one number, as the tensor has one slice".to_owned(),
                slices => format!("one number for all slices, or {slices}, one for each"),
            };
            let error = Error::new(Kind::Config, "wrong number of steps in the state");
            return Err(refuse(error.expected(expected, each.len())));
        }
    };
    let mut state = OptimizerState { steps, slots: Vec::new() };
    for slot in expected {
        let Some(values) = slots.get_item(slot)? else { continue };
        let values = try_borrow(&values, Access::Read)?.map_err(|mut error| {
            error.message = format!("state {slot}: {}", error.message);
            refuse(error)
        })?;
        if values.shape() != spec.shape {
            let (expected, got) = (text::shape(&spec.shape), text::shape(values.shape()));
            let error = Error::new(Kind::Shape, format!("state {slot} has another shape"));
            return Err(refuse(error.expected(expected, got)));
        }
        state.slots.push((slot, values.view().to_array()));
    }
    Ok(state)
}
