//! A token bucket: limits how often something may happen.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Limit on one kind of action of one connection.
#[derive(Debug)]
pub(crate) struct Rate {
    most: u32,
    per_second: u32,
    /// Actions left, and the time of that count; `None` before the first action.
    left: Mutex<Option<(f64, Instant)>>,
}

impl Rate {
    /// Allows `most` actions at once, and `per_second` actions a second from then on.
    pub(crate) const fn new(most: u32, per_second: u32) -> Self {
        Self { most, per_second, left: Mutex::new(None) }
    }

    /// Takes one action; `Err` holds the time until the next is allowed.
    pub(crate) fn take(&self, now: Instant) -> Result<(), Duration> {
        let most = f64::from(self.most);
        let mut state = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, since) = state.unwrap_or((most, now));
        let came = now.saturating_duration_since(since).as_secs_f64() * f64::from(self.per_second);
        let left = (left + came).min(most);
        let taken = left >= 1.0;
        *state = Some((if taken { left - 1.0 } else { left }, since.max(now)));
        if taken { Ok(()) } else { Err(Duration::from_secs_f64((1.0 - left) / f64::from(self.per_second))) }
    }

    /// The limits, for people.
    pub(crate) fn bounds(&self) -> String {
        format!("at most {} at once, then {} a second", self.most, self.per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_at_once_and_then_a_rate() {
        let (rate, start) = (Rate::new(3, 2), Instant::now());
        (0..3).for_each(|_| rate.take(start).unwrap());
        let pause = rate.take(start).unwrap_err();
        assert_eq!(pause, Duration::from_millis(500));
        assert!(rate.take(start + pause / 2).is_err());
        rate.take(start + pause).unwrap();
        assert!(rate.take(start + pause).is_err());
        let later = start + Duration::from_mins(1);
        (0..3).for_each(|_| rate.take(later).unwrap());
        assert!(rate.take(later).is_err(), "leftovers do not add up");
    }
}
