//! Settings of a tensor beside its optimizer, and what a pull reads of it.

use super::{NUMBER, field, invalid, kind};
use crate::errors::{OrRaise, config, raise};
use fastps_core::dtype::DType;
use fastps_core::ema::Ema;
use fastps_core::error::{Error, Kind};
use fastps_core::rounding::Rounding;
use fastps_core::tensor::Apply;
use fastps_core::verbs::PullView;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

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

/// Reads the average that a tensor keeps.
pub(crate) fn read_average(object: &Bound<'_, PyAny>) -> PyResult<Ema> {
    kind(object, "average", &["EMA"], "fastps.EMA(decay=0.999)")?;
    let whole = "a whole number >= 0";
    let average = Ema {
        decay: field(object, "decay", NUMBER)?,
        every: field(object, "every", whole)?,
        start: field(object, "start", whole)?,
    };
    average.validate().or_raise(object.py())?;
    Ok(average)
}

/// The dataclass of an average.
pub(crate) fn average_object(py: Python<'_>, average: Ema) -> PyResult<Bound<'_, PyAny>> {
    let Ema { decay, every, start } = average;
    let fields = PyDict::new(py);
    fields.set_item("decay", decay)?;
    fields.set_item("every", every)?;
    fields.set_item("start", start)?;
    py.import("fastps.optim")?.getattr("EMA")?.call((), Some(&fields))
}

/// Raises `ConfigError` unless the settings of an average are valid.
#[pyfunction]
pub(crate) fn check_average(average: &Bound<'_, PyAny>) -> PyResult<()> {
    read_average(average).map(drop)
}

/// The type of a tensor: as asked for, else that of its initial values.
pub(crate) fn read_dtype(py: Python<'_>, tensor: &str, name: Option<&str>, given: DType) -> PyResult<DType> {
    let refuse = |message: &str, expected: &str, got: &str| {
        Err(raise(py, &Error::new(Kind::DType, message).tensor(tensor).expected(expected, got)))
    };
    let all = [DType::Float32, DType::Float64, DType::BFloat16];
    let dtype = match name {
        None => given,
        Some("float16") => {
            let why = "a float16 tensor would overflow above 65504 and lose small updates; bfloat16 has the range of float32";
            return refuse(why, "\"float32\", \"float64\" or \"bfloat16\"", "\"float16\"");
        }
        Some(name) => match all.into_iter().find(|dtype| dtype.name() == name) {
            Some(dtype) => dtype,
            None => {
                return refuse(
                    "unknown dtype",
                    "\"float32\", \"float64\" or \"bfloat16\"",
                    &format!("{name:?}"),
                );
            }
        },
    };
    if dtype.computed() == given.computed() {
        return Ok(dtype);
    }
    let why = "the values have another type than the tensor; convert them";
    refuse(why, dtype.computed().name(), given.name())
}

/// How the steps of a tensor round: stochastically, unless another way is asked for.
pub(crate) fn read_rounding(
    py: Python<'_>,
    tensor: &str,
    dtype: DType,
    (rounding, seed): (Option<&str>, Option<u64>),
) -> PyResult<Option<Rounding>> {
    if dtype != DType::BFloat16 && rounding.is_none() && seed.is_none() {
        return Ok(None);
    }
    Rounding::parse(rounding.unwrap_or("stochastic"), seed, tensor).or_raise(py).map(Some)
}

/// Reads what a pull reads of a tensor.
pub(crate) fn read_view(given: &Bound<'_, PyAny>) -> PyResult<PullView> {
    match given.cast::<PyString>().map(|name| name.to_str()) {
        Ok(Ok("values")) => Ok(PullView::Values),
        Ok(Ok("average")) => Ok(PullView::Average),
        _ => Err(invalid(given, "view", "'values' or 'average'", "")),
    }
}
