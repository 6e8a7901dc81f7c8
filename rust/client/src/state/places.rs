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
    /// The group's, which the map does not know any more when its last tensor is gone.
    pub(crate) name: Arc<str>,
    pub(crate) seat: PlaceRequest,
    /// Steps taken.
    pub(crate) clock: u64,
    /// The steps that shard 0 is known to know of.
    pub(crate) told: u64,
    /// A server has forgotten it, so the others go on without this worker until it joins again, everywhere.
    pub(crate) lost: bool,
}

impl Place {
    pub(crate) fn is(&self, group: u32, warm: bool) -> bool {
        self.group == group && is_warm(self.seat.mode) == warm
    }

    /// Taken again where it may have been forgotten: a restarted server counts from the start; else the
    /// last step may just not have been told.
    pub(crate) fn rejoined(&mut self, clock: u64) {
        self.clock = if clock < self.told { clock } else { self.clock.max(clock) };
        self.told = clock;
    }

    /// Other shards need to know of what concerns pushes alone.
    pub(crate) fn concerns(&self, shard: u32) -> bool {
        shard == 0 || matches!(self.seat.mode, Mode::Sync(_))
    }
}

impl Shared {
    /// Places among workers that wait for each other end everywhere when one shard has forgotten the client.
    pub(crate) fn lose_places(&self) {
        let mut places = lock(&self.places);
        let waits = |mode| matches!(mode, Mode::Sync(_) | Mode::Bounded { .. });
        places.iter_mut().for_each(|place| place.lost |= waits(place.seat.mode));
        self.note_lost_places(&places);
    }

    pub(crate) fn note_lost_places(&self, places: &[Place]) {
        self.some_place_is_lost.store(places.iter().any(|place| place.lost), Ordering::Release);
    }

    /// Why a frame is not sent: it is a gradient of a worker whose place is lost.
    pub(crate) fn fences(&self, header: &pb::Header) -> Option<Error> {
        if !self.some_place_is_lost.load(Ordering::Acquire) || header.kind() != pb::Kind::Gradient {
            return None;
        }
        let lost = lock(&self.places).iter().any(|place| place.lost && place.group == header.group);
        let why =
            "the worker's lease ran out, and the others went on without it: it must join its group again";
        lost.then(|| Error::new(Kind::Lease, why))
    }
}

pub(crate) fn is_warm(mode: Mode) -> bool {
    matches!(mode, Mode::WarmStart { .. })
}
