//! The threads that torch computes with, lent to a store for one call.
//!
//! They belong to an OpenMP library and spin for some milliseconds after each piece of work, on the cores
//! that threads of ours would need. The library keeps them per calling thread, so a step right after a
//! backward gets the ones that worked for that.
//!
//! # Safety
//!
//! The functions called here are found by name in the libraries that the loaded torch depends on, and nowhere
//! else. Both names have one signature in all libraries that have them (GCC's, LLVM's, Intel's), because
//! compilers call them.
#![allow(unsafe_code)]

use crate::call;
use fastps_core::store::Team;
use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, OnceLock, PoisonError};

/// `GOMP_parallel`: a function, its argument, the number of threads that call it, flags. Returns when all
/// have.
type Parallel = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);
/// `omp_get_thread_num`: the caller's number among these threads.
type Number = unsafe extern "C" fn() -> c_int;

#[derive(Clone, Copy, Debug)]
struct OpenMp {
    parallel: Parallel,
    number: Number,
}

/// Some of torch's threads.
#[derive(Debug)]
pub(crate) struct Threads {
    openmp: OpenMp,
    count: u32,
}

impl Threads {
    /// `count` threads of torch; `None` if they are unavailable: torch is not loaded or has another kind of
    /// threads, or this is a forked child, in which the library would wait for threads that no longer exist.
    pub(crate) fn of_torch(count: u32) -> Option<Self> {
        static TORCH: OnceLock<Option<OpenMp>> = OnceLock::new();
        if count < 2 || call::is_forked() {
            return None;
        }
        let openmp = (*TORCH.get_or_init(find))?;
        Some(Self { openmp, count })
    }
}

impl Team for Threads {
    fn threads(&self) -> usize {
        self.count as usize
    }

    fn run(&self, work: &(dyn Fn(usize) + Sync)) {
        let region = Region { work, number: self.openmp.number, panic: Mutex::new(None) };
        // SAFETY: the file's header; `enter` gets the region that it expects, which lives until all threads
        // have left it.
        unsafe { (self.openmp.parallel)(enter, (&raw const region).cast_mut().cast(), self.count, 0) };
        if let Some(panic) = region.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }
}

/// State that the threads of one call share.
struct Region<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    number: Number,
    /// Panic of a thread: it must not unwind into the library.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// # Safety
///
/// `region` points to a [`Region`], and this is a thread of the library that was asked for it.
unsafe extern "C" fn enter(region: *mut c_void) {
    // SAFETY: as the caller promises; threads have only shared references.
    let region = unsafe { &*region.cast::<Region<'_>>() };
    // SAFETY: the file's header.
    let number = unsafe { (region.number)() };
    let work = || (region.work)(usize::try_from(number).unwrap_or(0));
    if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
        *region.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
    }
}

/// The OpenMP library of the loaded torch.
#[cfg(target_os = "linux")]
fn find() -> Option<OpenMp> {
    use std::ffi::CStr;
    // SAFETY: a string that ends with 0; only libraries already loaded are found. The handle is never closed,
    // so the library and its dependencies stay.
    let torch = unsafe { libc::dlopen(c"libtorch_cpu.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    let find = |name: &CStr| {
        // SAFETY: handles of a loaded library and of all, and a string that ends with 0.
        let (own, first) =
            unsafe { (libc::dlsym(torch, name.as_ptr()), libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr())) };
        // A library loaded before all others (LD_PRELOAD) replaces torch's own.
        (!torch.is_null() && !own.is_null() && (first.is_null() || first == own)).then_some(own)
    };
    let (parallel, number) = (find(c"GOMP_parallel")?, find(c"omp_get_thread_num")?);
    // SAFETY: functions of these signatures, as the file's header says.
    unsafe {
        Some(OpenMp {
            parallel: std::mem::transmute::<*mut c_void, Parallel>(parallel),
            number: std::mem::transmute::<*mut c_void, Number>(number),
        })
    }
}

/// On other systems torch has other libraries.
#[cfg(not(target_os = "linux"))]
fn find() -> Option<OpenMp> {
    None
}
