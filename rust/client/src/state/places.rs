//! A client's places in groups of workers, as its links and calls share them.

use crate::state::runtime::lock;
use crate::state::shared::Shared;
use fastps_core::error::{Error, Kind};
use fastps_core::mode::{Mode, PlaceRequest};
use fastps_proto::v1 as pb;
use std::sync::Arc;
use std::sync::atomic::Ordering;

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

impl Shared {
    /// Marks places in waiting modes as lost everywhere once one shard has forgotten the client.
    pub(crate) fn lose_places(&self) {
        let mut places = lock(&self.places);
        let waits = |mode| matches!(mode, Mode::Sync(_) | Mode::Bounded { .. });
        places.iter_mut().for_each(|place| place.lost |= waits(place.seat.mode));
        self.note_lost_places(&places);
    }

    pub(crate) fn note_lost_places(&self, places: &[Place]) {
        self.some_place_is_lost.store(places.iter().any(|place| place.lost), Ordering::Release);
    }

    /// Error if the frame is a gradient of a worker whose place is lost.
    pub(crate) fn fences(&self, header: &pb::Header) -> Option<Error> {
        if !self.some_place_is_lost.load(Ordering::Acquire) || header.kind() != pb::Kind::Gradient {
            return None;
        }
        let lost = lock(&self.places).iter().any(|place| place.lost && place.group == header.group);
        let why =
            "the worker's lease ran out, and the others continued without it: it must join its group again";
        lost.then(|| Error::new(Kind::Lease, why))
    }
}

pub(crate) fn is_warm(mode: Mode) -> bool {
    matches!(mode, Mode::WarmStart { .. })
}
