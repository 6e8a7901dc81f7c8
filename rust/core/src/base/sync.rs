//! The only import of atomics and locks, so that a model checker can replace them (`--cfg loom`).
//!
//! `Arc` is std's in every build, because trait objects and method receivers need the real one. `Counted` is
//! an `Arc` whose reference count the code reads, so the model checker must see it.

#[cfg(not(loom))]
mod chosen {
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::Arc as Counted;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
    pub(crate) use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
    pub(crate) use std::thread::{Thread, current, park};
}

#[cfg(loom)]
mod chosen {
    pub(crate) use loom::sync::Arc as Counted;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
    pub(crate) use loom::thread::{Thread, current, park};

    /// Does nothing: loom would take it for a yield to the other threads, and skip some orders.
    pub(crate) fn spin_loop() {}
}

pub(crate) use chosen::*;
pub(crate) use std::sync::Arc;
use std::sync::{LockResult, TryLockResult};

/// Locks, and ignores poisoning: a panic in one thread must not make every later call panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    taken(|| mutex.try_lock(), || mutex.lock())
}

/// Locks for reading, as [`lock`].
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    taken(|| lock.try_read(), || lock.read())
}

/// Locks for writing, as [`lock`].
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    taken(|| lock.try_write(), || lock.write())
}

#[cfg(not(fastps_tsan))]
fn taken<G>(_attempt: impl Fn() -> TryLockResult<G>, wait: impl FnOnce() -> LockResult<G>) -> G {
    wait().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// `ThreadSanitizer` cannot see a wait inside std, so this spins on attempts, which are compiled here with
/// instrumentation.
#[cfg(fastps_tsan)]
fn taken<G>(attempt: impl Fn() -> TryLockResult<G>, _wait: impl FnOnce() -> LockResult<G>) -> G {
    use std::sync::TryLockError;
    loop {
        match attempt() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
}

/// Locks a mutex that no other thread can hold at this moment; the model checker verifies that.
pub(crate) fn lock_uncontended<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(loom)]
    assert!(mutex.try_lock().is_ok(), "two threads hold one lock");
    lock(mutex)
}
