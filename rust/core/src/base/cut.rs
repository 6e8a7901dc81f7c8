//! A cut: the slices of a group as they were at one moment, while pushes go on.
//!
//! The moment is the store of a number that every change looks at, under its slice's lock. The first change
//! of a slice behind it, or whoever writes the cut, takes the slice's image before anything else. So the cut
//! has every change that was answered before the moment, and none that was sent on the strength of one that
//! it has not.

use crate::base::error::{Error, Kind, Result};
use crate::base::sync::{Arc, AtomicU64, Mutex, Ordering, lock};

/// The cuts of a shard, one at a time.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    /// How many there were.
    count: AtomicU64,
    /// The group of the one that is being written; changes together with the count.
    group: Mutex<Option<Arc<str>>>,
}

impl Cuts {
    /// The moment. Nobody may be at another one.
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

    /// No slice that comes along now belongs to it.
    pub(crate) fn end(&self) {
        *lock(&self.group) = None;
    }

    /// The last one, as a change looks at it.
    #[inline(always)]
    pub(crate) fn last(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// The last one, and whether it is being written and over this group.
    pub(crate) fn covers(&self, group: &str) -> (u64, bool) {
        let current = lock(&self.group);
        (self.last(), current.as_deref() == Some(group))
    }
}
