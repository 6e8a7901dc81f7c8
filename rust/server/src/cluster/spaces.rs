//! The spaces of vectors, which shard 0 lists: they outlive its process with what their coordinators stored,
//! and their coordinators for the time that these have asked for. Other shards close what it does not list.

use crate::cluster::node::Node;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::Meter;
use fastps_core::spaces::{Seat, SpaceSpec, Spaces};
use fastps_core::tensor::{Space, SpaceId};
use fastps_core::verbs::SpaceInfo;
use fastps_durable::{CoordinatorState, Event, ListedSpace};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The spaces of a cluster.
#[derive(Debug)]
pub(crate) struct SpaceTable {
    spaces: Mutex<Spaces>,
    /// Since when spaces have no coordinator.
    vacant: Mutex<BTreeMap<SpaceId, Instant>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SpaceTable {
    /// The spaces of an earlier process; identifiers of new ones count up from `run`.
    pub(crate) fn restore(run: u64, meter: Arc<Meter>, listed: BTreeMap<u64, ListedSpace>) -> Result<Self> {
        let mut spaces = Spaces::new(run, meter);
        for (id, listed) in listed {
            let ListedSpace { name, tensors, vectors, keep_for_ms, term, holder, state } = listed;
            let space = Arc::new(Space { id: SpaceId(id), name, vectors });
            let spec = SpaceSpec { space, tensors, keep_for_ms };
            spaces.restore(spec, Seat { term, state: state.bytes() }, holder)?;
        }
        Ok(Self { spaces: Mutex::new(spaces), vacant: Mutex::default() })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Spaces> {
        locked(&self.spaces)
    }

    /// Those whose coordinator has been gone for as long as they are kept.
    fn outdated(&self, now: Instant) -> Vec<SpaceSpec> {
        let all = self.lock().list();
        let mut vacant = locked(&self.vacant);
        vacant.retain(|id, _| all.iter().any(|(spec, holder)| spec.space.id == *id && holder.is_none()));
        let mut is_outdated = |spec: &SpaceSpec| {
            let since = *vacant.entry(spec.space.id).or_insert(now);
            now.duration_since(since) >= Duration::from_millis(spec.keep_for_ms)
        };
        let vacated = all.into_iter().filter(|(_, holder)| holder.is_none()).map(|(spec, _)| spec);
        vacated.filter(|spec| is_outdated(spec)).collect()
    }
}

/// The opening of a space as the log has it.
pub(crate) fn opened(spec: &SpaceSpec) -> Event {
    let SpaceSpec { space, tensors, keep_for_ms } = spec;
    let listed = ListedSpace {
        name: space.name.clone(),
        tensors: tensors.clone(),
        vectors: space.vectors.clone(),
        keep_for_ms: *keep_for_ms,
        term: 0,
        holder: "".into(),
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
        self.shard.close_space(space);
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

    /// Those of these spaces that are not open.
    pub(crate) fn closed_of(&self, spaces: &[u64]) -> Result<Vec<u64>> {
        let listed = self.spaces()?;
        Ok(spaces.iter().copied().filter(|id| listed.spec(SpaceId(*id)).is_err()).collect())
    }

    /// Closes spaces whose coordinator has been gone for too long.
    pub(crate) fn sweep_spaces(&self, now: Instant) {
        if self.map.is_none() {
            return;
        }
        for spec in self.space_table.outdated(now) {
            let name = &spec.space.name;
            tracing::info!(shard = self.index(), %name, "the space is closed: its coordinator does not return");
            self.close_space(spec.space.id);
        }
    }

    /// The spaces that slices have open here, for a question whether they still are.
    pub(crate) fn spaces_to_ask_about(&self) -> Vec<u64> {
        self.shard.open_spaces().into_iter().map(|space| space.0).collect()
    }
}
