//! A token bucket: limits how often something may happen.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What one connection may do of a kind.
#[derive(Debug)]
pub(crate) struct Rate {
    most: u32,
    per_second: u32,
    /// How often it may happen now, as of this moment; `None`: it has not happened yet.
    left: Mutex<Option<(f64, Instant)>>,
}

impl Rate {
    /// `most` times at once, and `per_second` times a second from then on.
    pub(crate) const fn new(most: u32, per_second: u32) -> Self {
        Self { most, per_second, left: Mutex::new(None) }
    }

    /// Takes one, or says when the next will be there.
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

    /// The times that it may happen at once, and then a second.
    pub(crate) fn bounds(&self) -> String {
        format!("at most {} at once, then {} a second", self.most, self.per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_at_once_and_then_so_many_a_second() {
        let (rate, start) = (Rate::new(3, 2), Instant::now());
        (0..3).for_each(|_| rate.take(start).unwrap());
        let pause = rate.take(start).unwrap_err();
        assert_eq!(pause, Duration::from_millis(500));
        assert!(rate.take(start + pause / 2).is_err());
        rate.take(start + pause).unwrap();
        assert!(rate.take(start + pause).is_err());
        let later = start + Duration::from_mins(1);
        (0..3).for_each(|_| rate.take(later).unwrap());
        assert!(rate.take(later).is_err(), "what is left over does not add up");
    }
}
