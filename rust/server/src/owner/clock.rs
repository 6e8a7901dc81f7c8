//! The clock of leases. It also runs while the machine is suspended.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Time since the system was started.
pub(crate) fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or_default())
}
