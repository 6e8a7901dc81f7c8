//! Values of a shared store where they lie, given to Python through the buffer protocol.
//!
//! Threads and processes step them meanwhile, and Python reads and writes them: that is what the caller asks for. On this
//! side no reference to them is ever made; the core touches them lane by lane, with atomics.
#![allow(unsafe_code)]

use fastps_core::store::Live;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::ffi::c_int;

/// The memory of one tensor's values, which stays for as long as anything looks at it.
#[pyclass(frozen, module = "fastps._fastps", name = "LiveValues")]
#[derive(Debug)]
pub(crate) struct LiveValues(Live);

impl LiveValues {
    pub(crate) fn new(live: Live) -> Self {
        Self(live)
    }
}

#[pymethods]
impl LiveValues {
    /// The tensor's.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.spec().shape)
    }

    /// NumPy's name of the elements' type.
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
        // SAFETY: `view` is Python's; the memory is as long as said and lives as long as `slf`, which the view keeps.
        // It is shared and racing on purpose, and never exposed to Rust as values.
        let failed = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes as isize, 0, flags) };
        if failed == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
