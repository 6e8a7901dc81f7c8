//! The counters of a `hogwild` slice, in its own memory or in memory that other processes share.

use super::shared::Region;
use crate::base::sync::{Arc, AtomicU64};

/// The number of counters.
const COUNTS: usize = 8;

/// A cache line of counters; all start at 0.
#[derive(Debug)]
pub(crate) struct Counts(CountsMemory);

#[derive(Debug)]
enum CountsMemory {
    Own(Box<[AtomicU64; COUNTS]>),
    /// The region, and the byte at which the counters begin in it.
    Shared(Arc<Region>, usize),
}

impl Counts {
    /// Bytes of memory for the counters.
    pub(crate) const BYTES: usize = size_of::<u64>() * COUNTS;
    /// The index of [`Counts::version`].
    pub(crate) const VERSION: usize = 1;
    /// The index of [`Counts::assigns`].
    pub(crate) const ASSIGNS: usize = 2;

    pub(crate) fn own() -> Self {
        Self(CountsMemory::Own(Box::new(std::array::from_fn(|_| AtomicU64::new(0)))))
    }

    pub(crate) fn shared(region: Arc<Region>, at: usize) -> Self {
        Self(CountsMemory::Shared(region, at))
    }

    /// The number of optimizer steps.
    pub(crate) fn step(&self) -> &AtomicU64 {
        self.at(0)
    }

    /// The number of changes: steps and assignments.
    pub(crate) fn version(&self) -> &AtomicU64 {
        self.at(Self::VERSION)
    }

    /// The number of assignments.
    pub(crate) fn assigns(&self) -> &AtomicU64 {
        self.at(Self::ASSIGNS)
    }

    /// Counts pushes; the count picks the block at which a push begins, so that racing pushes do not walk in
    /// lockstep.
    pub(crate) fn turn(&self) -> &AtomicU64 {
        self.at(3)
    }

    /// The number of probed updates of the first 64 elements.
    pub(crate) fn probed(&self) -> &AtomicU64 {
        self.at(4)
    }

    /// The number of probed updates that no racing update overwrote. It is loaded and stored like a value, so
    /// a race loses its increments as it loses updates.
    pub(crate) fn kept(&self) -> &AtomicU64 {
        self.at(5)
    }

    fn at(&self, which: usize) -> &AtomicU64 {
        match &self.0 {
            CountsMemory::Own(counts) => &counts[which],
            CountsMemory::Shared(region, at) => &region.counters(*at, COUNTS)[which],
        }
    }
}
