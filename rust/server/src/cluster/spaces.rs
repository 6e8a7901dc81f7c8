//! The spaces of vectors, which shard 0 lists: they outlive its process with what their coordinators stored,
//! and their coordinators for the time that these have asked for. Other shards open none that it does not
//! list, close what it has closed, and ask it who the coordinator of a space is.

use crate::auth::budget::Held;
use fastps_core::error::Result;
use fastps_core::shard::Meter;
use fastps_core::spaces::{Seat, SeatKey, SpaceSpec, SpaceStanding, Spaces, VacantSpace};
use fastps_core::tensor::{Space, SpaceId};
use fastps_durable::{CoordinatorState, Event, ListedSpace};
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
    pub(crate) fn outdated(&self, now: Instant, is_live: impl Fn(u64) -> bool) -> Vec<SpaceSpec> {
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

    /// Drops replicas that have been idle for a lease; looks for them once a lease.
    pub(crate) fn drop_idle_replicas(&self, now: Instant, lease: Duration) {
        let mut swept = locked(&self.swept);
        if swept.is_none_or(|at| now.duration_since(at) > lease) {
            *swept = Some(now);
            self.lock().drop_idle_replicas();
        }
    }

    /// Returns whether shard 0 has confirmed this coordinator.
    pub(crate) fn is_confirmed(&self, space: SpaceId, seat: (u64, SeatKey)) -> bool {
        locked(&self.seats).get(&space) == Some(&seat)
    }

    /// Forgets the coordinator and the charges of a closed space.
    pub(crate) fn forget(&self, space: SpaceId) {
        locked(&self.seats).remove(&space);
        locked(&self.held).remove(&space);
    }

    /// Keeps the memory of a space charged until it is closed.
    pub(crate) fn keep(&self, space: SpaceId, held: Vec<Held>) {
        if !held.is_empty() {
            locked(&self.held).entry(space).or_default().extend(held);
        }
    }

    /// The spaces whose memory is charged.
    pub(crate) fn charged(&self) -> Vec<SpaceId> {
        locked(&self.held).keys().copied().collect()
    }

    /// Stores a coordinator that shard 0 has confirmed.
    pub(crate) fn confirm(&self, space: SpaceId, seat: (u64, SeatKey)) {
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
