//! Gradients that Python code has encoded.

use super::buffer::{BorrowedBytes, borrow_bytes};
use crate::settings::codec::read_codec;
use fastps_core::codec::{Bodies, CodecId};
use fastps_core::dtype::View;
use fastps_core::verbs::{Gradient, Values};
use pyo3::prelude::*;
use std::sync::Arc;

/// A gradient that is encoded already; see `fastps.torch.Encoded`.
#[pyclass(frozen, subclass, module = "fastps._fastps", name = "Encoded")]
#[derive(Debug)]
pub(crate) struct Encoded {
    codec: CodecId,
    body: Py<PyAny>,
    #[pyo3(get)]
    shape: Vec<u64>,
}

/// The bytes of a caller's array.
struct Lent {
    codec: CodecId,
    bytes: BorrowedBytes,
}

impl Values for Lent {
    fn view(&self) -> View<'_> {
        View::Float32(&[])
    }

    fn bodies(&self) -> Option<Bodies<'_>> {
        Some(Bodies { codec: self.codec, bytes: self.bytes.get() })
    }
}

#[pymethods]
impl Encoded {
    #[new]
    fn new(codec: &Bound<'_, PyAny>, body: Py<PyAny>, shape: Vec<u64>) -> PyResult<Self> {
        Ok(Self { codec: read_codec(Some(codec))?.id(), body, shape })
    }
}

impl Encoded {
    /// The gradient for a tensor, its bytes borrowed.
    pub(crate) fn borrow(&self, py: Python<'_>, tensor: &str) -> PyResult<Gradient> {
        let bytes = borrow_bytes(self.body.bind(py), tensor)?;
        let values = Arc::new(Lent { codec: self.codec, bytes });
        Ok(Gradient { name: tensor.into(), shape: self.shape.clone(), values })
    }
}
