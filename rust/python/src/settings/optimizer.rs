//! Optimizers: the frozen dataclasses of `fastps.optim`, to the core and back.

use super::{FLAG, NUMBER, field, kind};
use crate::errors::{OrRaise, config};
use fastps_core::optim::{EpsMode, Optimizer, Setting, Value};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Reads an optimizer.
pub(crate) fn read_optimizer(object: &Bound<'_, PyAny>) -> PyResult<Optimizer> {
    let py = object.py();
    let known = Optimizer::all();
    let known = known.each_ref().map(Optimizer::title);
    let name = kind(object, "optimizer", &known, "fastps.Adam(lr=0.001)")?;
    let Some(mut optimizer) = Optimizer::by_name(&name) else {
        return Err(config(
            py,
            "invalid optimizer",
            "an object such as fastps.Adam(lr=0.001)",
            object.repr()?,
        ));
    };
    for setting in optimizer.settings() {
        read_setting(object, setting)?;
    }
    optimizer.validate().or_raise(py)?;
    Ok(optimizer)
}

fn read_setting(object: &Bound<'_, PyAny>, setting: Setting<'_>) -> PyResult<()> {
    let betas = || field::<(f64, f64)>(object, "betas", "two numbers");
    match (setting.name, setting.value) {
        ("beta1", Value::Number(place)) => *place = betas()?.0,
        ("beta2", Value::Number(place)) => *place = betas()?.1,
        (name, Value::Number(place)) => *place = field(object, name, NUMBER)?,
        (name, Value::Flag(place)) => *place = field(object, name, FLAG)?,
        (name, Value::EpsMode(place)) => {
            let mode = field::<String>(object, name, "a string")?;
            *place = EpsMode::by_name(&mode).ok_or_else(|| {
                let expected = "\"outside\", \"inside\" or \"both\"";
                config(object.py(), "invalid eps_mode", expected, format!("{mode:?}"))
            })?;
        }
    }
    Ok(())
}

/// The dataclass of an optimizer.
pub(crate) fn optimizer_object<'py>(py: Python<'py>, optimizer: &Optimizer) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    let mut beta1 = 0.0;
    for setting in { *optimizer }.settings() {
        match (setting.name, setting.value) {
            ("beta1", Value::Number(value)) => beta1 = *value,
            ("beta2", Value::Number(value)) => fields.set_item("betas", (beta1, *value))?,
            (name, Value::Number(value)) => fields.set_item(name, *value)?,
            (name, Value::Flag(value)) => fields.set_item(name, *value)?,
            (name, Value::EpsMode(mode)) => fields.set_item(name, mode.name())?,
        }
    }
    py.import("fastps.optim")?.getattr(optimizer.title())?.call((), Some(&fields))
}

/// Raises `ConfigError` unless the settings are valid.
#[pyfunction]
pub(crate) fn check_optimizer(optimizer: &Bound<'_, PyAny>) -> PyResult<()> {
    read_optimizer(optimizer).map(drop)
}
