//! Application of pushes to a tensor, by name.

use crate::errors::config;
use fastps_core::tensor::Apply;
use pyo3::prelude::*;

/// Reads the way in which concurrent pushes are applied.
pub(crate) fn read_apply(py: Python<'_>, name: &str) -> PyResult<Apply> {
    match name {
        "exact" => Ok(Apply::Exact),
        "hogwild" => Ok(Apply::Hogwild),
        other => Err(config(py, "invalid apply", "\"exact\" or \"hogwild\"", format!("{other:?}"))),
    }
}

/// The name of the way in which concurrent pushes are applied.
pub(crate) fn apply_name(apply: Apply) -> &'static str {
    match apply {
        Apply::Exact => "exact",
        Apply::Hogwild => "hogwild",
    }
}
