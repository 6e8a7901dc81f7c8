//! Budgets of principals on one shard: rates of frames, of calls and of their bytes, and memory. Above its
//! rate, a principal is read later, and refused beyond a second.

pub(crate) mod calls;
mod memory;

pub(crate) use memory::{Held, hold};

use crate::auth::principal::{Limits, Principal};
use crate::auth::rate::{Bucket, Rate};
use fastps_core::error::{Error, Kind, Result};
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time for which a frame or call waits.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// Size of a burst, as the seconds that it takes at the principal's rate.
const BURST: f64 = 0.1;

/// The spending of a shard's principals, by name.
#[derive(Debug, Default)]
pub(crate) struct Budgets(Mutex<HashMap<Arc<str>, Arc<Spent>>>);

/// The spending of one principal.
#[derive(Debug, Default)]
struct Spent {
    /// Debts of the frames of streams.
    frames: Debts,
    /// Debts of calls and of opened streams: frames that wait never delay them.
    calls: Debts,
    /// Debts of Hellos, which keep sessions alive: other calls and frames never delay them.
    hellos: Debts,
    /// Debts of values that streams have pulled.
    pulls: Debts,
    /// Bytes of memory.
    memory: AtomicU64,
}

/// Frames and bytes that are left, or owed.
type Debts = Mutex<[Bucket; 2]>;

fn rate(per_second: u64) -> Rate {
    let per_second = per_second.max(1) as f64;
    Rate { burst: BURST * per_second, per_second }
}

/// The account that pays for a frame or call. Each has the whole rate of the principal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Account {
    /// The frames of streams.
    Frames,
    /// All calls but Hello, and the opening of streams.
    Calls,
    /// Hellos.
    Hellos,
    /// The values in answers to frames.
    Pulls,
}

/// The budget of a principal, which its calls and streams share, with its present limits.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    name: Arc<str>,
    limits: Limits,
    spent: Arc<Spent>,
}

impl Budgets {
    /// The budget of a principal; `None` if it has no limits.
    pub(crate) fn of(&self, principal: &Principal) -> Option<Budget> {
        let limits = principal.limits;
        let name = principal.name.clone().filter(|_| limits != Limits::default())?;
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let spent = all.entry(name.clone()).or_default().clone();
        Some(Budget { name, limits, spent })
    }
}

impl Budget {
    /// Returns whether the principal has a rate.
    pub(crate) fn has_rates(&self) -> bool {
        self.limits.frames_per_second.or(self.limits.bytes_per_second).is_some()
    }

    /// Charges a frame or call of this size. Returns how long it waits; fails, and charges nothing, if that
    /// is too long.
    pub(crate) fn charge(&self, account: Account, bytes: u64, now: Instant) -> Result<Duration> {
        self.settle(account, [Some(1), Some(bytes)], now)
    }

    /// [`Budget::charge`] for the body of a call whose headers were charged.
    fn charge_body(&self, account: Account, bytes: u64, now: Instant) -> Result<Duration> {
        self.settle(account, [None, Some(bytes)], now)
    }

    /// Charges bytes that were read or sent, whatever the debts.
    pub(crate) fn charge_past(&self, account: Account, bytes: u64, now: Instant) {
        if let Some(per_second) = self.limits.bytes_per_second {
            let mut debts = self.debts(account).lock().unwrap_or_else(PoisonError::into_inner);
            debts[1].take(bytes as f64, rate(per_second), now);
        }
    }

    /// Time until the values that the principal has pulled are paid for.
    pub(crate) fn owes(&self, now: Instant) -> Duration {
        let Some(per_second) = self.limits.bytes_per_second else { return Duration::ZERO };
        let mut debts = self.debts(Account::Pulls).lock().unwrap_or_else(PoisonError::into_inner);
        debts[1].wait_for(0.0, rate(per_second), now)
    }

    fn debts(&self, account: Account) -> &Debts {
        match account {
            Account::Frames => &self.spent.frames,
            Account::Calls => &self.spent.calls,
            Account::Hellos => &self.spent.hellos,
            Account::Pulls => &self.spent.pulls,
        }
    }

    /// Charges these frames and bytes, once earlier debts of the same kind are paid off.
    fn settle(&self, account: Account, costs: [Option<u64>; 2], now: Instant) -> Result<Duration> {
        let Limits { frames_per_second, bytes_per_second, .. } = self.limits;
        let rates = [frames_per_second, bytes_per_second];
        let limits = [rates[0].map(rate).zip(costs[0]), rates[1].map(rate).zip(costs[1])];
        let mut debts = self.debts(account).lock().unwrap_or_else(PoisonError::into_inner);
        let limited = debts.iter_mut().zip(limits);
        let waits = limited.filter_map(|(debt, limit)| Some(debt.wait_for(0.0, limit?.0, now)));
        let wait = waits.max().unwrap_or_default();
        if wait > MAX_WAIT {
            let [frames, bytes] =
                rates.map(|rate| rate.map_or_else(|| "any".to_owned(), |rate| rate.to_string()));
            let error = Error::new(Kind::Capacity, "the principal exceeds its rate");
            let expected = format!("{frames} frames or calls and {bytes} bytes a second");
            return Err(error.expected(expected, "more").retry_after_ms(wait.as_millis() as u64 + 1));
        }
        for (debt, limit) in debts.iter_mut().zip(limits) {
            if let Some((rate, cost)) = limit {
                debt.take(cost as f64, rate, now);
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
    use Account::{Calls, Frames, Hellos};

    fn principal(name: &str, frames: Option<u64>, bytes: Option<u64>) -> Principal {
        let limits = Limits { frames_per_second: frames, bytes_per_second: bytes, memory: None };
        Principal { limits, ..Principal::new(name, Role::Worker, Scope::Everything) }
    }

    fn budget(frames: Option<u64>, bytes: Option<u64>) -> Budget {
        Budgets::default().of(&principal("a", frames, bytes)).unwrap()
    }

    #[test]
    fn a_principal_sends_at_its_rate_and_is_refused_a_second_late() {
        let (budget, start) = (budget(Some(10), None), Instant::now());
        // A burst of 100 ms, and then each frame 100 ms after the one before, up to a second.
        let waits: Vec<_> = (0..12).map(|_| budget.charge(Frames, 5, start).unwrap().as_millis()).collect();
        assert_eq!(waits, [0, 0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]);
        let error = budget.charge(Frames, 5, start).unwrap_err();
        assert_eq!((error.kind, error.retry_after_ms), (Kind::Capacity, Some(1101)));
        // Its calls and its Hellos have accounts of their own.
        for account in [Calls, Hellos] {
            assert_eq!(budget.charge(account, 5, start), Ok(Duration::ZERO));
        }
        let later = start + Duration::from_millis(1101);
        assert_eq!(budget.charge(Frames, 5, later), Ok(Duration::ZERO));
    }

    #[test]
    fn a_frame_larger_than_the_rate_passes_and_those_after_it_wait() {
        let (budget, start) = (budget(None, Some(1000)), Instant::now());
        assert_eq!(budget.charge(Frames, 1600, start), Ok(Duration::ZERO));
        assert_eq!(budget.charge(Frames, 1, start).unwrap_err().retry_after_ms, Some(1501));
        let later = start + Duration::from_secs(1);
        assert_eq!(budget.charge(Frames, 1, later), Ok(Duration::from_millis(500)));
        assert!(budget.charge(Frames, 1, later + Duration::from_mins(1)).unwrap().is_zero());
    }

    #[test]
    fn a_body_waits_for_bytes_alone() {
        let (budget, start) = (budget(Some(1), Some(1000)), Instant::now());
        assert_eq!(budget.charge(Frames, 0, start), Ok(Duration::ZERO));
        assert_eq!(budget.charge_body(Frames, 600, start), Ok(Duration::ZERO));
        assert_eq!(budget.charge_body(Frames, 1600, start), Ok(Duration::from_millis(500)));
        assert_eq!(budget.charge_body(Frames, 1, start).unwrap_err().retry_after_ms, Some(2101));
        // The next call is refused by its headers.
        assert_eq!(budget.charge(Frames, 0, start).unwrap_err().retry_after_ms, Some(2101));
    }

    #[test]
    fn pulled_bytes_delay_and_refuse_nothing() {
        let (budget, start) = (budget(None, Some(1000)), Instant::now());
        // A burst passes at once.
        for (bytes, waits) in [(100, 0), (60_000, 60), (1000, 61)] {
            budget.charge_past(Account::Pulls, bytes, start);
            assert_eq!(budget.owes(start), Duration::from_secs(waits));
            for account in [Frames, Calls, Hellos] {
                assert_eq!(budget.charge(account, 1, start), Ok(Duration::ZERO));
            }
        }
        assert_eq!(budget.owes(start + Duration::from_secs(62)), Duration::ZERO);
    }

    #[test]
    fn all_streams_and_calls_of_a_principal_share_its_budget() {
        let (budgets, start) = (Budgets::default(), Instant::now());
        let of = |name, frames, bytes| budgets.of(&principal(name, frames, bytes));
        let (one, same) = (of("a", Some(1), None).unwrap(), of("a", Some(1), Some(9)).unwrap());
        one.charge(Frames, 1, start).unwrap();
        assert_eq!(same.charge(Frames, 1, start), Ok(Duration::from_millis(900)));
        assert_eq!(of("b", Some(1), None).unwrap().charge(Frames, 1, start), Ok(Duration::ZERO));
        assert!(of("c", None, None).is_none());
    }

    #[test]
    fn ten_thousand_principals_have_a_budget_each() {
        let (budgets, start) = (Budgets::default(), Instant::now());
        let of = |k: usize| budgets.of(&principal(&format!("p{k}"), Some(10), None)).unwrap();
        for k in 0..10_000 {
            assert_eq!(of(k).charge(Frames, 1, start), Ok(Duration::ZERO), "principal {k}");
        }
        (0..11).for_each(|_| drop(of(7).charge(Frames, 1, start)));
        assert!(of(7).charge(Frames, 1, start).is_err() && of(8).charge(Frames, 1, start).is_ok());
        assert_eq!(budgets.0.lock().unwrap().len(), 10_000);
    }
}
