//! Rates of principals on one shard: above its rate, a principal is read later, and refused beyond a second.

use crate::auth::principal::{Limits, Principal};
use fastps_core::error::{Error, Kind, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time for which a frame waits.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// Size of a burst, as the time that it takes at the principal's rate.
const BURST: Duration = Duration::from_millis(100);

/// The budgets of a shard's principals, by name.
#[derive(Debug, Default)]
pub(crate) struct Budgets(Mutex<HashMap<Arc<str>, Arc<Budget>>>);

impl Budgets {
    /// The budget that all streams of a principal share; `None` if it has no rates.
    pub(crate) fn of(&self, principal: &Principal) -> Option<Arc<Budget>> {
        let Limits { frames_per_second, bytes_per_second, .. } = principal.limits;
        let name = principal.name.clone().filter(|_| frames_per_second.or(bytes_per_second).is_some())?;
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Some(all.entry(name).or_default().clone())
    }
}

/// Times at which a principal's debts, in frames and in bytes, are paid off.
#[derive(Debug, Default)]
pub(crate) struct Budget(Mutex<[Option<Instant>; 2]>);

impl Budget {
    /// Charges a frame. Returns how long it waits; fails, and charges nothing, if that is too long.
    pub(crate) fn charge(&self, limits: &Limits, bytes: usize, now: Instant) -> Result<Duration> {
        let costs = [(limits.frames_per_second, 1), (limits.bytes_per_second, bytes as u64)];
        let mut paid = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let due = paid.map(|paid| paid.unwrap_or(earliest).max(earliest));
        let limited = costs.iter().zip(due).filter(|((rate, _), _)| rate.is_some());
        let wait = limited.map(|(_, due)| due.saturating_duration_since(now)).max().unwrap_or_default();
        if wait > MAX_WAIT {
            let rates = costs.map(|(rate, _)| rate.map_or_else(|| "any".to_owned(), |rate| rate.to_string()));
            let error = Error::new(Kind::Capacity, "the principal exceeds its rate");
            let expected = format!("{} frames and {} bytes a second", rates[0], rates[1]);
            return Err(error.expected(expected, "more").retry_after_ms(wait.as_millis() as u64 + 1));
        }
        for ((paid, due), (rate, cost)) in paid.iter_mut().zip(due).zip(costs) {
            if let Some(rate) = rate {
                *paid = Some(due + Duration::from_secs_f64(cost as f64 / rate.max(1) as f64));
            }
        }
        Ok(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::role::Role;
    use crate::auth::scope::Scope;

    fn limits(frames: Option<u64>, bytes: Option<u64>) -> Limits {
        Limits { frames_per_second: frames, bytes_per_second: bytes, memory: None }
    }

    #[test]
    fn a_principal_sends_at_its_rate_and_is_refused_a_second_late() {
        let (budget, start) = (Budget::default(), Instant::now());
        let of = limits(Some(10), None);
        // A burst of 100 ms, and then each frame 100 ms after the one before, up to a second.
        let waits: Vec<_> = (0..12).map(|_| budget.charge(&of, 5, start).unwrap().as_millis()).collect();
        assert_eq!(waits, [0, 0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]);
        let error = budget.charge(&of, 5, start).unwrap_err();
        assert_eq!((error.kind, error.retry_after_ms), (Kind::Capacity, Some(1101)));
        let later = start + Duration::from_millis(1101);
        assert_eq!(budget.charge(&of, 5, later), Ok(Duration::ZERO));
    }

    #[test]
    fn a_frame_larger_than_the_rate_passes_and_those_after_it_wait() {
        let (budget, start) = (Budget::default(), Instant::now());
        let of = limits(None, Some(1000));
        assert_eq!(budget.charge(&of, 1600, start), Ok(Duration::ZERO));
        assert_eq!(budget.charge(&of, 1, start).unwrap_err().retry_after_ms, Some(1501));
        let later = start + Duration::from_secs(1);
        assert_eq!(budget.charge(&of, 1, later), Ok(Duration::from_millis(500)));
        assert!(budget.charge(&of, 1, later + Duration::from_mins(1)).unwrap().is_zero());
    }

    #[test]
    fn all_streams_of_a_principal_share_its_budget() {
        let budgets = Budgets::default();
        let principal = |name: &str, limits| Principal {
            limits,
            ..Principal::new(name, Role::Worker, Scope::Everything)
        };
        let of = |name, limits| budgets.of(&principal(name, limits));
        let (one, same) = (of("a", limits(Some(1), None)).unwrap(), of("a", limits(None, Some(9))).unwrap());
        assert!(Arc::ptr_eq(&one, &same));
        assert!(!Arc::ptr_eq(&one, &of("b", limits(Some(1), None)).unwrap()));
        assert!(of("c", limits(None, None)).is_none());
    }
}
