//! The spaces of vectors, which shard 0 lists: they outlive its process with what their coordinators stored,
//! and their coordinators for the time that these have asked for. Other shards open none that it does not
//! list, close what it has closed, and ask it who the coordinator of a space is.

use crate::auth::budget::Held;
use crate::cluster::node::Node;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::Meter;
use fastps_core::spaces::{Seat, SeatKey, SpaceSpec, SpaceStanding, Spaces, VacantSpace};
use fastps_core::tensor::{Space, SpaceId};
use fastps_core::verbs::SpaceInfo;
use fastps_durable::{CoordinatorState, Event, ListedSpace, SecretHash};
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The spaces of a cluster.
#[derive(Debug)]
pub(crate) struct SpaceTable {
    spaces: Mutex<Spaces>,
    /// Time at which spaces lost their coordinator.
    vacant: Mutex<BTreeMap<SpaceId, Instant>>,
    /// On other shards than shard 0: term and key of each confirmed coordinator.
    seats: Mutex<BTreeMap<SpaceId, (u64, SeatKey)>>,
    /// Memory of vectors on this shard, charged to principals with a limit.
    held: Mutex<BTreeMap<SpaceId, Vec<Held>>>,
    /// Time of the last search for idle replicas.
    swept: Mutex<Option<Instant>>,
}

/// Most confirmed coordinators that a shard remembers.
const MAX_KNOWN_SEATS: usize = 1 << 10;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SpaceTable {
    /// The spaces of an earlier process; identifiers of new ones count up from `run`. A coordinator whose
    /// session is alive keeps its seat.
    pub(crate) fn restore(
        run: u64,
        meter: Arc<Meter>,
        listed: BTreeMap<u64, ListedSpace>,
        is_live: impl Fn(u64) -> bool,
    ) -> Result<Self> {
        let mut spaces = Spaces::new(run, meter);
        for (id, listed) in listed {
            let ListedSpace { name, tensors, vectors, keep_for_ms, opener, .. } = listed;
            let ListedSpace { term, holder, coordinator, key, state, .. } = listed;
            let space = Arc::new(Space { id: SpaceId(id), name, vectors });
            let spec = SpaceSpec { space, tensors, keep_for_ms };
            let standing = SpaceStanding {
                opener,
                seat: Seat { term, state: state.bytes() },
                holder,
                coordinator: Some(coordinator).filter(|client| key.is_some() && is_live(*client)),
                key: key.map(|key| key.bytes()),
            };
            spaces.restore(spec, standing)?;
        }
        let (vacant, seats, held, swept) = Default::default();
        Ok(Self { spaces: Mutex::new(spaces), vacant, seats, held, swept })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Spaces> {
        locked(&self.spaces)
    }

    /// Spaces whose coordinator has been gone for their retention time, and unused ones without a client.
    fn outdated(&self, now: Instant, is_live: impl Fn(u64) -> bool) -> Vec<SpaceSpec> {
        let all = self.lock().vacant();
        let mut vacant = locked(&self.vacant);
        let ids: BTreeSet<_> = all.iter().map(|one| one.spec.space.id).collect();
        vacant.retain(|id, _| ids.contains(id));
        let mut is_outdated = |VacantSpace { spec, untaken_of }: &VacantSpace| {
            let since = *vacant.entry(spec.space.id).or_insert(now);
            now.duration_since(since) >= Duration::from_millis(spec.keep_for_ms)
                || untaken_of.is_some_and(|client| !is_live(client))
        };
        all.into_iter().filter(|one| is_outdated(one)).map(|one| one.spec).collect()
    }

    /// Keeps the memory of a space charged until it is closed.
    pub(crate) fn keep(&self, space: SpaceId, held: Vec<Held>) {
        if !held.is_empty() {
            locked(&self.held).entry(space).or_default().extend(held);
        }
    }

    /// Stores a coordinator that shard 0 has confirmed.
    fn confirm(&self, space: SpaceId, seat: (u64, SeatKey)) {
        let mut seats = locked(&self.seats);
        if seats.len() >= MAX_KNOWN_SEATS {
            seats.clear();
        }
        seats.insert(space, seat);
    }
}

/// The log record of an opened space.
pub(crate) fn opened(spec: &SpaceSpec, opener: u64) -> Event {
    let SpaceSpec { space, tensors, keep_for_ms } = spec;
    let listed = ListedSpace {
        name: space.name.clone(),
        tensors: tensors.clone(),
        vectors: space.vectors.clone(),
        keep_for_ms: *keep_for_ms,
        opener,
        term: 0,
        holder: "".into(),
        coordinator: 0,
        key: None,
        state: CoordinatorState::default(),
    };
    Event::SpaceOpened(space.id.0, listed)
}

impl Node {
    /// The spaces; only shard 0 lists them.
    pub(crate) fn spaces(&self) -> Result<MutexGuard<'_, Spaces>> {
        if self.map.is_none() {
            return Err(self.not_first("only shard 0 lists spaces of vectors"));
        }
        Ok(self.space_table.lock())
    }

    /// Removes a space from the list, and its vectors from this shard's slices.
    pub(crate) fn close_space(&self, space: SpaceId) {
        let listed = self.spaces().ok().and_then(|mut spaces| spaces.close(space));
        if listed.is_some() {
            self.files.step(|| Event::SpaceClosed(space.0));
        }
        locked(&self.space_table.seats).remove(&space);
        self.shard.close_space(space);
        locked(&self.space_table.held).remove(&space);
    }

    /// Fails unless the client with this secret was the last to take the space's seat, with this term.
    pub(crate) async fn check_coordinator(
        &self,
        (space, term): (SpaceId, u64),
        shown: Option<&SecretHash>,
    ) -> Result<()> {
        let key = shown.map(SecretHash::bytes).unwrap_or_default();
        if self.map.is_some() {
            return self.spaces()?.check_seat(space, term, &key);
        }
        if locked(&self.space_table.seats).get(&space) == Some(&(term, key)) {
            return Ok(());
        }
        let claim = pb::SeatClaim { space: space.0, term, secret_hash: key.to_vec().into() };
        let question = pb::SettleRequest { seat: Some(claim), ..Default::default() };
        let told = self.ask_first_for(question).await?;
        if let Some(refusal) = told.seat.and_then(|verdict| verdict.refusal) {
            return Err(convert::error_from_refusal(refusal));
        }
        self.space_table.confirm(space, (term, key));
        Ok(())
    }

    /// Checks a claim that another shard's client makes; only shard 0 can.
    pub(crate) fn judge(&self, claim: &pb::SeatClaim) -> Result<pb::SeatVerdict> {
        let pb::SeatClaim { space, term, secret_hash } = claim;
        let key = SeatKey::try_from(&secret_hash[..]).map_err(|_| {
            let error = Error::new(Kind::Frame, "the hash in a claim is not one of SHA-256");
            error.expected("32 bytes", format!("{} bytes", secret_hash.len()))
        })?;
        let refused = self.spaces()?.check_seat(SpaceId(*space), *term, &key).err();
        Ok(pb::SeatVerdict { refusal: refused.map(|error| convert::refusal(&error)) })
    }

    /// Gives up the client's seats, and removes its replicas.
    pub(crate) fn leave_spaces(&self, client: u64) -> Result<()> {
        let vacated = self.spaces()?.forget_client(client);
        for space in vacated {
            self.files.note(|| Event::SeatLeft(space.0));
        }
        Ok(())
    }

    /// Fails if a space is open over the tensor.
    pub(crate) fn check_no_space(&self, name: &str) -> Result<()> {
        let all = self.spaces()?.list();
        match all.iter().find(|(spec, _)| spec.tensors.iter().any(|tensor| **tensor == *name)) {
            None => Ok(()),
            Some((spec, _)) => {
                let message = format!("space {:?} is open over the tensor", spec.space.name);
                let error = Error::new(Kind::Precondition, message).tensor(name);
                Err(error.expected("a closed space", "an open one"))
            }
        }
    }

    /// The spaces after a name, in the order of names.
    pub(crate) fn spaces_after(&self, name: &str) -> Result<Vec<SpaceInfo>> {
        let all = self.spaces()?.list();
        let after = all.into_iter().filter(|(spec, _)| *spec.space.name > *name);
        Ok(after.map(|(spec, coordinator)| SpaceInfo { spec, coordinator }).collect())
    }

    /// The closed ones of these spaces.
    pub(crate) fn closed_of(&self, spaces: &[u64]) -> Result<Vec<u64>> {
        let listed = self.spaces()?;
        Ok(spaces.iter().copied().filter(|id| listed.spec(SpaceId(*id)).is_err()).collect())
    }

    /// Closes spaces whose coordinator has been gone for too long.
    pub(crate) fn sweep_spaces(&self, now: Instant) {
        if self.map.is_none() {
            return;
        }
        {
            let mut swept = locked(&self.space_table.swept);
            if swept.is_none_or(|at| now.duration_since(at) > self.sessions.lease()) {
                *swept = Some(now);
                self.space_table.lock().drop_idle_replicas();
            }
        }
        for spec in self.space_table.outdated(now, |client| self.sessions.is_live(client)) {
            let name = &spec.space.name;
            tracing::info!(shard = self.index(), %name, "the space is closed: its coordinator does not return");
            self.close_space(spec.space.id);
        }
    }

    /// The spaces open on slices here, to ask shard 0 about.
    pub(crate) fn spaces_to_ask_about(&self) -> Vec<u64> {
        self.shard.open_spaces().into_iter().map(|space| space.0).collect()
    }
}
