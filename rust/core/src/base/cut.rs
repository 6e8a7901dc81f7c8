//! A cut: the slices of a group at one moment, taken while pushes continue.
//!
//! The moment is the increment of a counter that every change reads under its slice's lock. When a slice is
//! behind the counter, its first change, or the writer of the cut, captures the slice's image before anything
//! else happens. So the cut contains every change that was acknowledged before the moment, and no change that
//! a client sent after it saw the acknowledgement of one that the cut lacks.

use crate::base::error::{Error, Kind, Result};
use crate::base::sync::{Arc, AtomicU64, Mutex, Ordering, lock};

/// The cuts of a shard; at most one is written at a time.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    /// The number of cuts so far.
    count: AtomicU64,
    /// The group of the cut that is being written; changes together with `count`.
    group: Mutex<Option<Arc<str>>>,
}

impl Cuts {
    /// Begins a cut: the increment of `count` is its moment. Fails while another cut is being written.
    pub(crate) fn begin(&self, group: &str) -> Result<()> {
        let mut current = lock(&self.group);
        if let Some(other) = &*current {
            let why = format!("a cut over group {other:?} is being written");
            return Err(Error::new(Kind::Unavailable, why));
        }
        *current = Some(group.into());
        self.count.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Ends the cut. A slice that is created from now on does not belong to it.
    pub(crate) fn end(&self) {
        *lock(&self.group) = None;
    }

    /// The number of the last cut, as a change reads it.
    #[inline(always)]
    pub(crate) fn last(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// The number of the last cut, and whether that cut is being written and covers this group.
    pub(crate) fn covers(&self, group: &str) -> (u64, bool) {
        let current = lock(&self.group);
        (self.last(), current.as_deref() == Some(group))
    }
}
