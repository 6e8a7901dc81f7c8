//! Deadlines and pauses.

use crate::state::runtime::random;
use std::time::{Duration, Instant};

/// A point in time that far from now; times beyond what clocks can say are cut to a millennium.
pub(crate) fn after(timeout: Duration) -> Instant {
    const MAX_TIMEOUT: Duration = Duration::from_hours(365_000 * 24);
    Instant::now() + timeout.min(MAX_TIMEOUT)
}

/// Between half and one and a half of a pause, so that clients do not come back in step.
pub(crate) fn jitter(pause: Duration) -> Duration {
    let random = random().unwrap_or(1 << 63) as f64 / u64::MAX as f64;
    pause.mul_f64(0.5 + random)
}
