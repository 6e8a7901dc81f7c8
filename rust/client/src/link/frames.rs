//! A link's frames by tag, and which pushes are unanswered.

use crate::link::pending::Pending;
use std::collections::BTreeMap;
use std::ops::Deref;

/// The frames that wait to be sent or answered, questions about pushes in doubt included.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    by_tag: BTreeMap<u64, Pending>,
    /// How many of them there are for each push, by its sequence number.
    unanswered: BTreeMap<u64, usize>,
}

impl Deref for Frames {
    type Target = BTreeMap<u64, Pending>;

    fn deref(&self) -> &Self::Target {
        &self.by_tag
    }
}

impl Frames {
    pub(crate) fn insert(&mut self, tag: u64, pending: Pending) {
        if pending.sender.sequence > 0 {
            *self.unanswered.entry(pending.sender.sequence).or_default() += 1;
        }
        self.by_tag.insert(tag, pending);
    }

    pub(crate) fn remove(&mut self, tag: u64) -> Option<Pending> {
        let pending = self.by_tag.remove(&tag)?;
        self.forget(pending.sender.sequence);
        Some(pending)
    }

    /// Removes all that `which` selects, in order.
    pub(crate) fn extract(&mut self, which: impl Fn(&Pending) -> bool) -> Vec<Pending> {
        let extracted: Vec<_> = self.by_tag.extract_if(.., |_, pending| which(pending)).collect();
        for (_, pending) in &extracted {
            self.forget(pending.sender.sequence);
        }
        extracted.into_iter().map(|(_, pending)| pending).collect()
    }

    fn forget(&mut self, sequence: u64) {
        if let Some(count) = self.unanswered.get_mut(&sequence) {
            *count -= 1;
            if *count == 0 {
                self.unanswered.remove(&sequence);
            }
        }
    }

    /// The first frame from this tag on.
    pub(crate) fn next(&mut self, tag: u64) -> Option<(u64, &mut Pending)> {
        self.by_tag.range_mut(tag..).next().map(|(tag, pending)| (*tag, pending))
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut Pending> {
        self.by_tag.values_mut()
    }

    /// The number up to which all pushes are answered; a frame that waits has a larger one.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.unanswered.first_key_value().map_or(0, |(first, _)| first - 1)
    }
}
