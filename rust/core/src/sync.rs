//! The only import of atomics and locks, so that a model checker can replace them.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, RwLock};
pub(crate) use std::thread::{Thread, current, park};

/// Locks; a panic elsewhere must not make every later call panic as well.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
