//! A client's places in groups of workers.

use crate::state::runtime::lock;
use fastps_core::error::{Error, Kind};
use fastps_core::mode::{Mode, PlaceRequest};
use fastps_proto::v1 as pb;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A place in a group.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) group: u32,
    /// Group name, kept because the map forgets a group with its last tensor.
    pub(crate) name: Arc<str>,
    pub(crate) seat: PlaceRequest,
    /// Steps taken.
    pub(crate) clock: u64,
    /// Steps that shard 0 has acknowledged.
    pub(crate) told: u64,
    /// Set when a server has forgotten the place: other workers continue without this one until it rejoins.
    pub(crate) lost: bool,
}

impl Place {
    pub(crate) fn is(&self, group: u32, warm: bool) -> bool {
        self.group == group && is_warm(self.seat.mode) == warm
    }

    /// Rejoins. A restarted server starts its clock at 0; otherwise only the last report may be missing.
    pub(crate) fn rejoined(&mut self, clock: u64) {
        self.clock = if clock < self.told { clock } else { self.clock.max(clock) };
        self.told = clock;
    }

    /// Returns whether the shard knows the place: only `Sync` places are registered on shards other than 0.
    pub(crate) fn concerns(&self, shard: u32) -> bool {
        shard == 0 || matches!(self.seat.mode, Mode::Sync(_))
    }
}

/// The client's places, at most one per group and phase.
#[derive(Debug, Default)]
pub(crate) struct Places {
    all: Mutex<Vec<Place>>,
    some_is_lost: AtomicBool,
}

impl Places {
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.all).is_empty()
    }

    /// Keeps a place instead of an earlier one, unless it was lost already.
    pub(crate) fn take(&self, place: Place, is_lost: impl FnOnce() -> bool) -> bool {
        let mut places = lock(&self.all);
        // Checked under the lock of `lose`, so that no loss is missed.
        if is_lost() {
            return false;
        }
        places.retain(|known| !known.is(place.group, is_warm(place.seat.mode)));
        places.push(place);
        self.note_lost(&places);
        true
    }

    pub(crate) fn leave(&self, group: u32, warm: bool) -> Vec<Place> {
        let mut places = lock(&self.all);
        let left = places.extract_if(.., |place| place.is(group, warm)).collect();
        self.note_lost(&places);
        left
    }

    /// Takes steps. `None` without a place.
    pub(crate) fn advance(&self, group: u32, warm: bool, steps: u64) -> Option<Place> {
        let mut places = lock(&self.all);
        let place = places.iter_mut().find(|place| place.is(group, warm))?;
        // A server may have reported any number.
        place.clock = place.clock.saturating_add(steps);
        Some(place.clone())
    }

    pub(crate) fn change(&self, group: u32, warm: bool, change: impl FnMut(&mut Place)) {
        lock(&self.all).iter_mut().filter(|known| known.is(group, warm)).for_each(change);
    }

    /// Number of the group of this name, if the client has a place in it.
    pub(crate) fn group(&self, name: &str) -> Option<u32> {
        lock(&self.all).iter().find(|place| *place.name == *name).map(|place| place.group)
    }

    /// Places at a shard that are not lost.
    pub(crate) fn held_at(&self, shard: u32) -> Vec<Place> {
        let held = |place: &&Place| place.concerns(shard) && !place.lost;
        lock(&self.all).iter().filter(held).cloned().collect()
    }

    /// Marks places in waiting modes as lost everywhere once one shard has forgotten the client.
    pub(crate) fn lose(&self) {
        let mut places = lock(&self.all);
        let waits = |mode| matches!(mode, Mode::Sync(_) | Mode::Bounded { .. });
        places.iter_mut().for_each(|place| place.lost |= waits(place.seat.mode));
        self.note_lost(&places);
    }

    fn note_lost(&self, places: &[Place]) {
        self.some_is_lost.store(places.iter().any(|place| place.lost), Ordering::Release);
    }

    /// Error if the frame is a gradient of a worker whose place is lost.
    pub(crate) fn fences(&self, header: &pb::Header) -> Option<Error> {
        if !self.some_is_lost.load(Ordering::Acquire) || header.kind() != pb::Kind::Gradient {
            return None;
        }
        let lost = lock(&self.all).iter().any(|place| place.lost && place.group == header.group);
        let why =
            "the worker's lease ran out, and the others continued without it: it must join its group again";
        lost.then(|| Error::new(Kind::Lease, why))
    }
}

pub(crate) fn is_warm(mode: Mode) -> bool {
    matches!(mode, Mode::WarmStart { .. })
}
