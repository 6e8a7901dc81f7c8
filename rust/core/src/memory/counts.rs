//! The counters of a `hogwild` slice: its own, or in memory that other processes have, too.

use super::shared::Region;
use crate::base::sync::{Arc, AtomicU64};

/// How many there are.
const COUNTS: usize = 8;

/// A cache line of counters, all 0 at first.
#[derive(Debug)]
pub(crate) struct Counts(Place);

#[derive(Debug)]
enum Place {
    Own(Box<[AtomicU64; COUNTS]>),
    /// From this byte of the region on.
    Shared(Arc<Region>, usize),
}

impl Counts {
    /// Bytes of memory that they take.
    pub(crate) const BYTES: usize = size_of::<u64>() * COUNTS;
    /// Which of them is [`Counts::version`].
    pub(crate) const VERSION: usize = 1;
    /// Which of them is [`Counts::assigns`].
    pub(crate) const ASSIGNS: usize = 2;

    pub(crate) fn own() -> Self {
        Self(Place::Own(Box::new(std::array::from_fn(|_| AtomicU64::new(0)))))
    }

    pub(crate) fn shared(region: Arc<Region>, at: usize) -> Self {
        Self(Place::Shared(region, at))
    }

    /// Optimizer steps.
    pub(crate) fn step(&self) -> &AtomicU64 {
        self.at(0)
    }

    /// Changes: steps and assignments.
    pub(crate) fn version(&self) -> &AtomicU64 {
        self.at(Self::VERSION)
    }

    /// Changes that were assignments.
    pub(crate) fn assigns(&self) -> &AtomicU64 {
        self.at(Self::ASSIGNS)
    }

    /// Where the next push begins, so that racing pushes do not walk in lockstep.
    pub(crate) fn turn(&self) -> &AtomicU64 {
        self.at(3)
    }

    /// Updates of one block that were probed.
    pub(crate) fn probed(&self) -> &AtomicU64 {
        self.at(4)
    }

    /// Those of them that no racing update overwrote: itself loaded and stored as a value is.
    pub(crate) fn kept(&self) -> &AtomicU64 {
        self.at(5)
    }

    fn at(&self, which: usize) -> &AtomicU64 {
        match &self.0 {
            Place::Own(counts) => &counts[which],
            Place::Shared(region, at) => &region.counters(*at, COUNTS)[which],
        }
    }
}
