//! Settings: from Python's frozen dataclasses and names to the core's values, and back.

pub(crate) mod codec;
pub(crate) mod group;
pub(crate) mod optimizer;
pub(crate) mod tensor;

use crate::errors::config;
use pyo3::intern;
use pyo3::prelude::*;

fn kind(object: &Bound<'_, PyAny>, what: &str, example: &str) -> PyResult<String> {
    let py = object.py();
    match object.getattr(intern!(py, "_kind")).and_then(|k| k.extract::<String>()) {
        Ok(kind) if !object.is_instance_of::<pyo3::types::PyType>() => Ok(kind),
        Ok(_) => {
            Err(config(py, &format!("invalid {what}"), &format!("an object such as {example}"), "a class"))
        }
        Err(_) => Err(config(
            py,
            &format!("invalid {what}"),
            &format!("an object such as {example}"),
            object.get_type().name()?,
        )),
    }
}

fn field<'py, T>(object: &Bound<'py, PyAny>, name: &str, expected: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let value = object.getattr(name)?;
    value.extract::<T>().map_err(|_| match value.repr() {
        Ok(text) => config(object.py(), &format!("invalid {name}"), expected, text),
        Err(error) => error,
    })
}
