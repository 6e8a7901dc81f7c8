//! Waiting by looking again for a moment before going to sleep: a sleeping thread takes tens of microseconds to come
//! back, often longer than what it waits for.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::LazyLock;
use std::task::Poll;
use std::time::{Duration, Instant};

/// How long a wait looks again.
const BUDGET: Duration = Duration::from_micros(200);
/// Where it was in vain, so many waits are left out before the next try: a peer that sleeps, too, answers late only
/// because both do.
const MOST_SKIPPED: u32 = 7;

/// Whether it pays to spin here, learnt from the waits so far.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    never: bool,
    /// Waits that were left out after the last one in vain, and those that still are.
    skipped: u32,
    skip: u32,
}

/// With one core, whoever is waited for could not run.
static CORES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

impl Spin {
    /// For a thread that must not.
    pub(crate) fn never() -> Self {
        Self { never: true, ..Self::default() }
    }

    /// Waits for what `work` gives. It spins only where a wait of late was short.
    pub(crate) async fn wait<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        let first = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
        if let Poll::Ready(result) = first {
            return result;
        }
        let begin = Instant::now();
        if self.never || self.skip > 0 || *CORES < 2 {
            self.skip = self.skip.saturating_sub(1);
            let result = work.await;
            self.learn(begin);
            return result;
        }
        while begin.elapsed() < BUDGET {
            std::thread::yield_now();
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
        if begin.elapsed() < BUDGET {
            (self.skipped, self.skip) = (0, 0);
        } else if self.skip == 0 {
            self.skipped = (2 * self.skipped + 1).min(MOST_SKIPPED);
            self.skip = self.skipped;
        }
    }
}
