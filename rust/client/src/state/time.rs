//! Deadlines and pauses.

use crate::state::runtime::random;
use std::time::{Duration, Instant};

/// The time after `timeout`; times beyond the range of clocks are cut to a millennium.
pub(crate) fn after(timeout: Duration) -> Instant {
    const MAX_TIMEOUT: Duration = Duration::from_hours(365_000 * 24);
    Instant::now() + timeout.min(MAX_TIMEOUT)
}

/// A random pause between half and one and a half of this one, so that clients do not return in step.
pub(crate) fn jitter(pause: Duration) -> Duration {
    let random = random().unwrap_or(1 << 63) as f64 / u64::MAX as f64;
    pause.mul_f64(0.5 + random)
}
