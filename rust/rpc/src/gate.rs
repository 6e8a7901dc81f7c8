//! Holds the writes of a shard for a moment, so that all shards of a cluster can begin one cut: none of them takes anything
//! that was sent on the strength of what another one's part of the cut has not.
//!
//! A stream with a write to a held shard waits, with all that is behind it, so its order stays. Pulls that come first are answered.

use fastps_core::error::{Error, Kind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// Longest time that writes are held.
const LONGEST: Duration = Duration::from_secs(10);
/// When another cut may try again.
const RETRY_MS: u64 = 50;
/// Nothing is held.
const OPEN: u64 = 0;

/// One shard's.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// The cut that it is closed for.
    cut: AtomicU64,
    opened: Notify,
}

impl Gate {
    /// Holds what comes until [`Gate::open`], or until the time is over.
    pub(crate) fn close(self: &Arc<Self>, cut: u64, hold: Duration) -> Result<()> {
        if cut == OPEN {
            return Err(Error::new(Kind::Config, "invalid cut").expected("any number but 0", cut));
        }
        match self.cut.compare_exchange(OPEN, cut, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {}
            Err(present) if present == cut => return Ok(()),
            Err(_) => {
                let error = Error::new(Kind::Unavailable, "another cut is about to begin");
                return Err(error.retry_after_ms(RETRY_MS));
            }
        }
        let gate = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(hold.min(LONGEST)).await;
            gate.open(cut);
        });
        Ok(())
    }

    /// Lets everybody go on. False: they have gone on already, and the cut is void.
    pub(crate) fn open(&self, cut: u64) -> bool {
        let opened = self.cut.compare_exchange(cut, OPEN, Ordering::AcqRel, Ordering::Acquire);
        let was_closed = cut != OPEN && opened.is_ok();
        if was_closed {
            self.opened.notify_waiters();
        }
        was_closed
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
        assert_eq!(gate.close(0, LONGEST).unwrap_err().kind, Kind::Config);
        gate.close(1, LONGEST).unwrap();
        gate.close(1, LONGEST).unwrap();
        assert_eq!(gate.close(2, LONGEST).unwrap_err().kind, Kind::Unavailable);
        let waiting = tokio::spawn({
            let gate = gate.clone();
            async move { gate.pass().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished() && !gate.open(2) && !gate.open(0));
        assert!(gate.open(1) && !gate.open(1) && !gate.open(0));
        waiting.await.unwrap();
        gate.close(3, Duration::from_millis(1)).unwrap();
        gate.pass().await;
        assert!(!gate.open(3));
    }
}
