//! Returns the memory of closed connections to the system. glibc keeps freed memory while anything behind
//! it in the same heap is in use; only `malloc_trim` returns the pages between.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Closed connections that justify a trim: some megabytes.
const MIN_CLOSED_CONNECTIONS: u64 = 256;
/// Least time between trims: each locks the heap for some milliseconds.
const TRIM_INTERVAL: Duration = Duration::from_secs(5);

/// Connections of this process that have closed since the last trim. The heap is the process's, too.
static CLOSED: AtomicU64 = AtomicU64::new(0);
static LAST: Mutex<Option<Instant>> = Mutex::new(None);

/// A connection has closed, and its memory is free.
pub(crate) fn closed() {
    CLOSED.fetch_add(1, Ordering::Relaxed);
}

/// Returns memory to the system, if enough is free, on a separate thread.
pub(crate) fn give_back() {
    if is_due(&CLOSED, &mut LAST.lock().unwrap_or_else(PoisonError::into_inner), Instant::now()) {
        tokio::task::spawn_blocking(trim);
    }
}

fn is_due(closed: &AtomicU64, last: &mut Option<Instant>, now: Instant) -> bool {
    let due = closed.load(Ordering::Relaxed) >= MIN_CLOSED_CONNECTIONS
        && last.is_none_or(|last| now.saturating_duration_since(last) >= TRIM_INTERVAL);
    if due {
        *last = Some(now);
        closed.store(0, Ordering::Relaxed);
    }
    due
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code, reason = "glibc's own call, for which there is no safe one")]
fn trim() {
    // SAFETY: it takes a number, may be called at any time by any thread, and touches no memory that is in
    // use.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn trim() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_done_after_many_and_not_too_often() {
        let (closed, mut last, begin) = (AtomicU64::new(MIN_CLOSED_CONNECTIONS - 1), None, Instant::now());
        assert!(!is_due(&closed, &mut last, begin));
        closed.fetch_add(1, Ordering::Relaxed);
        assert!(is_due(&closed, &mut last, begin));
        closed.fetch_add(MIN_CLOSED_CONNECTIONS, Ordering::Relaxed);
        assert!(!is_due(&closed, &mut last, begin + TRIM_INTERVAL / 2));
        assert!(is_due(&closed, &mut last, begin + TRIM_INTERVAL));
        assert!(!is_due(&closed, &mut last, begin + 3 * TRIM_INTERVAL), "nothing has closed since");
    }
}
