//! DLPack: the standard by which torch and others lend their memory, as a capsule or through a table of C
//! functions.
//!
//! # Safety
//!
//! The promises of DLPack's header and its Python specification about the structs and their ownership; the
//! parent module has the rest.
#![allow(unsafe_code)]

use super::{Access, Borrowed, Owner, Shape, describe, finish, not_contiguous, read_only, wrong_dtype};
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind};
use fastps_core::text;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCapsule};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

const DL_CPU: i32 = 1;
const DL_CUDA_HOST: i32 = 3;
const DL_FLOAT: u8 = 2;
const DL_BFLOAT: u8 = 4;
const DL_READ_ONLY: u64 = 1;

/// A DLPack tensor that we own.
pub(super) struct Managed(NonNull<DlManagedTensorVersioned>);

// SAFETY: as for `Exported`: used only by its destructor, with the GIL held.
unsafe impl Send for Managed {}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: the exporter gave us the struct; the standard has its owner call the deleter once.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}

/// Most dimensions of an array, as in NumPy and the buffer protocol.
const MAX_NDIM: usize = 64;

#[repr(C)]
struct DlDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype_code: u8,
    dtype_bits: u8,
    dtype_lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

impl DlTensor {
    fn dtype(&self) -> Option<DType> {
        match (self.dtype_code, self.dtype_bits, self.dtype_lanes) {
            (DL_FLOAT, 32, 1) => Some(DType::Float32),
            (DL_FLOAT, 64, 1) => Some(DType::Float64),
            (DL_BFLOAT, 16, 1) => Some(DType::BFloat16),
            _ => None,
        }
    }

    /// Refuses values that no array can have; a capsule may come from anywhere.
    fn check(&self) -> Result<(), Error> {
        let invalid = |what| Error::new(Kind::Shape, format!("the DLPack capsule is invalid: {what}"));
        let dimensions = usize::try_from(self.ndim).ok().filter(|ndim| *ndim <= MAX_NDIM);
        let Some(dimensions) = dimensions else {
            return Err(invalid("ndim").expected(format!("0 to {MAX_NDIM} dimensions"), self.ndim));
        };
        if dimensions > 0 && self.shape.is_null() {
            return Err(invalid("shape").expected(format!("{dimensions} sizes"), "none"));
        }
        // SAFETY: by the DLPack standard, as long as the tensor lives.
        let shape = unsafe { numbers(self.shape, self.ndim) };
        let itemsize = u64::from(self.dtype_bits / 8);
        let bytes = shape.iter().try_fold(itemsize, |bytes, dim| bytes.checked_mul(*dim));
        let end = bytes
            .and_then(|bytes| bytes.checked_add(self.byte_offset))
            .and_then(|bytes| bytes.checked_add(self.data.addr() as u64))
            .filter(|end| isize::try_from(*end).is_ok());
        if end.is_none() {
            let expected = "an array within a process's memory";
            let got = format!("byte_offset {} and shape {}", self.byte_offset, text::shape(shape));
            return Err(invalid("memory").expected(expected, got));
        }
        Ok(())
    }

    fn is_contiguous(&self) -> bool {
        // SAFETY: by the DLPack standard, as long as the tensor lives.
        let (shape, strides) = unsafe { (numbers(self.shape, self.ndim), numbers(self.strides, self.ndim)) };
        let mut step = 1_u64;
        let mut contiguous = true;
        for (dim, stride) in shape.iter().zip(strides).rev() {
            contiguous &= *dim == 1 || *stride == step;
            step = step.saturating_mul(*dim);
        }
        contiguous || shape.contains(&0)
    }

    fn data(&self) -> *mut c_void {
        self.data.wrapping_byte_add(self.byte_offset as usize)
    }
}

/// `ndim` numbers, which must not be negative except for strides; none if the pointer is null.
///
/// # Safety
///
/// Otherwise `ndim` numbers are valid for `'a`.
unsafe fn numbers<'a>(pointer: *const i64, ndim: i32) -> &'a [u64] {
    match usize::try_from(ndim) {
        // SAFETY: as the caller promises; the two types have the same size and alignment.
        Ok(ndim) if ndim > 0 && !pointer.is_null() => unsafe {
            std::slice::from_raw_parts(pointer.cast::<u64>(), ndim)
        },
        _ => &[],
    }
}

/// DLPack 1.x; the older `DLManagedTensor` begins with the tensor itself.
#[repr(C)]
struct DlManagedTensorVersioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensorVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// DLPack's table of C functions, an attribute of the array's type: some 20 times cheaper than `__dlpack__`.
#[repr(C)]
struct DlExchangeApi {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocator: *const c_void,
    managed_from_object:
        Option<unsafe extern "C" fn(*mut c_void, *mut *mut DlManagedTensorVersioned) -> c_int>,
    managed_to_object: *const c_void,
    /// Describes the memory without keeping it alive.
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
}

thread_local! {
    /// The type that was looked up last, and its table.
    static EXCHANGE: Cell<(usize, Option<&'static DlExchangeApi>)> = const { Cell::new((0, None)) };
}

fn exchange_api(object: &Bound<'_, PyAny>) -> Option<&'static DlExchangeApi> {
    let kind = object.get_type();
    let (last, api) = EXCHANGE.get();
    if last == kind.as_ptr() as usize {
        return api;
    }
    let capsule = kind.getattr(intern!(object.py(), "__dlpack_c_exchange_api__")).ok();
    let capsule = capsule.and_then(|capsule| capsule.cast_into::<PyCapsule>().ok());
    let pointer = capsule.and_then(|capsule| capsule.pointer_checked(Some(c"dlpack_exchange_api")).ok());
    // SAFETY: a capsule of this name holds this table, which by the standard lives as long as the process.
    let api = pointer.map(|pointer| unsafe { pointer.cast::<DlExchangeApi>().as_ref() });
    let api = api.filter(|api| api.major == 1);
    EXCHANGE.set((kind.as_ptr() as usize, api));
    // Never freed, so that no other type can get this address.
    std::mem::forget(kind.unbind());
    api
}

/// Memory for reading, through the table; `None` without a table, or if it does not know this object.
pub(super) fn from_exchange(object: &Bound<'_, PyAny>) -> Option<Result<Borrowed, Error>> {
    let export = exchange_api(object)?.managed_from_object?;
    if requires_grad(object) {
        return None;
    }
    let mut managed = std::ptr::null_mut();
    // SAFETY: the table's function for objects of this very type, with the GIL held; it fills `managed` if it
    // returns 0, else it sets an exception.
    let failed = unsafe { export(object.as_ptr().cast(), &raw mut managed) } != 0;
    let Some(managed) = NonNull::new(managed).filter(|_| !failed) else {
        drop(PyErr::take(object.py()));
        return None;
    };
    // SAFETY: filled just now, and ours until `Managed` is dropped.
    let (tensor, flags) = unsafe { (&(*managed.as_ptr()).tensor, (*managed.as_ptr()).flags) };
    Some(checked(object, Owner::Managed(Managed(managed)), tensor, flags, Access::Read))
}

fn gives_no(object: &Bound<'_, PyAny>, what: &str, error: &PyErr) -> Error {
    let error = Error::new(Kind::DType, format!("the array gives no DLPack {what}: {error}"));
    error.expected("float32 in host memory", describe(object, None))
}

/// Memory of an object that exports a capsule.
pub(super) fn from_capsule(object: &Bound<'_, PyAny>, access: Access) -> PyResult<Result<Borrowed, Error>> {
    let py = object.py();
    let device = object.call_method0(intern!(py, "__dlpack_device__")).and_then(|device| device.extract());
    let (kind, id): (i32, i32) = match device {
        Ok(device) => device,
        Err(error) => return Ok(Err(gives_no(object, "device", &error))),
    };
    if !in_host_memory(kind) {
        return Ok(Err(not_in_host_memory(object, kind, id)));
    }
    if requires_grad(object) {
        let error = Error::new(Kind::DType, "the tensor requires grad; pass tensor.detach()");
        return Ok(Err(error.expected("a tensor without grad", "requires_grad=True")));
    }
    let name = intern!(py, "__dlpack__");
    let versioned = [("max_version", (1_u32, 0_u32))].into_py_dict(py)?;
    let capsule = match object.call_method(name, (), Some(&versioned)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0(name),
        other => other,
    };
    let capsule = match capsule {
        Ok(capsule) => capsule.cast_into::<PyCapsule>()?,
        Err(error) => return Ok(Err(gives_no(object, "capsule", &error))),
    };
    let (tensor, flags) = if let Ok(pointer) = capsule.pointer_checked(Some(c"dltensor_versioned")) {
        let managed = pointer.cast::<DlManagedTensorVersioned>();
        // SAFETY: a capsule of this name holds this struct, by the DLPack standard, as long as the capsule
        // lives.
        let managed = unsafe { managed.as_ref() };
        if managed.major != 1 {
            let error = Error::new(Kind::DType, "unknown DLPack version");
            return Ok(Err(error.expected("1.x", format!("{}.{}", managed.major, managed.minor))));
        }
        (&managed.tensor, managed.flags)
    } else {
        let pointer = capsule.pointer_checked(Some(c"dltensor"))?;
        // SAFETY: as above; an unversioned struct begins with the tensor.
        (unsafe { pointer.cast::<DlTensor>().as_ref() }, 0)
    };
    let owner = Owner::Capsule(capsule.clone().unbind().into_any());
    Ok(checked(object, owner, tensor, flags, access))
}

fn checked(
    object: &Bound<'_, PyAny>,
    owner: Owner,
    tensor: &DlTensor,
    flags: u64,
    access: Access,
) -> Result<Borrowed, Error> {
    if !in_host_memory(tensor.device.kind) {
        return Err(not_in_host_memory(object, tensor.device.kind, tensor.device.id));
    }
    let Some(dtype) = tensor.dtype() else {
        return Err(wrong_dtype(object, None));
    };
    tensor.check()?;
    // SAFETY: by the DLPack standard, as long as the tensor lives.
    let shape = Shape::from_slice(unsafe { numbers(tensor.shape, tensor.ndim) });
    if !tensor.is_contiguous() {
        return Err(not_contiguous(object, &shape, false));
    }
    if access == Access::Write && flags & DL_READ_ONLY != 0 {
        return Err(read_only());
    }
    finish(tensor.data(), dtype, shape, owner)
}

/// Returns whether [`glance`] may look at the object. Asking may run Python code, looking does not.
pub(super) fn can_glance(object: &Bound<'_, PyAny>) -> bool {
    exchange_api(object).is_some_and(|api| api.tensor_from_object.is_some())
        && !requires_grad(object)
        && !is_negated(object)
}

/// Address and shape of contiguous float32 in host memory, through the table of its type.
pub(super) fn glance<'a>(object: &'a Bound<'_, PyAny>) -> Option<(*mut c_void, &'a [u64])> {
    let look = exchange_api(object)?.tensor_from_object?;
    let mut tensor = MaybeUninit::<DlTensor>::zeroed();
    // SAFETY: the table's function for objects of this very type, with the GIL held; it fills `tensor` if it
    // returns 0, else it sets an exception.
    if unsafe { look(object.as_ptr().cast(), tensor.as_mut_ptr()) } != 0 {
        drop(PyErr::take(object.py()));
        return None;
    }
    // SAFETY: filled just now; besides, zeros are a value of every field.
    let tensor = unsafe { tensor.assume_init() };
    let fits = in_host_memory(tensor.device.kind)
        && tensor.dtype() == Some(DType::Float32)
        && tensor.check().is_ok()
        && tensor.is_contiguous();
    // SAFETY: the shape is the object's own, by the DLPack standard.
    fits.then(|| (tensor.data(), unsafe { numbers(tensor.shape, tensor.ndim) }))
}

/// Returns whether the tensor requires grad: usually a parameter in place of its gradient.
fn requires_grad(object: &Bound<'_, PyAny>) -> bool {
    let flag = object.getattr(intern!(object.py(), "requires_grad"));
    flag.is_ok_and(|flag| flag.is_truthy().unwrap_or(false))
}

/// Returns whether a tensor of torch has the negative bit: its values are those of its memory, negated. DLPack
/// does not say so.
pub(super) fn is_negated(object: &Bound<'_, PyAny>) -> bool {
    let flag = object.call_method0(intern!(object.py(), "is_neg"));
    flag.is_ok_and(|flag| flag.is_truthy().unwrap_or(false))
}

fn in_host_memory(kind: i32) -> bool {
    kind == DL_CPU || kind == DL_CUDA_HOST
}

fn not_in_host_memory(object: &Bound<'_, PyAny>, kind: i32, id: i32) -> Error {
    let device =
        object.getattr("device").map_or_else(|_| format!("device ({kind}, {id})"), |d| d.to_string());
    Error::new(Kind::DType, "the array is not in host memory; pass array.cpu()")
        .expected("memory of the CPU", device)
}
