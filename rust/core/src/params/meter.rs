//! The memory of a shard, counted before it is taken.

use crate::error::{Error, Kind, Result};
use crate::sync::{Arc, AtomicU64, Ordering};

/// Bytes in use, and the most there may be.
#[derive(Debug)]
pub(crate) struct Meter {
    used: AtomicU64,
    limit: u64,
}

/// Bytes that were taken; given back when dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    meter: Arc<Meter>,
    bytes: u64,
}

impl Meter {
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { used: AtomicU64::new(0), limit })
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes `bytes`, or says how many there are.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Result<Charge> {
        let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(Charge { meter: self.clone(), bytes }),
            Err(used) => Err(Error::new(Kind::Capacity, "the shard's memory is full")
                .expected(
                    format!("at most {} free bytes of {}", self.limit.saturating_sub(used), self.limit),
                    format!("{bytes} bytes"),
                )
                .retry_after_ms(1000)),
        }
    }
}

impl Charge {
    /// Cuts a part off.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { meter: self.meter.clone(), bytes }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.meter.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
