//! The one tokio runtime of a process that has clients: started by the first connect, never at import, never dropped.

use fastps_core::error::{Error, Kind, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::runtime::{Builder, Handle};

static RUNTIME: Mutex<Option<(Process, Handle)>> = Mutex::new(None);

/// The process that something belongs to. Threads, and with them the runtime, do not survive `fork`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process(u32);

impl Process {
    pub(super) fn current() -> Self {
        Self(std::process::id())
    }

    /// Fails in a forked child, where nobody would ever answer.
    pub(super) fn check(self) -> Result<()> {
        if self == Self::current() {
            return Ok(());
        }
        Err(Error::new(Kind::Connection, "this client was made before fork; connect again in the child"))
    }
}

/// The process's runtime; a forked child gets one of its own.
pub(super) fn handle() -> Result<Handle> {
    let mut slot = lock(&RUNTIME);
    let process = Process::current();
    if let Some((owner, handle)) = &*slot
        && *owner == process
    {
        return Ok(handle.clone());
    }
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("fastps-client")
        .enable_all()
        .build()
        .map_err(|e| Error::new(Kind::Internal, format!("the client's runtime cannot start: {e}")))?;
    let handle = runtime.handle().clone();
    // Never dropped: its threads serve until the process ends, and a forked child must not join its parent's.
    std::mem::forget(runtime);
    *slot = Some((process, handle.clone()));
    Ok(handle)
}

/// Locks; a panic of another thread does not matter, because no state is left half-changed across a call.
pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A random number that is not 0.
pub(super) fn random() -> Result<u64> {
    loop {
        match getrandom::u64() {
            Ok(0) => {}
            Ok(n) => return Ok(n),
            Err(e) => return Err(Error::new(Kind::Internal, format!("no random numbers: {e}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_is_told_what_to_do() {
        assert!(Process::current().check().is_ok());
        let error = Process(u32::MAX).check().unwrap_err();
        assert!(error.message.contains("before fork; connect again in the child"));
    }
}
