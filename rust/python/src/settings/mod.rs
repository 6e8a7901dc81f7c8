//! Settings: from Python's frozen dataclasses and names to the core's values, and back.

pub(crate) mod codec;
pub(crate) mod group;
pub(crate) mod optimizer;
pub(crate) mod tensor;

use crate::errors::config;
use fastps_core::text::nearest;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyString, PyType};

/// What most settings are.
const NUMBER: &str = "a number";
/// What a switch is.
const FLAG: &str = "True or False";

/// The kind of a settings object; `known` are the names of the classes that `what` may be.
fn kind(object: &Bound<'_, PyAny>, what: &str, known: &[&str], example: &str) -> PyResult<String> {
    let kind = object.getattr(intern!(object.py(), "_kind")).and_then(|k| k.extract::<String>());
    match kind {
        Ok(kind) if !object.is_instance_of::<PyType>() => Ok(kind),
        _ => Err(not_settings(object, what, known, example)),
    }
}

/// The error of what is no settings object: a class that was not called, or its name.
fn not_settings(object: &Bound<'_, PyAny>, what: &str, known: &[&str], example: &str) -> PyErr {
    let error = || {
        let name = match object.cast::<PyType>() {
            Ok(class) => class.name()?.to_string(),
            Err(_) => object.extract::<String>().unwrap_or_default(),
        };
        let near = nearest(&name, known.iter().copied()).map(|near| format!("fastps.{near}()"));
        let expected = format!("an object such as {}", near.as_deref().unwrap_or(example));
        let got = match object.cast::<PyType>() {
            Ok(class) => format!("the class {}", class.fully_qualified_name()?),
            Err(_) if name.is_empty() => object.get_type().fully_qualified_name()?.to_string(),
            Err(_) => format!("the str {name:?}"),
        };
        PyResult::Ok(config(object.py(), &format!("invalid {what}"), &expected, got))
    };
    error().unwrap_or_else(|failed| failed)
}

fn field<'py, T>(object: &Bound<'py, PyAny>, name: &str, expected: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let value = object.getattr(name)?;
    let of = || object.get_type().name().map_or_else(|_| String::new(), |kind| format!(" of {kind}"));
    match value.extract::<T>() {
        Ok(read) if expected == FLAG || !is_flag(&value) => Ok(read),
        _ => Err(invalid(&value, name, expected, &of())),
    }
}

/// Whether it is a bool, which Python takes for a number, too.
fn is_flag(value: &Bound<'_, PyAny>) -> bool {
    !value.is_exact_instance_of::<PyFloat>() && value.extract::<bool>().is_ok()
}

/// A number, or `ConfigError`.
pub(crate) fn number<'py, T>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    match value.extract::<T>() {
        Ok(read) if !is_flag(value) => Ok(read),
        _ => Err(invalid(value, name, NUMBER, "")),
    }
}

/// The error of an argument. A text may look like what was expected, such as `"0.1"`.
pub(crate) fn invalid(value: &Bound<'_, PyAny>, name: &str, expected: &str, of: &str) -> PyErr {
    let error = || {
        let mut text = value.repr()?.to_string();
        if text.contains('\n') {
            text = format!("a {}", value.get_type().fully_qualified_name()?);
        }
        let is_text = value.is_instance_of::<PyString>() && expected == NUMBER;
        let (quotes, a) = if is_text { (" without quotes", "the str ") } else { ("", "") };
        let (expected, got) = (format!("{expected}{quotes}"), format!("{a}{text}"));
        PyResult::Ok(config(value.py(), &format!("invalid {name}{of}"), &expected, got))
    };
    error().unwrap_or_else(|failed| failed)
}
