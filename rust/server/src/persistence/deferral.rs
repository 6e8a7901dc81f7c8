//! Defers automatic snapshots for a cut. A shard refuses a cut while it writes a snapshot, so one that writes
//! them without a break, because pushes outrun its disk, would refuse every attempt.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Deferral after each attempt: longer than a client's pause before the next one.
const AFTER_ATTEMPT: Duration = Duration::from_secs(3);
/// Longest deferral since the first attempt, or since the end of a snapshot after it.
const MAX: Duration = Duration::from_secs(10);

/// The deferral of one shard's automatic snapshots.
#[derive(Debug)]
pub(super) struct Deferral(Mutex<Span>);

#[derive(Debug)]
struct Span {
    /// The first attempt, or the end of the last snapshot after it.
    since: Instant,
    until: Instant,
}

impl Deferral {
    pub(super) fn none() -> Self {
        let now = Instant::now();
        Self(Mutex::new(Span { since: now, until: now }))
    }

    /// Notes an attempt to begin a cut.
    pub(super) fn note_attempt(&self, now: Instant) {
        self.change(|span| {
            if now >= span.until {
                span.since = now;
            }
            span.until = now + AFTER_ATTEMPT;
        });
    }

    /// Notes that a snapshot is complete.
    pub(super) fn note_snapshot(&self, now: Instant) {
        self.change(|span| span.since = now);
    }

    /// Ends the deferral: the cut is complete.
    pub(super) fn end(&self) {
        self.change(|span| span.until = span.since);
    }

    /// Time for which automatic snapshots should still wait, if any.
    pub(super) fn left(&self, now: Instant) -> Option<Duration> {
        let end = self.change(|span| span.until.min(span.since + MAX));
        end.checked_duration_since(now).filter(|left| !left.is_zero())
    }

    fn change<T>(&self, change: impl FnOnce(&mut Span) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_snapshot_waits_for_the_next_attempt() {
        let (deferral, now) = (Deferral::none(), Instant::now());
        assert_eq!(deferral.left(now), None);
        deferral.note_attempt(now);
        assert_eq!(deferral.left(now + SECOND), Some(2 * SECOND));
        assert_eq!(deferral.left(now + AFTER_ATTEMPT), None);
        deferral.note_attempt(now + AFTER_ATTEMPT);
        deferral.end();
        assert_eq!(deferral.left(now + AFTER_ATTEMPT), None);
    }

    #[test]
    fn endless_attempts_defer_a_snapshot_for_a_while_only() {
        let (deferral, begin) = (Deferral::none(), Instant::now());
        let attempts = |from: u32, to: u32| {
            (from..to).find(|second| {
                deferral.note_attempt(begin + *second * SECOND);
                deferral.left(begin + *second * SECOND).is_none()
            })
        };
        assert_eq!(attempts(0, 60), Some(10));
        // The snapshot that was begun meanwhile is complete: the next one waits as long.
        deferral.note_snapshot(begin + 60 * SECOND);
        assert_eq!(attempts(60, 120), Some(70));
    }
}
