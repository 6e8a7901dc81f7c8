//! Adaptive spinning as in `Spin`, for a stream that is polled.

use super::super::spin::{CORES, MAX_SKIPPED_WAITS};
use std::time::{Duration, Instant};

/// Looks between two yields of the core to others.
const LOOKS_PER_YIELD: u32 = 8;
/// Fewest looks from which to learn: in a shorter wait the thread did something else.
const MIN_LOOKS_TO_LEARN: u32 = 50;

/// Decides whether to spin, learning from the waits so far.
#[derive(Debug)]
pub(super) struct AdaptiveSpin {
    /// How long a wait spins.
    budget: Duration,
    /// The beginning of the present wait.
    since: Option<Instant>,
    /// Looks of the present wait.
    looks: u32,
    /// Waits that skip spinning after the last failed one, and those that still do.
    skipped: u32,
    skip: u32,
}

impl AdaptiveSpin {
    /// Spins for at most `budget`; zero disables it.
    pub(super) fn new(budget: Duration) -> Self {
        Self { budget, since: None, looks: 0, skipped: 0, skip: 0 }
    }

    /// Returns whether to look again rather than to sleep. The first call begins a wait.
    pub(super) fn looks_again(&mut self) -> bool {
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        if self.skip > 0 || *CORES < 2 || now - since >= self.budget {
            return false;
        }
        self.looks += 1;
        if self.looks.is_multiple_of(LOOKS_PER_YIELD) {
            std::thread::yield_now();
        }
        true
    }

    /// Returns whether the wait has passed its first two looks: between them there may be something to send.
    pub(super) fn is_under_way(&self) -> bool {
        self.looks > 2
    }

    /// Learns that the awaited event has occurred.
    pub(super) fn learn(&mut self) {
        let Some(since) = self.since.take() else {
            return;
        };
        let looks = std::mem::take(&mut self.looks);
        if since.elapsed() < self.budget {
            (self.skipped, self.skip) = (0, 0);
        } else if self.skip > 0 {
            self.skip -= 1;
        } else if looks >= MIN_LOOKS_TO_LEARN {
            self.skipped = (2 * self.skipped + 1).min(MAX_SKIPPED_WAITS);
            self.skip = self.skipped;
        }
    }

    /// Begins a new wait after sending something that may be answered at once.
    pub(super) fn renew(&mut self) {
        (self.since, self.looks) = (None, 0);
    }
}
