//! Waiting by looking again for a moment before going to sleep: a sleeping thread takes tens of microseconds to come
//! back, often longer than what it waits for.

use fastps_core::error::{Error, Kind, Result};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::LazyLock;
use std::task::Poll;
use std::time::{Duration, Instant};

/// How long a wait looks again, unless told otherwise: well above the time of a wake-up.
pub(crate) const BUDGET: Duration = Duration::from_micros(200);
/// The longest that may be asked for.
const LONGEST: Duration = Duration::from_secs(1);
/// Where it was in vain, so many waits are left out before the next try: a peer that sleeps, too, answers late only
/// because both do.
pub(super) const MOST_SKIPPED: u32 = 7;

/// Looks between two at which others may have the core: the peer itself, where both have but one.
const LOOKS_PER_YIELD: u32 = 8;

/// Whether it pays to spin here, learnt from the waits so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spin {
    budget: Duration,
    /// Waits that were left out after the last one in vain, and those that still are.
    skipped: u32,
    skip: u32,
}

/// With one core, whoever is waited for could not run.
pub(super) static CORES: LazyLock<usize> =
    LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

impl Spin {
    /// Looks again for so long; zero: never.
    pub(crate) fn new(budget: Duration) -> Self {
        Self { budget, skipped: 0, skip: 0 }
    }

    /// For a thread that must not.
    pub(crate) fn never() -> Self {
        Self::new(Duration::ZERO)
    }

    /// Fails for a time that nobody means.
    pub(crate) fn check(budget: Duration) -> Result<()> {
        if budget <= LONGEST {
            return Ok(());
        }
        Err(Error::new(Kind::Config, "a wait may not spin for so long")
            .expected(format!("at most {LONGEST:?}"), format!("{budget:?}")))
    }

    /// Waits for what `work` gives. It spins only where a wait of late was short.
    pub(crate) async fn wait<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        let first = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
        if let Poll::Ready(result) = first {
            return result;
        }
        let begin = Instant::now();
        if self.budget.is_zero() || self.skip > 0 || *CORES < 2 {
            self.skip = self.skip.saturating_sub(1);
            let result = work.await;
            self.learn(begin);
            return result;
        }
        let mut looks = 0_u32;
        while begin.elapsed() < self.budget {
            looks += 1;
            if looks.is_multiple_of(LOOKS_PER_YIELD) {
                std::thread::yield_now();
            }
            tokio::task::yield_now().await;
            let again = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
            if let Poll::Ready(result) = again {
                self.learn(begin);
                return result;
            }
        }
        let result = work.await;
        self.learn(begin);
        result
    }

    fn learn(&mut self, begin: Instant) {
        if begin.elapsed() < self.budget {
            (self.skipped, self.skip) = (0, 0);
        } else if self.skip == 0 {
            self.skipped = (2 * self.skipped + 1).min(MOST_SKIPPED);
            self.skip = self.skipped;
        }
    }
}
