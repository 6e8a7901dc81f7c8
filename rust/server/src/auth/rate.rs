//! A token bucket, which limits how often something may happen. It knows no clock.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The size of a bucket, and how quickly it fills.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    pub(crate) burst: f64,
    pub(crate) per_second: f64,
}

/// The tokens of one payer, and the time of that count; `None` before the first one: it is full.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bucket(Option<(f64, Instant)>);

impl Bucket {
    /// Tokens at this time; below zero, that many are owed.
    pub(crate) fn level(&mut self, rate: Rate, now: Instant) -> f64 {
        let (left, since) = self.0.unwrap_or((rate.burst, now));
        let came = now.saturating_duration_since(since).as_secs_f64() * rate.per_second;
        let left = (left + came).min(rate.burst);
        self.0 = Some((left, since.max(now)));
        left
    }

    /// Time until the bucket has this many tokens.
    pub(crate) fn wait_for(&mut self, tokens: f64, rate: Rate, now: Instant) -> Duration {
        let missing = (tokens - self.level(rate, now)).max(0.0);
        Duration::try_from_secs_f64(missing / rate.per_second).unwrap_or(Duration::MAX)
    }

    /// Takes tokens, whether there are enough or not.
    pub(crate) fn take(&mut self, tokens: f64, rate: Rate, now: Instant) {
        self.level(rate, now);
        self.add(-tokens, rate);
    }

    /// Adds tokens, as far as they fit.
    pub(crate) fn add(&mut self, tokens: f64, rate: Rate) {
        if let Some((left, _)) = &mut self.0 {
            *left = (*left + tokens).min(rate.burst);
        }
    }
}

/// Limit on one kind of action.
#[derive(Debug)]
pub(crate) struct Limiter {
    rate: Rate,
    bucket: Mutex<Bucket>,
}

impl Limiter {
    /// Allows `burst` actions at once, and `per_second` actions a second from then on.
    pub(crate) fn new(burst: u32, per_second: u32) -> Self {
        let rate = Rate { burst: burst.into(), per_second: per_second.into() };
        Self { rate, bucket: Mutex::default() }
    }

    /// Takes one action; `Err` holds the time until the next is allowed.
    pub(crate) fn take(&self, now: Instant) -> Result<(), Duration> {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = bucket.wait_for(1.0, self.rate, now);
        if !wait.is_zero() {
            return Err(wait);
        }
        bucket.take(1.0, self.rate, now);
        Ok(())
    }

    /// The limits, for people.
    pub(crate) fn bounds(&self) -> String {
        format!("at most {} at once, then {} a second", self.rate.burst, self.rate.per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_at_once_and_then_a_rate() {
        let (limiter, start) = (Limiter::new(3, 2), Instant::now());
        (0..3).for_each(|_| limiter.take(start).unwrap());
        let pause = limiter.take(start).unwrap_err();
        assert_eq!(pause, Duration::from_millis(500));
        assert!(limiter.take(start + pause / 2).is_err());
        limiter.take(start + pause).unwrap();
        assert!(limiter.take(start + pause).is_err());
        let later = start + Duration::from_mins(1);
        (0..3).for_each(|_| limiter.take(later).unwrap());
        assert!(limiter.take(later).is_err(), "leftovers do not add up");
    }
}
