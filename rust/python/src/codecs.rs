//! Encoding and decoding of slices, and the residuals of error feedback.

use crate::arguments::text;
use crate::arrays::buffer::{Access, Borrowed, array, borrow_float32, empty, sweep};
use crate::errors::{self, OrRaise, config};
use crate::settings::codec::read_codec;
use crate::settings::invalid;
use fastps_core::codec::{self, Position};
use fastps_core::dtype::{DType, View};
use fastps_core::error::{Error, Kind};
use fastps_core::finite;
use fastps_core::isa::Isa;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The body of one slice; see `fastps.codecs.Codec.encode`.
#[pyfunction]
pub(crate) fn encode<'py>(
    py: Python<'py>,
    codec: &Bound<'py, PyAny>,
    array: &Bound<'py, PyAny>,
    residual: Option<&Bound<'py, PyAny>>,
    first_element: u64,
    sequence: u64,
) -> PyResult<Bound<'py, PyBytes>> {
    let codec = read_codec(Some(codec))?;
    if !first_element.is_multiple_of(8) {
        return Err(config(py, "invalid first_element", "a multiple of 8", first_element));
    }
    let isa = Isa::get().or_raise(py)?;
    let values = borrow_float32(array, "array", Access::Read)?;
    let mut residual = residual.map(|r| borrow_float32(r, "residual", Access::Write)).transpose()?;
    if let Some(residual) = &residual {
        let (expected, got) = (values.len(), residual.len());
        if expected != got {
            let error = Error::new(Kind::Shape, "wrong length of the residual").tensor("residual");
            return Err(error.expected(format!("{expected} elements"), format!("{got} elements")))
                .or_raise(py);
        }
        if residual.overlaps(&values) {
            return Err(config(py, "the residual overlaps the array", "separate memory", "shared memory"));
        }
    }
    let body = py.detach(|| {
        finite::check(isa, values.f32s(), residual.as_ref().map(Borrowed::f32s))?;
        let mut body = Vec::new();
        let position = Position { first_element, sequence };
        codec.encode(isa, values.f32s(), residual.as_mut().map(Borrowed::f32s_mut), position, &mut body);
        Ok::<_, Error>(body)
    });
    drop((values, residual));
    sweep(py);
    Ok(PyBytes::new(py, &body.map_err(|e| e.tensor("array")).or_raise(py)?))
}

/// Bytes of a body; see `fastps.codecs.Codec.body_len`.
#[pyfunction]
pub(crate) fn body_len(codec: &Bound<'_, PyAny>, n: u32) -> PyResult<usize> {
    Ok(read_codec(Some(codec))?.id().body_len(n as usize))
}

/// The values of a body; see `fastps.codecs.Codec.decode`.
#[pyfunction]
pub(crate) fn decode<'py>(
    py: Python<'py>,
    codec: &Bound<'py, PyAny>,
    body: &Bound<'py, PyAny>,
    n: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let id = read_codec(Some(codec))?.id();
    let isa = Isa::get().or_raise(py)?;
    let body = match body.cast::<PyBytes>() {
        Ok(bytes) => bytes.clone(),
        Err(_) => match PyBuffer::<u8>::get(body) {
            Ok(buffer) => PyBytes::new(py, &buffer.to_vec(py)?),
            Err(_) => return Err(not_bytes(py, body)),
        },
    };
    let bytes = body.as_bytes();
    let valid = py.detach(|| {
        // Before memory is allocated: `n` may be anything, and only the body's length bounds it.
        if n > bytes.len().saturating_mul(8) {
            let expected = format!("at most {} elements", bytes.len().saturating_mul(8));
            return Err(Error::new(Kind::Frame, "the body is too short").expected(expected, n));
        }
        id.validate(isa, bytes, n)
    });
    valid.or_raise(py)?;
    let (array, mut values) = empty(py, DType::Float32, &[n as u64])?;
    py.detach(|| id.decode(isa, bytes, values.f32s_mut()));
    Ok(array)
}

fn not_bytes(py: Python<'_>, body: &Bound<'_, PyAny>) -> PyErr {
    let got = body.get_type().fully_qualified_name().map_or_else(|_| String::new(), |name| name.to_string());
    let error = Error::new(Kind::DType, "the body is not bytes");
    errors::raise(py, &error.expected("bytes, or a contiguous buffer of bytes", got))
}

/// What earlier encodings lost, per tensor: a `fastps.Worker` or a bound list adds it to the next gradient
/// (Seide et al. 2014; Karimireddy et al. 2019). Safe to use from several threads.
///
/// >>> feedback = fastps.ErrorFeedback()
/// >>> feedback.load_state_dict({"w": np.ones(3, np.float32)})
/// >>> feedback.state_dict()
/// {'w': array([1., 1., 1.], dtype=float32)}
#[pyclass(frozen, module = "fastps", name = "ErrorFeedback")]
#[derive(Debug, Default)]
pub(crate) struct ErrorFeedback(pub(crate) Arc<Mutex<codec::ErrorFeedback>>);

impl ErrorFeedback {
    pub(crate) fn lock(&self) -> MutexGuard<'_, codec::ErrorFeedback> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl ErrorFeedback {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// A copy of all residuals: tensor name to float32 array of shape ``(elements,)``.
    fn state_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let copies: Vec<(String, Vec<f32>)> =
            py.detach(|| self.lock().entries().map(|(n, r)| (n.to_owned(), r.to_vec())).collect());
        let state = PyDict::new(py);
        for (name, residual) in copies {
            state.set_item(name, array(py, &[residual.len() as u64], View::Float32(&residual))?)?;
        }
        sweep(py);
        Ok(state)
    }

    /// Replaces all residuals by copies of saved ones.
    ///
    /// Raises:
    ///     NonFiniteError: A value is NaN or infinite; nothing is changed.
    fn load_state_dict(&self, py: Python<'_>, state: &Bound<'_, PyAny>) -> PyResult<()> {
        let Ok(state) = state.cast::<PyDict>() else {
            return Err(invalid(state, "state", "a dict, as state_dict() gives it", ""));
        };
        let mut loaded = codec::ErrorFeedback::new();
        for (name, residual) in state {
            let name = text(&name, "name")?;
            let values = borrow_float32(&residual, name, Access::Read)?.f32s().to_vec();
            loaded.load(name, values).or_raise(py)?;
        }
        sweep(py);
        py.detach(|| *self.lock() = loaded);
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("<ErrorFeedback of {} tensors>", py.detach(|| self.lock().entries().count()))
    }
}
