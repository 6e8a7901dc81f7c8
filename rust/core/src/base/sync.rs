//! The only import of atomics and locks, so that a model checker can take their place (`--cfg loom`).
//!
//! `Arc` is std's in every build: trait objects and method receivers need the real one. `Counted` is the
//! `Arc` whose count the code looks at, and which the model checker therefore must see.

#[cfg(not(loom))]
mod chosen {
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::Arc as Counted;
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(crate) use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
    pub(crate) use std::thread::{Thread, current, park};
}

#[cfg(loom)]
mod chosen {
    pub(crate) use loom::sync::Arc as Counted;
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
    pub(crate) use loom::thread::{Thread, current, park};

    /// Nothing: loom would take it for a promise to let the others run, and leave orders out.
    pub(crate) fn spin_loop() {}
}

pub(crate) use chosen::*;
pub(crate) use std::sync::Arc;
use std::sync::{LockResult, TryLockResult};

/// Locks; a panic elsewhere must not make every later call panic as well.
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

/// `ThreadSanitizer` cannot see into std, which waits there; an attempt is compiled here, where it can.
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

/// Locks what nobody else can hold at this moment; the model checker finds out if somebody does.
pub(crate) fn lock_uncontended<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(loom)]
    assert!(mutex.try_lock().is_ok(), "two threads hold one lock");
    lock(mutex)
}
