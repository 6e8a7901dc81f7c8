//! Accounts for the memory of a shard before it is allocated: one limit for all of it, and a count for each
//! purpose.

use crate::base::error::{Error, Kind, Result};
use crate::base::sync::{Arc, AtomicU64, Ordering};

/// A use of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Parameters, optimizer state, and one spare per `exact` slice.
    Slices,
    /// Values or state copied for readers, and versions that only readers keep alive.
    Copies,
    /// Encoded answers that wait to be sent.
    Answers,
    /// Pushes that a policy holds.
    Held,
    /// Sessions, and the leases on portions of samples.
    Identities,
    /// Windows and buffers of connections.
    Connections,
    /// Received frames that are not used yet, beyond one for each worker.
    Backlog,
    /// Memory that connections share with clients on this machine, and copies of values that these borrow.
    Rings,
    /// The map of tensors and groups; registrations in progress.
    Map,
    /// Vectors of spaces, and the sums of their batches.
    Vectors,
    /// What slices remember of their clients' pushes.
    Outcomes,
}

const PURPOSES: usize = 11;

/// Name of each purpose, in order.
const NAMES: [&str; PURPOSES] = [
    "slices",
    "copies",
    "answers",
    "held pushes",
    "clients and spaces",
    "connections",
    "received frames",
    "shared memory",
    "the map",
    "vectors",
    "outcomes of pushes",
];

/// Bytes in use, and their limit.
#[derive(Debug)]
pub struct Meter {
    used: AtomicU64,
    by: [AtomicU64; PURPOSES],
    limit: u64,
    /// Number of slices, each of which remembers its clients' pushes.
    pub(crate) slices: AtomicU64,
    /// Bytes for that in each slice, which nothing else may take.
    kept: AtomicU64,
}

/// Bytes taken from a meter; dropping the charge returns them.
#[derive(Debug)]
pub struct Charge {
    meter: Arc<Meter>,
    purpose: Purpose,
    bytes: u64,
}

impl Meter {
    /// A meter with nothing in use.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            used: AtomicU64::new(0),
            by: Default::default(),
            limit,
            slices: AtomicU64::new(0),
            kept: AtomicU64::new(0),
        })
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes in use for one purpose.
    pub fn used_for(&self, purpose: Purpose) -> u64 {
        self.by[purpose as usize].load(Ordering::Relaxed)
    }

    /// Most bytes that may be in use.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Number of slices.
    pub fn slices(&self) -> u64 {
        self.slices.load(Ordering::Relaxed)
    }

    /// Keeps so many bytes of each slice for the outcomes of its clients' pushes, in all at most an eighth of
    /// the memory: a shard may hold more slices than it has room for, if an earlier version admitted them.
    pub fn keep_for_outcomes(&self, bytes: u64) {
        self.kept.store(bytes, Ordering::Relaxed);
    }

    /// Most bytes that may be in use after something is taken for this purpose.
    fn limit_for(&self, purpose: Purpose) -> u64 {
        let kept = self.kept.load(Ordering::Relaxed);
        if kept == 0 || purpose == Purpose::Outcomes {
            return self.limit;
        }
        let kept = kept.saturating_mul(self.slices()).min(self.limit / 8);
        self.limit - kept.saturating_sub(self.used_for(Purpose::Outcomes))
    }

    /// Takes `bytes`, or fails with the number of free bytes.
    pub fn take(self: &Arc<Self>, purpose: Purpose, bytes: u64) -> Result<Charge> {
        let mut charge = Charge { meter: self.clone(), purpose, bytes: 0 };
        charge.grow_to(bytes)?;
        Ok(charge)
    }

    fn add(&self, purpose: Purpose, bytes: u64) -> Result<()> {
        let limit = self.limit_for(purpose);
        let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= limit);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => {
                self.by[purpose as usize].fetch_add(bytes, Ordering::Relaxed);
                Ok(())
            }
            Err(used) => Err(Error::new(Kind::Capacity, self.full())
                .expected(
                    format!("at most {} free bytes of {}", limit.saturating_sub(used), self.limit),
                    format!("{bytes} bytes"),
                )
                .retry_after_ms(1000)),
        }
    }
}

impl Meter {
    /// Text of a refusal: the purposes that use most.
    fn full(&self) -> String {
        let bytes = self.by.each_ref().map(|bytes| bytes.load(Ordering::Relaxed));
        let mut by: Vec<_> = NAMES.iter().zip(bytes).filter(|(_, bytes)| *bytes > 0).collect();
        by.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let uses = by.iter().take(3).map(|(name, bytes)| format!("{name} {bytes} bytes"));
        match uses.collect::<Vec<_>>().join(", ") {
            none if none.is_empty() => "the shard's memory is full".to_owned(),
            uses => format!("the shard's memory is full ({uses})"),
        }
    }
}

impl Charge {
    /// Bytes taken.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Grows the charge to `bytes`; does not shrink it.
    pub fn grow_to(&mut self, bytes: u64) -> Result<()> {
        if bytes > self.bytes {
            self.meter.add(self.purpose, bytes - self.bytes)?;
            self.bytes = bytes;
        }
        Ok(())
    }

    /// Returns the part above `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        if bytes < self.bytes {
            drop(self.split(self.bytes - bytes));
        }
    }

    /// Returns this many bytes.
    pub fn give_back(&mut self, bytes: u64) {
        drop(self.split(bytes));
    }

    /// Takes over another charge on the same meter, for the same purpose.
    pub fn absorb(&mut self, mut other: Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Splits off a part of the charge.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { meter: self.meter.clone(), purpose: self.purpose, bytes }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.meter.by[self.purpose as usize].fetch_sub(self.bytes, Ordering::Relaxed);
        self.meter.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
