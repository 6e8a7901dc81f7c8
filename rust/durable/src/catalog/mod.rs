//! State of a shard besides its slices: sessions, the reservations of its slices and, on shard 0, the map.
//! The log stores the [`Event`]s that change the catalog; a snapshot stores the catalog itself.

mod ended;
mod event;
mod index;
pub(crate) mod secret;

pub use ended::Ended;
pub use event::{CoordinatorState, Event, Holding, ListedSpace, Member, Reservation, Stage};

use crate::catalog::index::Index;
use crate::catalog::secret::SecretHash;
use serde::{Deserialize, Serialize};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// State of a shard besides its slices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Catalog {
    /// Clients with a session.
    pub sessions: BTreeSet<u64>,
    /// Hashes of the session secrets. Sessions opened by servers that predate secrets have none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<u64, SecretHash>,
    /// Names of clients with a session, in a log that keeps history.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub names: BTreeMap<u64, Arc<str>>,
    /// Incarnations whose sessions have ended.
    #[serde(default, skip_serializing_if = "Ended::is_empty")]
    pub ended: Ended,
    /// Reservations of the slices on this shard.
    pub reservations: BTreeMap<u64, Reservation>,
    /// Shard 0: all tensors, by reservation.
    pub map: BTreeMap<u64, Holding>,
    /// Workers with places in groups.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<Member>,
    /// Groups that once had as many workers as their mode needs: they no longer wait for workers that left.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub complete: BTreeSet<u32>,
    /// Shard 0: the open spaces of vectors, by identifier.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spaces: BTreeMap<u64, ListedSpace>,
    /// Identity of the cluster that the slices belong to; 0: not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cluster_id: u64,
    #[serde(skip)]
    pub(crate) index: Index,
}

impl Catalog {
    /// A cluster has the identity of the first directory of shard 0, and keeps it in copies of it.
    pub(crate) fn identified(mut self, shard: u32, directory: u64) -> Self {
        if shard == 0 && self.cluster_id == 0 {
            self.cluster_id = directory;
        }
        self
    }

    /// Applies an event. An event that was applied before changes nothing.
    pub fn apply(&mut self, event: &Event) {
        match event {
            Event::SessionBegan(client) => drop(self.sessions.insert(*client)),
            Event::SessionOpened(client, secret) => {
                self.sessions.insert(*client);
                self.secrets.entry(*client).or_insert(*secret);
            }
            Event::Named(client, name) => drop(self.names.insert(*client, name.clone())),
            Event::SessionEnded(client) => drop(self.end_session(*client)),
            Event::SessionOver { client, at, remembered } => {
                if self.end_session(*client) {
                    self.ended.add(*client, *at, *remembered);
                }
            }
            Event::Reserved(id, reservation) => {
                if !self.reservations.contains_key(id) {
                    self.index.reserved(*id, reservation);
                    self.reservations.insert(*id, reservation.clone());
                }
            }
            Event::Sealed(id) => self.reach(*id, Stage::Sealed),
            Event::Committed(id) => self.reach(*id, Stage::Committed),
            Event::Dropped(slices) => {
                let gone: BTreeSet<_> = slices.iter().collect();
                for id in self.index.dropped(slices, &self.reservations) {
                    if let Entry::Occupied(mut reservation) = self.reservations.entry(id) {
                        reservation.get_mut().slices.retain(|(slice, _)| !gone.contains(slice));
                        if reservation.get().slices.is_empty() {
                            reservation.remove();
                        }
                    }
                }
            }
            Event::Entered(id, holding) => {
                if !self.map.contains_key(id) {
                    self.index.entered(*id, holding);
                    self.map.insert(*id, holding.clone());
                }
            }
            Event::Removed(name) => {
                if let Some(id) = self.index.removed(name, &self.map) {
                    self.map.remove(&id);
                }
            }
            Event::Joined(Member { client, group, seat }, complete) => {
                let member = Member { client: *client, group: *group, seat: seat.clone() };
                let key = (*client, *group, member.is_warm());
                match self.members.iter_mut().find(|m| (m.client, m.group, m.is_warm()) == key) {
                    Some(present) => *present = member,
                    None => self.members.push(member),
                }
                if *complete {
                    self.complete.insert(*group);
                }
            }
            Event::Left { client, group, warm } => {
                self.leave(|m| (m.client, m.group, m.is_warm()) == (*client, *group, *warm));
            }
            Event::SpaceOpened(id, space) => {
                self.spaces.entry(*id).or_insert_with(|| space.clone());
            }
            Event::SeatTaken { space, term, holder, client, key } => {
                if let Some(space) = self.spaces.get_mut(space) {
                    (space.term, space.holder) = (*term, holder.clone());
                    (space.coordinator, space.key) = (*client, *key);
                }
            }
            Event::SeatLeft(id) => {
                if let Some(space) = self.spaces.get_mut(id) {
                    space.coordinator = 0;
                }
            }
            Event::StateStored(id, state) => {
                if let Some(space) = self.spaces.get_mut(id) {
                    space.state.clone_from(state);
                }
            }
            Event::SpaceClosed(id) => drop(self.spaces.remove(id)),
            Event::ClusterLearned(id) => self.cluster_id = *id,
        }
    }

    /// False: the client has no session.
    fn end_session(&mut self, client: u64) -> bool {
        self.secrets.remove(&client);
        self.names.remove(&client);
        self.leave(|member| member.client == client);
        for space in self.spaces.values_mut().filter(|space| space.coordinator == client) {
            space.coordinator = 0;
        }
        self.sessions.remove(&client)
    }

    fn leave(&mut self, gone: impl Fn(&Member) -> bool) {
        self.members.retain(|member| !gone(member));
        let members = &self.members;
        self.complete
            .retain(|group| members.iter().any(|member| member.group == *group && !member.is_warm()));
    }

    /// Ends all that belongs to clients or to the cluster: what remains are tensors, and the names of clients.
    pub(crate) fn leave_clients(&mut self) {
        let Self { names, reservations, map, index, .. } = std::mem::take(self);
        *self = Self { names, reservations, map, index, ..Self::default() };
    }

    fn reach(&mut self, id: u64, stage: Stage) {
        if let Some(reservation) = self.reservations.get_mut(&id)
            && reservation.stage != Stage::Committed
        {
            reservation.stage = stage;
        }
    }

    /// Bytes of the slices' values and optimizer state.
    pub fn bytes(&self) -> u64 {
        let of = |(_, k, held): (u64, usize, &Reservation)| {
            held.spec.bytes_with_state(held.spec.slice_range(k).len()) as u64
        };
        self.slices().map(of).sum()
    }

    /// All slices on this shard: identifier, index in the tensor, and reservation.
    pub fn slices(&self) -> impl Iterator<Item = (u64, usize, &Reservation)> {
        self.reservations.values().flat_map(|r| r.slices.iter().map(move |(id, k)| (*id, *k as usize, r)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastps_core::optim::{Optimizer, Sgd};
    use fastps_core::tensor::TensorSpec;

    fn spec(name: &str) -> TensorSpec {
        TensorSpec::new(name, [1], Optimizer::Sgd(Sgd::default()))
    }

    fn reserved(id: u64, slices: &[u64]) -> Event {
        let slices = slices.iter().map(|slice| (*slice, 0)).collect();
        let reservation = Reservation { spec: spec("w"), group: 1, slices, stage: Stage::Open };
        Event::Reserved(id, reservation)
    }

    fn entered(id: u64, name: &str) -> Event {
        Event::Entered(id, Holding { spec: spec(name), group: 1, slices: vec![id], shards: vec![0] })
    }

    #[test]
    fn an_incarnation_ends_once() {
        let mut catalog = Catalog::default();
        let over = |client, remembered| Event::SessionOver { client, at: 5, remembered };
        for event in [Event::SessionBegan(1), over(1, 2), over(1, 2), over(7, 2), Event::SessionBegan(2)] {
            catalog.apply(&event);
        }
        let listed = |catalog: &Catalog| catalog.ended.iter().map(|(client, _)| client).collect::<Vec<_>>();
        assert_eq!((listed(&catalog), catalog.sessions.len()), (vec![1], 1));
        catalog.apply(&over(2, 1));
        assert_eq!(listed(&catalog), [2]);
    }

    #[test]
    fn a_space_keeps_the_last_state_of_its_coordinators() {
        let mut catalog = Catalog::default();
        let bytes = |bytes: &[u8]| CoordinatorState::new(&bytes.into());
        let opened = ListedSpace {
            name: "s".into(),
            tensors: vec!["w".into()],
            vectors: vec!["g".into()],
            keep_for_ms: 5,
            opener: 3,
            term: 0,
            holder: "".into(),
            coordinator: 0,
            key: None,
            state: CoordinatorState::default(),
        };
        let key = Some(SecretHash::of(b"its own"));
        let seat = |term| Event::SeatTaken { space: 7, term, holder: "c".into(), client: 4, key };
        let stored = |state: &[u8]| Event::StateStored(7, bytes(state));
        for event in [
            Event::SpaceOpened(7, opened.clone()),
            seat(1),
            stored(b"one"),
            Event::SpaceOpened(7, opened.clone()),
            seat(2),
            stored(&[0xFF, 0]),
            Event::StateStored(8, bytes(b"unknown")),
        ] {
            let written = serde_json::to_vec(&event).unwrap();
            catalog.apply(&serde_json::from_slice(&written).unwrap());
        }
        let catalog: Catalog = serde_json::from_slice(&serde_json::to_vec(&catalog).unwrap()).unwrap();
        let state = bytes(&[0xFF, 0]);
        let written = serde_json::to_string(&state).unwrap();
        assert_eq!(written, r#"{"Hex":"ff00"}"#);
        for (text, bytes) in [
            (r#"{"Bytes":[255,0]}"#, Some(&[0xFF, 0][..])),
            (r#"{"Text":"a"}"#, Some(b"a")),
            (r#"{"Hex":"0a"}"#, Some(b"\n")),
            (r#"{"Hex":"0"}"#, None),
            (r#"{"Hex":"0g"}"#, None),
        ] {
            let read = serde_json::from_str::<CoordinatorState>(text).ok();
            assert_eq!(read.map(|state| state.bytes().to_vec()), bytes.map(<[u8]>::to_vec));
        }
        assert_eq!(*state.bytes(), [0xFF, 0]);
        let listed = ListedSpace { term: 2, holder: "c".into(), coordinator: 4, key, state, ..opened };
        assert_eq!(catalog.spaces[&7], listed);
        for ends in [Event::SessionEnded(4), Event::SeatLeft(7)] {
            let mut catalog = catalog.clone();
            catalog.apply(&ends);
            assert_eq!(catalog.spaces[&7], ListedSpace { coordinator: 0, ..listed.clone() });
        }
        let mut catalog = catalog;
        catalog.apply(&Event::SpaceClosed(7));
        assert!(catalog.spaces.is_empty());
    }

    #[test]
    fn events_find_reservations_and_tensors_before_and_after_the_first_lookup() {
        let mut catalog = Catalog::default();
        let apply = |catalog: &mut Catalog, events: &[Event]| events.iter().for_each(|e| catalog.apply(e));
        let left = |catalog: &Catalog| {
            let slices: Vec<_> = catalog.slices().map(|(id, ..)| id).collect();
            (slices, catalog.map.keys().copied().collect::<Vec<_>>())
        };
        apply(&mut catalog, &[reserved(1, &[10, 11]), reserved(2, &[20]), entered(1, "a"), entered(2, "b")]);
        apply(&mut catalog, &[Event::Dropped(vec![11, 4711]), Event::Removed("a".into())]);
        assert_eq!(left(&catalog), (vec![10, 20], vec![2]));
        // After the first look-up, and in a copy.
        apply(&mut catalog, &[reserved(3, &[30, 31]), reserved(3, &[32]), entered(3, "a")]);
        let mut copy = catalog.clone();
        for catalog in [&mut catalog, &mut copy] {
            apply(catalog, &[Event::Dropped(vec![31, 10, 20]), Event::Removed("b".into())]);
            apply(catalog, &[Event::Removed("none".into()), Event::Dropped(vec![31])]);
            assert_eq!(left(catalog), (vec![30], vec![3]));
            apply(catalog, &[Event::Dropped(vec![30]), Event::Removed("a".into())]);
            assert_eq!(left(catalog), (vec![], vec![]));
            assert!(catalog.reservations.is_empty());
        }
    }
}
