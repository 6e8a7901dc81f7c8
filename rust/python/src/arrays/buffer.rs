//! Memory of Python's arrays, borrowed without a copy: through the buffer protocol (NumPy and the like) or
//! DLPack (torch and the like). Anything that is not C-contiguous float32, float64 or bfloat16 in host memory is
//! an error that describes it. To be read, bfloat16 is copied as float32.
//!
//! # Safety
//!
//! Three facts carry this file and the one below it:
//!
//! * A [`Borrowed`] holds the exporter's lock on its memory (`Py_buffer`, or the DLPack capsule), so the
//!   pointer stays valid until it is dropped, on any thread.
//! * Pointer, element count, alignment, dtype and strides are checked once, in [`borrow`].
//! * Python code could change the elements while Rust reads them. The documented contract is that the caller
//!   does not (until the call returns, or the handle is done), the same one that NumPy and torch have for
//!   code that runs without the GIL. Pulls never make a `&mut` of caller's memory: they copy bytes to the raw
//!   pointer.
//!
//! A brief push goes without the exporter's lock, which would cost more than the push: see [`glance`].
#![allow(unsafe_code)]

mod dlpack;

use dlpack::Managed;
use fastps_core::dtype::{DType, View, widened};
use fastps_core::error::{Error, Kind};
use fastps_core::isa::Isa;
use fastps_core::rounding::append_nearest;
use fastps_core::text;
use fastps_core::verbs::Values;
use numpy::{PyArrayDyn, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use pyo3::{ffi, intern};
use smallvec::SmallVec;
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Few arrays have more dimensions than fit without an allocation.
type Shape = SmallVec<[u64; 4]>;

/// Use of the memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Owner that keeps the memory alive; dropped only with the GIL held.
enum Owner {
    Buffer(#[allow(dead_code)] Exported),
    Capsule(#[allow(dead_code)] Py<PyAny>),
    Managed(#[allow(dead_code)] Managed),
    /// A copy in another type.
    Widened(#[allow(dead_code)] Vec<f32>),
}

/// An exporter's lock on its memory.
struct Exported(Box<ffi::Py_buffer>);

// SAFETY: only `drop` uses Python, and it happens with the GIL held: in `borrow`, or in `sweep`.
unsafe impl Send for Exported {}

impl Drop for Exported {
    fn drop(&mut self) {
        // SAFETY: filled by `PyObject_GetBuffer`, released once, with the GIL held.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.0) };
    }
}

impl Exported {
    fn get(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: `object` is alive, the GIL is held, and `view` has its place on the heap for as long as it
        // is used.
        let code = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, ffi::PyBUF_RECORDS_RO) };
        // An exception leaves nothing to release.
        if code != 0 { Err(PyErr::fetch(object.py())) } else { Ok(Self(view)) }
    }

    fn format(&self) -> &CStr {
        // SAFETY: where given, a string that ends with 0 and lives as long as the view.
        if self.0.format.is_null() { c"B" } else { unsafe { CStr::from_ptr(self.0.format) } }
    }

    fn shape(&self) -> Shape {
        let ndim = usize::try_from(self.0.ndim).unwrap_or(0);
        // A scalar's shape may be a null pointer.
        if ndim == 0 || self.0.shape.is_null() {
            return Shape::new();
        }
        // SAFETY: `ndim` numbers, by the buffer protocol.
        unsafe { std::slice::from_raw_parts(self.0.shape, ndim) }.iter().map(|d| *d as u64).collect()
    }

    fn is_contiguous(&self, order: u8) -> bool {
        // SAFETY: a filled view.
        unsafe { ffi::PyBuffer_IsContiguous(&raw const *self.0, order as c_char) != 0 }
    }
}

/// Borrowed memory of a Python object: values of one type.
pub(crate) struct Borrowed {
    data: NonNull<u8>,
    dtype: DType,
    /// The type of the bytes that are written to it, which are converted if it is another.
    written: DType,
    len: usize,
    shape: Shape,
    owner: Option<Owner>,
}

// SAFETY: the memory may be read and written from any thread while `owner` lives (see the file's header);
// `owner` itself is only ever moved to the graveyard, which is emptied with the GIL held.
unsafe impl Send for Borrowed {}
// SAFETY: as above; a shared `Borrowed` only reads, except `write`, whose callers own the target array.
unsafe impl Sync for Borrowed {}

/// Owners that threads without the GIL have released, so that no network thread ever waits for the GIL.
static GRAVEYARD: Mutex<Vec<Owner>> = Mutex::new(Vec::new());
static GRAVES: AtomicBool = AtomicBool::new(false);

/// Drops the released owners.
pub(crate) fn sweep(_py: Python<'_>) {
    if GRAVES.load(Ordering::Relaxed) && GRAVES.swap(false, Ordering::AcqRel) {
        let owners = std::mem::take(&mut *GRAVEYARD.lock().unwrap_or_else(PoisonError::into_inner));
        drop(owners);
    }
}

/// Leaves an owner to the next [`sweep`].
fn bury(owner: Owner) {
    GRAVEYARD.lock().unwrap_or_else(PoisonError::into_inner).push(owner);
    GRAVES.store(true, Ordering::Release);
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            bury(owner);
        }
    }
}

/// Borrowed bytes of a Python object.
pub(crate) struct BorrowedBytes(Option<Exported>);

// SAFETY: as for `Borrowed`; it only reads.
unsafe impl Sync for BorrowedBytes {}

impl Drop for BorrowedBytes {
    fn drop(&mut self) {
        if let Some(exported) = self.0.take() {
            bury(Owner::Buffer(exported));
        }
    }
}

impl BorrowedBytes {
    /// The bytes.
    pub(crate) fn get(&self) -> &[u8] {
        let Some(Exported(view)) = &self.0 else { return &[] };
        let (data, len) = (view.buf.cast::<u8>().cast_const(), usize::try_from(view.len).unwrap_or(0));
        // SAFETY: checked by `borrow_bytes`; valid while `self` lives; no other code writes it in the
        // meantime (see the module's header).
        if data.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(data, len) } }
    }
}

/// Borrows the memory of an object that has contiguous bytes; `tensor` is its name in errors.
pub(crate) fn borrow_bytes(object: &Bound<'_, PyAny>, tensor: &str) -> PyResult<BorrowedBytes> {
    let exported = Exported::get(object).ok();
    let contiguous = exported.filter(|view| view.format() == c"B" && view.is_contiguous(b'C'));
    if contiguous.is_some() {
        return Ok(BorrowedBytes(contiguous));
    }
    let error = Error::new(Kind::DType, "the body of an encoded gradient is not an array of bytes");
    let error = error.tensor(tensor).expected("contiguous bytes (uint8)", describe(object, None));
    Err(crate::errors::raise(object.py(), &error))
}

impl fmt::Debug for Borrowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Borrowed").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Values for Borrowed {
    fn view(&self) -> View<'_> {
        match self.dtype {
            DType::Float32 => View::Float32(self.f32s()),
            DType::Float64 => {
                // SAFETY: checked by `borrow`; valid while `self` lives; no other code writes it in the
                // meantime (see the module's header).
                View::Float64(unsafe { std::slice::from_raw_parts(self.data.cast().as_ptr(), self.len) })
            }
            DType::BFloat16 => {
                // SAFETY: as above.
                View::BFloat16(unsafe { std::slice::from_raw_parts(self.data.cast().as_ptr(), self.len) })
            }
        }
    }
}

impl Borrowed {
    /// The values of float32 memory, as ensured by [`borrow_float32`] or a check.
    pub(crate) fn f32s(&self) -> &[f32] {
        assert_eq!(self.dtype, DType::Float32);
        // SAFETY: checked by `borrow`; valid while `self` lives; no other code writes it in the meantime (see
        // the module's header).
        unsafe { std::slice::from_raw_parts(self.data.cast().as_ptr(), self.len) }
    }

    /// Type of the values.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Ends the loan like a drop, for a caller that has the GIL.
    pub(crate) fn release(mut self, _py: Python<'_>) {
        drop(self.owner.take());
    }

    /// Row-major shape.
    pub(crate) fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The memory for values that arrive in this type: float32 and bfloat16 are converted to each other.
    pub(crate) fn for_values_of(self, written: DType) -> Option<Self> {
        let fits = self.dtype == written
            || self.dtype.computed() == DType::Float32 && written.computed() == DType::Float32;
        fits.then(|| self.written_as(written))
    }

    /// The type in which its values arrive.
    pub(crate) fn arriving(&self) -> DType {
        self.written
    }

    fn written_as(mut self, written: DType) -> Self {
        self.written = written;
        self
    }

    /// Bytes that fill the memory, in the type in which they arrive.
    pub(crate) fn bytes_to_fill(&self) -> usize {
        self.written.size() * self.len
    }

    /// Copies little-endian bytes of whole elements to element `at`; false if they do not fit.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) -> bool {
        match (self.written, self.dtype) {
            (DType::BFloat16, DType::Float32) => self.write_widened(at, bytes.as_chunks().0),
            (DType::Float32, DType::BFloat16) => {
                let Ok(isa) = Isa::get() else { return false };
                let mut rounded = Vec::new();
                append_nearest(isa, bytes, &mut rounded);
                self.write_as_is(at, &rounded)
            }
            _ => self.write_as_is(at, bytes),
        }
    }

    fn write_as_is(&self, at: usize, bytes: &[u8]) -> bool {
        let size = self.dtype.size();
        let fits = bytes.len().is_multiple_of(size)
            && at.checked_add(bytes.len() / size).is_some_and(|end| end <= self.len);
        if fits {
            // SAFETY: in bounds as just checked; the memory is writable, because all callers asked for
            // `Access::Write`.
            unsafe { copy(bytes, self.data.as_ptr().add(size * at), size * self.len >= STREAMED) };
        }
        fits
    }

    /// Writes bfloat16 to float32 memory, which is exact.
    fn write_widened(&self, at: usize, values: &[[u8; 2]]) -> bool {
        let fits = at.checked_add(values.len()).is_some_and(|end| end <= self.len);
        if fits {
            for (i, bits) in values.iter().enumerate() {
                // SAFETY: in bounds as just checked, aligned, and writable, because all callers asked for
                // `Access::Write`.
                unsafe { self.data.cast::<f32>().add(at + i).write(widened(u16::from_le_bytes(*bits))) };
            }
        }
        fits
    }

    /// Address range of the memory.
    pub(crate) fn addresses(&self) -> Range<usize> {
        let start = self.data.as_ptr() as usize;
        start..start + self.dtype.size() * self.len
    }

    /// Returns whether the two share memory.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.addresses(), other.addresses());
        a.start < b.end && b.start < a.end
    }

    /// The values of float32 memory, to be changed in place. Callers asked for [`Access::Write`] and made
    /// sure that nothing they use beside it [overlaps](Self::overlaps).
    pub(crate) fn f32s_mut(&mut self) -> &mut [f32] {
        assert_eq!(self.dtype, DType::Float32);
        // SAFETY: as in `f32s`; exclusive on our side by `&mut self` and the caller's overlap check.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast().as_ptr(), self.len) }
    }
}

/// Borrows the memory of `object`; `tensor` is its name in errors. To be read, bfloat16 becomes float32.
pub(crate) fn borrow(object: &Bound<'_, PyAny>, tensor: &str, access: Access) -> PyResult<Borrowed> {
    try_borrow(object, access)?.map_err(|error| crate::errors::raise(object.py(), &error.tensor(tensor)))
}

/// Borrows the memory of `object` to read it in its own type.
pub(crate) fn borrow_as_is(object: &Bound<'_, PyAny>, tensor: &str) -> PyResult<Borrowed> {
    let borrowed = try_borrow_as_is(object, Access::Read)?;
    borrowed.map_err(|error| crate::errors::raise(object.py(), &error.tensor(tensor)))
}

/// As [`borrow`], for memory that must be float32.
pub(crate) fn borrow_float32(object: &Bound<'_, PyAny>, tensor: &str, access: Access) -> PyResult<Borrowed> {
    let borrowed = borrow(object, tensor, access)?;
    if borrowed.dtype == DType::Float32 {
        return Ok(borrowed);
    }
    let expected = DType::Float32.name();
    let error = Error::new(Kind::DType, format!("not an array of float32; {}", convert("float32")));
    Err(crate::errors::raise(object.py(), &error.tensor(tensor).expected(expected, describe(object, None))))
}

fn convert(dtype: &str) -> String {
    format!("convert it, for example with numpy.asarray(x, numpy.{dtype})")
}

/// Bytes of a target that no cache holds until it is read: it is written past the caches, which saves reading
/// it first. Measured at 256 MiB: 1.5 times memcpy's speed. The limit itself is the size of a large cache,
/// not measured.
const STREAMED: usize = 1 << 25;

/// Copies bytes, past the caches if `streamed`. Overlap is allowed.
///
/// # Safety
///
/// `to` is valid for writes of `from.len()` bytes.
unsafe fn copy(from: &[u8], to: *mut u8, streamed: bool) {
    #[cfg(target_arch = "x86_64")]
    if streamed && (from.as_ptr() as usize).abs_diff(to as usize) >= from.len() {
        // SAFETY: as the caller promises, and the two were just seen not to overlap.
        return unsafe { stream(from, to) };
    }
    let _ = streamed;
    // SAFETY: as the caller promises; `copy` allows overlap.
    unsafe { std::ptr::copy(from.as_ptr(), to, from.len()) };
}

/// # Safety
///
/// `to` is valid for writes of `from.len()` bytes, and does not overlap `from`.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: &[u8], to: *mut u8) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let (head, rest) = from.split_at(to.align_offset(LINE).min(from.len()));
    let (lines, tail) = rest.as_chunks::<LINE>();
    // SAFETY: all three parts together are `from`, and go to the same offsets of `to`; the lines begin where
    // `to` is aligned to a line. SSE2 is part of x86-64. The fence orders the streamed stores before whatever
    // comes next.
    unsafe {
        std::ptr::copy_nonoverlapping(head.as_ptr(), to, head.len());
        let mut target = to.add(head.len());
        for line in lines {
            for k in (0..LINE).step_by(size_of::<__m128i>()) {
                _mm_stream_si128(target.add(k).cast(), _mm_loadu_si128(line.as_ptr().add(k).cast()));
            }
            target = target.add(LINE);
        }
        _mm_sfence();
        std::ptr::copy_nonoverlapping(tail.as_ptr(), target, tail.len());
    }
}

/// As [`borrow`]; the caller adds the object's name to the error.
pub(crate) fn try_borrow(object: &Bound<'_, PyAny>, access: Access) -> PyResult<Result<Borrowed, Error>> {
    let borrowed = try_borrow_as_is(object, access)?;
    Ok(match borrowed {
        Ok(values) if values.dtype == DType::BFloat16 && access == Access::Read => as_float32(&values),
        borrowed => borrowed,
    })
}

/// A copy of bfloat16 values as float32, which is exact.
fn as_float32(values: &Borrowed) -> Result<Borrowed, Error> {
    let View::BFloat16(bits) = values.view() else {
        return Err(Error::new(Kind::Internal, "values of another type than their array"));
    };
    let mut copy: Vec<f32> = bits.iter().map(|bits| widened(*bits)).collect();
    let data = copy.as_mut_ptr().cast();
    finish(data, DType::Float32, values.shape.clone(), Owner::Widened(copy))
}

fn try_borrow_as_is(object: &Bound<'_, PyAny>, access: Access) -> PyResult<Result<Borrowed, Error>> {
    // SAFETY: `object` is a live object and the GIL is held.
    if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } != 0 {
        return Ok(match Exported::get(object) {
            Ok(buffer) => from_buffer(object, buffer, None, access),
            // NumPy exports no buffer of the type of the package ml_dtypes.
            Err(_) => match bits_of_bfloat16(object).as_ref().and_then(|bits| Exported::get(bits).ok()) {
                Some(buffer) => from_buffer(object, buffer, Some(DType::BFloat16), access),
                None => Err(wrong_dtype(object, None)),
            },
        });
    }
    if dlpack::is_negated(object) {
        if access == Access::Write {
            return Ok(Err(negated()));
        }
        let resolved = object.call_method0(intern!(object.py(), "resolve_neg"))?;
        return from_dlpack(&resolved, access);
    }
    from_dlpack(object, access)
}

fn from_dlpack(object: &Bound<'_, PyAny>, access: Access) -> PyResult<Result<Borrowed, Error>> {
    if let Some(borrowed) = (access == Access::Read).then(|| dlpack::from_exchange(object)).flatten() {
        Ok(borrowed)
    } else if object.hasattr(intern!(object.py(), "__dlpack__"))? {
        dlpack::from_capsule(object, access)
    } else {
        Ok(Err(wrong_dtype(object, None)))
    }
}

/// The same memory as an array of uint16, if the object is a NumPy array of bfloat16.
fn bits_of_bfloat16<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let name = object.getattr("dtype").ok()?.getattr("name").ok()?;
    let is_bfloat16 = name.extract::<String>().is_ok_and(|name| name == DType::BFloat16.name());
    is_bfloat16.then(|| object.call_method1("view", ("uint16",)).ok()).flatten()
}

/// `dtype`: the type of the values, if the buffer does not say it.
fn from_buffer(
    object: &Bound<'_, PyAny>,
    buffer: Exported,
    dtype: Option<DType>,
    access: Access,
) -> Result<Borrowed, Error> {
    let dtype = dtype
        .or_else(|| from_format(buffer.format().to_bytes()))
        .filter(|dtype| usize::try_from(buffer.0.itemsize) == Ok(dtype.size()))
        .ok_or_else(|| wrong_dtype(object, buffer.format().to_str().ok()))?;
    let shape = buffer.shape();
    if !buffer.is_contiguous(b'C') {
        return Err(not_contiguous(object, &shape, buffer.is_contiguous(b'F')));
    }
    if access == Access::Write && buffer.0.readonly != 0 {
        return Err(read_only());
    }
    let data = buffer.0.buf;
    finish(data, dtype, shape, Owner::Buffer(buffer))
}

/// The type of a format of the buffer protocol.
fn from_format(format: &[u8]) -> Option<DType> {
    let native = if cfg!(target_endian = "little") { b'<' } else { b'>' };
    let code = match format {
        [order, code @ ..] if matches!(order, b'@' | b'=') || *order == native => code,
        code => code,
    };
    match code {
        b"f" => Some(DType::Float32),
        b"d" => Some(DType::Float64),
        _ => None,
    }
}

/// The number of elements of a shape, if they fit in memory.
fn elements(shape: &[u64], dtype: DType) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let product = shape.iter().try_fold(1_u64, |n, d| n.checked_mul(*d));
    product.filter(|n| *n <= (isize::MAX as usize / dtype.size()) as u64).map(|n| n as usize)
}

fn finish(data: *mut c_void, dtype: DType, shape: Shape, owner: Owner) -> Result<Borrowed, Error> {
    let Some(len) = elements(&shape, dtype) else {
        let error = Error::new(Kind::Shape, "the array has too many elements");
        return Err(error.expected("fewer than 2^61", text::shape(&shape)));
    };
    let data = if len == 0 {
        // Aligned for every type; nothing is read there.
        NonNull::<u64>::dangling().cast()
    } else {
        NonNull::new(data.cast::<u8>()).ok_or_else(|| {
            let error = Error::new(Kind::Shape, "the array has no memory; pass a copy");
            error.expected("memory with the values", "none")
        })?
    };
    let borrowed = Borrowed { data, dtype, written: dtype, len, shape, owner: Some(owner) };
    if (borrowed.data.as_ptr() as usize).is_multiple_of(dtype.size()) {
        Ok(borrowed)
    } else {
        Err(Error::new(Kind::Shape, "the array's memory is not aligned; pass a copy").expected(
            format!("an address that is a multiple of {}", dtype.size()),
            format!("{:#x}", borrowed.data.as_ptr() as usize),
        ))
    }
}

/// Returns whether [`glance`] may look at the object. Asking may run Python code, looking does not.
pub(crate) fn is_plain(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyUntypedArray>() || dlpack::can_glance(object)
}

/// Shape and values of an object that [is plain](is_plain), without its exporter's lock: for a caller that
/// keeps the GIL and runs no Python code while it uses them. `None` if only [`borrow`] can report the error.
pub(crate) fn glance<'a>(object: &'a Bound<'_, PyAny>) -> Option<(&'a [u64], View<'a>)> {
    let numpy = object.is_instance_of::<PyUntypedArray>();
    let (data, shape) = if numpy { numpy_floats(object) } else { dlpack::glance(object) }?;
    let len = elements(shape, DType::Float32)?;
    if len == 0 {
        return Some((shape, View::Float32(&[])));
    }
    let data = NonNull::new(data.cast::<f32>()).filter(|data| data.is_aligned())?;
    // SAFETY: `len` float32 are valid there, according to their exporter. `object` keeps them in place as
    // long as no Python code runs, by the caller's promise.
    Some((shape, View::Float32(unsafe { std::slice::from_raw_parts(data.as_ptr(), len) })))
}

/// Address and shape of a NumPy array, if it is contiguous float32.
fn numpy_floats<'a>(object: &'a Bound<'_, PyAny>) -> Option<(*mut c_void, &'a [u64])> {
    let array = object.cast::<PyArrayDyn<f32>>().ok()?;
    array.is_c_contiguous().then(|| (array.data().cast(), bytemuck::cast_slice(array.shape())))
}

fn describe(object: &Bound<'_, PyAny>, format: Option<&str>) -> String {
    let kind = object.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string());
    match (object.getattr("dtype"), format) {
        (Ok(dtype), _) if kind == "ndarray" => format!("{kind} of {dtype}{}", byte_order(&dtype)),
        (Ok(dtype), _) => format!("{kind} of {dtype}"),
        (Err(_), Some(format)) => format!("{kind} of format {format:?}"),
        (Err(_), None) => kind,
    }
}

fn byte_order(dtype: &Bound<'_, PyAny>) -> &'static str {
    let swapped = if cfg!(target_endian = "little") { ">" } else { "<" };
    match dtype.getattr("byteorder") {
        Ok(order) if order.to_string() == swapped => " in foreign byte order",
        _ => "",
    }
}

fn wrong_dtype(object: &Bound<'_, PyAny>, format: Option<&str>) -> Error {
    let message = format!("not an array of float32, float64 or bfloat16; {}", convert("float32"));
    Error::new(Kind::DType, message).expected("float32, float64 or bfloat16", describe(object, format))
}

fn not_contiguous(object: &Bound<'_, PyAny>, shape: &[u64], fortran: bool) -> Error {
    let strides = object.getattr("strides").map(|s| format!(" and strides {s}")).unwrap_or_default();
    let order = if fortran { "column-major (Fortran) order, " } else { "" };
    Error::new(
        Kind::Shape,
        "the array is not C-contiguous; pass a copy, for example numpy.ascontiguousarray(x)",
    )
    .expected("row-major (C) order", format!("{order}shape {}{strides}", text::shape(shape)))
}

fn read_only() -> Error {
    Error::new(Kind::Config, "the array is read-only").expected("a writable array", "a read-only one")
}

fn negated() -> Error {
    Error::new(Kind::Config, "the tensor is a negated view; pass tensor.resolve_neg()")
        .expected("a tensor whose memory has its values", "one with torch's negative bit")
}

/// A new, uninitialised NumPy array for values of this type, and its memory: bfloat16 becomes float32.
pub(crate) fn empty<'py>(
    py: Python<'py>,
    dtype: DType,
    shape: &[u64],
) -> PyResult<(Bound<'py, PyAny>, Borrowed)> {
    static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let own = dtype.computed().name();
    let array = EMPTY.import(py, "numpy", "empty")?.call1((PyTuple::new(py, shape)?, own))?;
    let memory = borrow(&array, "", Access::Write)?;
    Ok((array, memory.written_as(dtype)))
}

/// A new NumPy array with these values.
pub(crate) fn array<'py>(py: Python<'py>, shape: &[u64], values: View<'_>) -> PyResult<Bound<'py, PyAny>> {
    let (array, memory) = empty(py, values.dtype(), shape)?;
    memory.write(0, values.bytes());
    Ok(array)
}
