//! What a shard is beside its slices: its sessions, which slices it holds and why, and on shard 0 the map. An [`Event`]
//! changes it; the log keeps the events, a snapshot the catalog.

use fastps_core::tensor::TensorSpec;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A change of the catalog.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A client's session began.
    SessionBegan(u64),
    /// It ended: what slices remember of the client is forgotten.
    SessionEnded(u64),
    /// Slices were made for a reservation.
    Reserved(u64, Reservation),
    /// All their initial values are here.
    Sealed(u64),
    /// The tensor is known to exist.
    Committed(u64),
    /// Slices were freed.
    Dropped(Vec<u64>),
    /// Shard 0: a tensor exists, by its reservation.
    Entered(u64, Holding),
    /// Shard 0: it does not, any more.
    Removed(Arc<str>),
}

/// Slices of one tensor that the shard holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reservation {
    /// The tensor.
    pub spec: TensorSpec,
    /// Its group as frames carry it.
    pub group: u32,
    /// Identifier and index in the tensor.
    pub slices: Vec<(u64, u64)>,
    /// How far the registration is.
    pub stage: Stage,
}

/// How far a registration is, as the shard knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Initial values are missing.
    Open,
    /// They are here; whether the tensor exists, shard 0 knows.
    Sealed,
    /// It does.
    Committed,
}

/// A tensor in the map of shard 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holding {
    /// The tensor.
    pub spec: TensorSpec,
    /// Its group as frames carry it.
    pub group: u32,
    /// The identifier of each slice.
    pub slices: Vec<u64>,
    /// The shard of each slice.
    pub shards: Vec<u32>,
}

/// What a shard is beside its slices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Catalog {
    /// Clients that have a session.
    pub sessions: BTreeSet<u64>,
    /// The slices that are here, by reservation.
    pub reservations: BTreeMap<u64, Reservation>,
    /// Shard 0: tensors by reservation.
    pub map: BTreeMap<u64, Holding>,
}

impl Catalog {
    /// Takes a change. One that is there already changes nothing.
    pub fn apply(&mut self, event: &Event) {
        match event {
            Event::SessionBegan(client) => drop(self.sessions.insert(*client)),
            Event::SessionEnded(client) => drop(self.sessions.remove(client)),
            Event::Reserved(id, reservation) => {
                self.reservations.entry(*id).or_insert_with(|| reservation.clone());
            }
            Event::Sealed(id) => self.reach(*id, Stage::Sealed),
            Event::Committed(id) => self.reach(*id, Stage::Committed),
            Event::Dropped(slices) => {
                let gone: BTreeSet<_> = slices.iter().collect();
                self.reservations.retain(|_, reservation| {
                    reservation.slices.retain(|(id, _)| !gone.contains(id));
                    !reservation.slices.is_empty()
                });
            }
            Event::Entered(id, holding) => {
                self.map.entry(*id).or_insert_with(|| holding.clone());
            }
            Event::Removed(name) => self.map.retain(|_, holding| holding.spec.name != *name),
        }
    }

    fn reach(&mut self, id: u64, stage: Stage) {
        if let Some(reservation) = self.reservations.get_mut(&id)
            && reservation.stage != Stage::Committed
        {
            reservation.stage = stage;
        }
    }

    /// All slices that are here: identifier, index in the tensor, and the reservation.
    pub fn slices(&self) -> impl Iterator<Item = (u64, usize, &Reservation)> {
        self.reservations.values().flat_map(|r| r.slices.iter().map(move |(id, k)| (*id, *k as usize, r)))
    }
}
