//! A view of a shared store's values, given to Python through the buffer protocol.
//!
//! Threads and processes step the values while Python reads and writes them, at the caller's request. Rust
//! never makes a reference to them: the core accesses them lane by lane, with atomics.
#![allow(unsafe_code)]

use fastps_core::store::Live;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::ffi::c_int;

/// The memory of one tensor's values; it lives as long as any view of it.
#[pyclass(frozen, module = "fastps._fastps", name = "SharedView")]
#[derive(Debug)]
pub(crate) struct SharedView(Live);

impl SharedView {
    pub(crate) fn new(live: Live) -> Self {
        Self(live)
    }
}

#[pymethods]
impl SharedView {
    /// The tensor's shape.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.spec().shape)
    }

    /// NumPy's name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.spec().dtype.name()
    }

    /// # Safety
    /// Python calls this with a `view` to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let live = &slf.get().0;
        let bytes = live.spec().dtype.size() * live.spec().elements();
        let start = live.as_ptr().cast_mut().cast();
        // SAFETY: `view` is Python's; the memory is as long as said and lives as long as `slf`, which the
        // view keeps. It is shared and racing on purpose, and never exposed to Rust as values.
        let failed = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes as isize, 0, flags) };
        if failed == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
