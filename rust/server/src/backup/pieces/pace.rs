//! Limits the bytes of the log that a process copies in a second.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Least length of a piece that the limit allows at once: a put is worth some bytes.
const MIN_BYTES: u64 = 64 << 10;

/// The limit that the shards of a process share; without one, nothing waits.
#[derive(Clone, Debug, Default)]
pub(in crate::backup) struct Pace(Option<Arc<Limit>>);

#[derive(Debug)]
struct Limit {
    per_second: u64,
    /// When what was copied is paid for.
    free_at: Mutex<Option<Instant>>,
}

impl Pace {
    pub(super) fn new(per_second: Option<u64>) -> Self {
        let limit = |per_second| Arc::new(Limit { per_second, free_at: Mutex::new(None) });
        Self(per_second.map(limit))
    }

    /// The longest piece: what a second allows, so that no later one waits for long.
    pub(super) fn most(&self, most: usize) -> usize {
        self.0.as_ref().map_or(most, |limit| {
            usize::try_from(limit.per_second.max(MIN_BYTES)).map_or(most, |bytes| bytes.min(most))
        })
    }

    /// Returns whether the next piece may be copied now.
    pub(super) fn is_free(&self, now: Instant) -> bool {
        let Some(limit) = &self.0 else { return true };
        limit.free_at.lock().unwrap_or_else(PoisonError::into_inner).is_none_or(|free_at| free_at <= now)
    }

    /// Counts a piece.
    pub(super) fn count(&self, bytes: usize, now: Instant) {
        let Some(limit) = &self.0 else { return };
        let time = Duration::from_secs_f64(bytes as f64 / limit.per_second as f64);
        let mut free_at = limit.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        *free_at = Some(free_at.map_or(now, |free_at| free_at.max(now)) + time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_wait_until_those_before_are_paid_for() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let pace = Pace::new(Some(1000));
        let shared = pace.clone();
        assert!(pace.is_free(now) && pace.most(8 << 20) == 64 << 10);
        pace.count(500, now);
        shared.count(2000, now);
        assert!(!pace.is_free(now + 2 * second) && pace.is_free(now + 3 * second));
        // Time without copies is not saved up.
        pace.count(1000, now + 60 * second);
        assert!(!shared.is_free(now + 60 * second) && shared.is_free(now + 61 * second));
        let free = Pace::default();
        free.count(usize::MAX, now);
        assert!(free.is_free(now) && free.most(9) == 9 && Pace::new(Some(1 << 30)).most(9) == 9);
    }
}
