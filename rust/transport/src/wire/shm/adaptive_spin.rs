//! Adaptive spinning as in `Spin`, for a stream that is polled.

use super::super::spin::{CORES, MAX_SKIPPED_WAITS};
use std::time::{Duration, Instant};

/// Looks between two at which others may have the core.
const LOOKS_PER_YIELD: u32 = 8;
/// A wait with fewer looks teaches nothing: the thread did something else.
const MIN_LOOKS_TO_LEARN: u32 = 50;

/// Whether it pays to look again, learnt from the waits so far.
#[derive(Debug)]
pub(super) struct AdaptiveSpin {
    /// How long a wait looks again.
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
    /// Looks again for so long; zero: never.
    pub(super) fn new(budget: Duration) -> Self {
        Self { budget, since: None, looks: 0, skipped: 0, skip: 0 }
    }

    /// Whether to look again rather than to sleep. The first question begins a wait.
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

    /// Whether this is neither the first look of its wait nor the second: between them there may be something
    /// to send.
    pub(super) fn is_under_way(&self) -> bool {
        self.looks > 2
    }

    /// What was waited for has come.
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

    /// Begins a new wait: something was sent that may be answered at once.
    pub(super) fn renew(&mut self) {
        (self.since, self.looks) = (None, 0);
    }
}
