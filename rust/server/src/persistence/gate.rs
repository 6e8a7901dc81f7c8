//! Holds the writes of a shard for a moment, so that all shards of a cluster can begin one consistent cut.
//!
//! Writes are held at most a tenth of the time: after each hold they pass for nine times its length. A
//! stream with a write to a held shard waits together with everything behind it, which keeps its order; pulls
//! before that write are answered.

use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Longest time that writes are held.
const MAX_HOLD: Duration = Duration::from_secs(2);
/// Ratio of open time to the hold before it.
const REST: u32 = 9;
/// Retry delay of another cut.
const RETRY_AFTER_MS: u64 = 50;
/// Value of `cut` while no writes are held.
const OPEN: u64 = 0;

/// The gate of one shard.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// The cut that it is closed for.
    cut: AtomicU64,
    opened: Notify,
    times: Mutex<Times>,
}

#[derive(Debug, Default)]
struct Times {
    /// Time of the last close.
    closed: Option<Instant>,
    /// End of the enforced open time.
    rest: Option<Instant>,
}

/// Fails if this cannot be the number of a cut.
pub(crate) fn check_number(cut: u64) -> Result<()> {
    if cut != OPEN {
        return Ok(());
    }
    Err(Error::new(Kind::Config, "invalid cut").expected("any number but 0", cut))
}

impl Gate {
    /// Holds writes until [`Gate::open`], or until the time is over.
    pub(crate) fn close(self: &Arc<Self>, cut: u64, hold: Duration) -> Result<()> {
        check_number(cut)?;
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, present) = (Instant::now(), self.cut.load(Ordering::Acquire));
        if let Some(left) = times.rest.and_then(|rest| rest.checked_duration_since(now))
            && present != cut
            && !left.is_zero()
        {
            let why = format!("writes were held a moment ago, and pass for {REST} times as long");
            let left = left.as_millis() as u64 + 1;
            let error = Error::new(Kind::Unavailable, why);
            return Err(error.expected(format!("a hold in {left} ms"), "one now").retry_after_ms(left));
        }
        match self.cut.compare_exchange(OPEN, cut, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => times.closed = Some(now),
            Err(present) if present == cut => return Ok(()),
            Err(_) => {
                let error = Error::new(Kind::Unavailable, "another cut is about to begin");
                return Err(error.retry_after_ms(RETRY_AFTER_MS));
            }
        }
        drop(times);
        let gate = self.clone();
        tokio::spawn(async move {
            let most = if fault("hold_unbounded") { hold } else { MAX_HOLD };
            tokio::time::sleep(hold.min(most)).await;
            gate.open(cut);
        });
        Ok(())
    }

    /// Releases the held writes. Returns false if they have passed already, which makes the cut void.
    pub(crate) fn open(&self, cut: u64) -> bool {
        self.open_after(cut, || ()).is_some()
    }

    /// The same, after work that is done while they are still held. `None`: they have passed already.
    pub(crate) fn open_after<T>(&self, cut: u64, work: impl FnOnce() -> T) -> Option<T> {
        // Locked before the exchange, so that the next hold sees the new rest.
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.holds(cut) {
            return None;
        }
        let done = work();
        self.cut.store(OPEN, Ordering::Release);
        let (now, closed) = (Instant::now(), times.closed.take());
        times.rest = closed.map(|closed| now + REST * now.duration_since(closed));
        drop(times);
        self.opened.notify_waiters();
        Some(done)
    }

    /// Returns whether writes are held for this cut.
    pub(crate) fn holds(&self, cut: u64) -> bool {
        cut != OPEN && self.cut.load(Ordering::Acquire) == cut
    }

    fn is_open(&self) -> bool {
        self.cut.load(Ordering::Acquire) == OPEN
    }

    /// Waits while it is closed.
    pub(crate) async fn pass(&self) {
        while !self.is_open() {
            let opened = self.opened.notified();
            if self.is_open() {
                return;
            }
            opened.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_gate_is_closed_for_one_cut_and_not_for_ever() {
        let gate = Arc::new(Gate::default());
        gate.pass().await;
        assert_eq!(gate.close(0, MAX_HOLD).unwrap_err().kind, Kind::Config);
        gate.close(1, MAX_HOLD).unwrap();
        gate.close(1, MAX_HOLD).unwrap();
        assert_eq!(gate.close(2, MAX_HOLD).unwrap_err().kind, Kind::Unavailable);
        let waiting = tokio::spawn({
            let gate = gate.clone();
            async move { gate.pass().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished() && !gate.open(2) && !gate.open(0));
        assert!(gate.open(1) && !gate.open(1) && !gate.open(0));
        waiting.await.unwrap();
        close(&gate, 3, Duration::from_millis(1)).await;
        gate.pass().await;
        assert!(!gate.open(3));
    }

    /// Closes the gate as soon as its rest is over.
    async fn close(gate: &Arc<Gate>, cut: u64, hold: Duration) -> Duration {
        let mut waited = Duration::ZERO;
        while let Err(error) = gate.close(cut, hold) {
            assert_eq!(error.kind, Kind::Unavailable);
            let pause = Duration::from_millis(error.retry_after_ms.unwrap());
            waited += pause;
            tokio::time::sleep(pause).await;
        }
        waited
    }

    #[tokio::test]
    async fn writes_pass_for_nine_times_as_long_as_they_were_held() {
        const HOLD: Duration = Duration::from_millis(100);
        let gate = Arc::new(Gate::default());
        for cut in 1..4 {
            let begin = Instant::now();
            let waited = close(&gate, cut, HOLD).await;
            assert!(cut == 1 || waited >= (REST - 1) * HOLD, "cut {cut} waited {waited:?}");
            gate.pass().await;
            assert!(begin.elapsed() >= HOLD);
        }
    }

    #[tokio::test]
    async fn a_hold_ends_by_itself() {
        let gate = Arc::new(Gate::default());
        let begin = Instant::now();
        gate.close(1, Duration::from_hours(1)).unwrap();
        tokio::time::timeout(Duration::from_mins(1), gate.pass()).await.unwrap();
        assert!(begin.elapsed() >= MAX_HOLD);
        assert!(gate.close(2, MAX_HOLD).unwrap_err().retry_after_ms > Some(1000));
    }
}
