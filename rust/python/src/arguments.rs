//! Arguments of users: each kind is read here, once, or refused with `ConfigError`.

use crate::settings::invalid;
use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::ops::Deref;
use std::sync::Arc;

/// The argument `name` of a call: that of a tensor, a group or a client.
#[derive(Debug)]
pub(crate) struct Name(String);

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Name {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        text(&given, "name").map(|name| Self(name.to_owned()))
    }
}

/// The argument `names` of a call: a list.
#[derive(Debug)]
pub(crate) struct Names(pub(crate) Vec<Arc<str>>);

impl<'a, 'py> FromPyObject<'a, 'py> for Names {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        given.try_iter()?.map(|name| text(&name?, "name").map(Arc::from)).collect::<PyResult<_>>().map(Self)
    }
}

/// A text that UTF-8 can express.
pub(crate) fn text<'a>(given: &'a Bound<'_, PyAny>, name: &str) -> PyResult<&'a str> {
    let given_text = given.cast::<PyString>().map_err(|_| invalid(given, name, "a str", ""))?;
    given_text.to_str().map_err(|_| invalid(given, name, "a str without surrogates", ""))
}

/// An object of a class of this module.
pub(crate) fn instance<'a, 'py, T: PyClass>(
    given: &'a Bound<'py, PyAny>,
    name: &str,
    expected: &str,
) -> PyResult<&'a Bound<'py, T>> {
    given.cast::<T>().map_err(|_| invalid(given, name, expected, ""))
}
