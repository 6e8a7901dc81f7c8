//! Adaptive spinning: polls for a moment before sleeping, since a sleeping thread takes tens of microseconds
//! to wake, often longer than the event takes.

use fastps_core::error::{Error, Kind, Result};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

/// Default time that a wait spins: well above the time of a wake-up.
pub const DEFAULT_SPIN: Duration = Duration::from_micros(200);
/// Longest configurable spin.
const MAX_SPIN: Duration = Duration::from_secs(1);
/// Most waits that skip spinning after it failed: a sleeping peer answers late only because both sleep.
pub(super) const MAX_SKIPPED_WAITS: u32 = 7;

/// Looks between two yields of the core: to the peer itself, if both share one.
const LOOKS_PER_YIELD: u32 = 8;

/// Decides whether to spin, learning from the waits so far.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    budget: Duration,
    /// Waits that skip spinning after the last failed one, and those that still do.
    skipped: u32,
    skip: u32,
}

/// Number of cores. With one, the peer could not run while this thread spins.
pub(super) static CORES: LazyLock<usize> =
    LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

impl Spin {
    /// Spins for at most `budget`; zero disables it.
    pub fn new(budget: Duration) -> Self {
        Self { budget, skipped: 0, skip: 0 }
    }

    /// For a thread that must not spin.
    pub fn never() -> Self {
        Self::new(Duration::ZERO)
    }

    /// Fails if the time is too long.
    pub fn check(budget: Duration) -> Result<()> {
        if budget <= MAX_SPIN {
            return Ok(());
        }
        Err(Error::new(Kind::Config, "the spin time is too long")
            .expected(format!("at most {MAX_SPIN:?}"), format!("{budget:?}")))
    }

    /// Waits for `work`. Spins only if recent waits were short; beside a large transfer, only while its parts
    /// follow one another without long gaps.
    pub async fn wait<T>(&mut self, work: impl Future<Output = T>, pace: &Pace) -> T {
        let mut work = pin!(work);
        let first = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
        if let Poll::Ready(result) = first {
            return result;
        }
        pace.begin();
        if self.budget.is_zero() || self.skip > 0 || *CORES < 2 {
            self.skip = self.skip.saturating_sub(1);
            let result = work.await;
            self.learn(pace.longest());
            return result;
        }
        let mut looks = 0_u32;
        while pace.gap() < self.budget {
            looks += 1;
            if looks.is_multiple_of(LOOKS_PER_YIELD) {
                std::thread::yield_now();
            }
            tokio::task::yield_now().await;
            let again = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
            if let Poll::Ready(result) = again {
                self.learn(pace.longest());
                return result;
            }
        }
        let result = work.await;
        self.learn(pace.longest());
        result
    }

    fn learn(&mut self, waited: Duration) {
        if waited < self.budget {
            (self.skipped, self.skip) = (0, 0);
        } else if self.skip == 0 {
            self.skipped = (2 * self.skipped + 1).min(MAX_SKIPPED_WAITS);
            self.skip = self.skipped;
        }
    }
}

/// Arrival of awaited data: whole, or in parts with gaps between them. Used by one thread.
#[derive(Debug)]
pub struct Pace {
    start: Instant,
    /// Start of the present gap, and the longest one of this wait; nanoseconds from the start.
    from: AtomicU64,
    longest: AtomicU64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { start: Instant::now(), from: AtomicU64::new(0), longest: AtomicU64::new(0) }
    }
}

impl Pace {
    /// A pace that begins now.
    pub fn new() -> Self {
        Self::default()
    }

    fn begin(&self) {
        self.from.store(self.now(), Ordering::Relaxed);
        self.longest.store(0, Ordering::Relaxed);
    }

    /// Notes that a part has arrived, or was sent, and more will follow.
    pub(super) fn part(&self) {
        let gap = self.now().saturating_sub(self.from.load(Ordering::Relaxed));
        self.from.fetch_add(gap, Ordering::Relaxed);
        self.longest.fetch_max(gap, Ordering::Relaxed);
    }

    fn gap(&self) -> Duration {
        Duration::from_nanos(self.now().saturating_sub(self.from.load(Ordering::Relaxed)))
    }

    fn longest(&self) -> Duration {
        self.gap().max(Duration::from_nanos(self.longest.load(Ordering::Relaxed)))
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::sleep;

    const BRIEF: Duration = Duration::from_millis(20);

    #[test]
    fn a_wait_is_as_long_as_its_longest_gap() {
        let pace = Pace::new();
        sleep(BRIEF);
        let start = Instant::now();
        pace.begin();
        for _ in 0..3 {
            sleep(BRIEF);
            pace.part();
        }
        assert!(pace.longest() >= BRIEF);
        assert!(pace.longest() + 2 * BRIEF <= start.elapsed(), "a gap ends with a part");
        sleep(4 * BRIEF);
        assert!(pace.longest() >= 4 * BRIEF, "the last gap counts, too");
        let start = Instant::now();
        pace.begin();
        assert!(pace.longest() <= start.elapsed());
    }

    #[tokio::test]
    async fn waits_in_vain_are_left_out_for_a_while() {
        let (mut spin, pace) = (Spin::new(20 * BRIEF), Pace::new());
        let late = || tokio::time::sleep(25 * BRIEF);
        for skip in [1, 3] {
            spin.wait(late(), &pace).await;
            assert_eq!((spin.skipped, spin.skip), (skip, skip));
        }
        // As late as these, but in parts.
        let mut parts = 0;
        let large = poll_fn(|cx| {
            sleep(BRIEF);
            pace.part();
            parts += 1;
            cx.waker().wake_by_ref();
            if parts < 25 { Poll::Pending } else { Poll::Ready(()) }
        });
        spin.wait(large, &pace).await;
        assert_eq!((spin.skipped, spin.skip), (0, 0));
    }
}
