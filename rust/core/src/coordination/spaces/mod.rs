//! The meeting point of a space's coordinator and replicas, on shard 0: the coordinator's seat and state, and
//! the batch whose portions the replicas compute.
//!
//! A coordinator takes the seat of a space and with it a new term, which fences former coordinators. It asks
//! for one batch after the other; replicas take portions and report them with their next request. Both wait
//! here. A request that is repeated because its answer was lost changes nothing.

mod entry;
mod replicas;
mod seat;

use super::batch::{BatchTask, Finished, PortionFailure, ReplicaId};
use crate::base::error::{Error, Kind, Result, check_printable};
use crate::base::sync::Arc;
use crate::base::text;
use crate::memory::{Charge, Meter, Purpose};
use crate::tensor::{Space, SpaceId};
use entry::{AskedBatch, SpaceEntry};
use replicas::SpaceReplica;
pub use replicas::{GivenPortion, PortionReport, ReplicaAnswer, ReplicaRequest};
pub use seat::{Claimant, Seat, SeatKey, SeatRequest};
use std::collections::BTreeMap;
use std::fmt;

/// Most spaces at a time.
const MAX_SPACES: usize = 1 << 10;
/// Most that one client has opened.
const MAX_SPACES_OF_CLIENT: usize = 64;
/// Most bytes of the names of a new space's vectors together: each of its slices logs them.
const MAX_VECTOR_NAMES: usize = 8 << 10;
/// The longest that a space is kept without a coordinator, in milliseconds: a day.
pub const MAX_KEEP_MS: u64 = 24 * 60 * 60 * 1000;
/// Most replicas of a space, and most that wait for spaces to be opened.
const MAX_REPLICAS: usize = 1 << 16;
/// Most replicas of one client in a space.
const MAX_REPLICAS_OF_CLIENT: usize = 256;
/// Most bytes of a coordinator's state.
pub const MAX_STATE: usize = 1 << 16;
/// Longest name of a coordinator or a replica, in bytes.
const MAX_NAME: usize = 256;
/// Bytes of a replica with the longest name.
const REPLICA_BYTES: u64 = (MAX_NAME
    + 2 * size_of::<(ReplicaId, SpaceReplica)>()
    + 2 * size_of::<(ReplicaId, [Option<u64>; 2])>()) as u64;
/// Bytes of the names in a report, at most.
const REPORT_BYTES: u64 = (MAX_NAME + crate::tensor::MAX_NAME + 256) as u64;

/// A space over some tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceSpec {
    /// The space as each slice knows it.
    pub space: Arc<Space>,
    /// The names of its tensors.
    pub tensors: Vec<Arc<str>>,
    /// Milliseconds that a server keeps the space after its coordinator has gone.
    pub keep_for_ms: u64,
}

/// A space as a server stores it, beside its [`SpaceSpec`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpaceStanding {
    /// The client that has opened it; 0: it is not known.
    pub opener: u64,
    /// Its seat.
    pub seat: Seat,
    /// Name of the last coordinator in the seat.
    pub holder: Arc<str>,
    /// The client in the seat.
    pub coordinator: Option<u64>,
    /// The key of the last client in the seat, if known.
    pub key: Option<SeatKey>,
}

/// A space without a coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VacantSpace {
    /// The space.
    pub spec: SpaceSpec,
    /// The client that has opened it, if no client has taken its seat yet: all of its vectors are 0.
    pub untaken_of: Option<u64>,
}

/// The present state of a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchReport {
    /// Number of the batch.
    pub batch: u64,
    /// Set once it is over: every portion is finished, or one has failed.
    pub over: bool,
    /// Number of replicas that are present.
    pub replicas: u64,
    /// The finished portions, by number.
    pub finished: Vec<Option<Finished>>,
    /// Copies that were given.
    pub backups_issued: u64,
    /// Copies that were finished before the original.
    pub backups_won: u64,
    /// Portions that could not be added.
    pub failures: Vec<PortionFailure>,
}

/// Called at most once, with an answer that had to wait, while the spaces are locked: it must not call into
/// them.
pub type SpaceWaiter<T> = Box<dyn FnOnce(T) + Send>;

/// All spaces of a cluster, on shard 0.
pub struct Spaces {
    entries: BTreeMap<Arc<str>, SpaceEntry>,
    /// Replicas that wait for a space to be opened.
    early: BTreeMap<(Arc<str>, ReplicaId), (SpaceWaiter<ReplicaAnswer>, Charge)>,
    last: u64,
    meter: Arc<Meter>,
}

impl fmt::Debug for Spaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spaces").field("names", &self.entries.keys()).finish_non_exhaustive()
    }
}

impl Spaces {
    /// Begins without spaces. Their identifiers count up from `run`, which must be random if slices may
    /// remember spaces of an earlier process.
    pub fn new(run: u64, meter: Arc<Meter>) -> Self {
        Self { entries: BTreeMap::new(), early: BTreeMap::new(), last: run, meter }
    }

    /// Lists a space that its slices will open, under a fresh identifier; returns the present one if it has
    /// the same tensors and vectors. `true`: it is new. It is kept for [`MAX_KEEP_MS`] at most.
    pub fn open(
        &mut self,
        client: u64,
        name: &Arc<str>,
        (tensors, vectors): (&[Arc<str>], &[Arc<str>]),
        keep_for_ms: u64,
    ) -> Result<(SpaceSpec, bool)> {
        if let Some(entry) = self.entries.get(name) {
            let open = &entry.spec;
            if open.tensors == tensors && open.space.vectors == vectors {
                return Ok((open.clone(), false));
            }
            let describe = |tensors: &[Arc<str>], vectors: &[Arc<str>]| {
                let names = |list: &[Arc<str>]| text::names(list.iter().map(|name| &**name));
                format!("vectors {} over {}", names(vectors), names(tensors))
            };
            return Err(Error::new(Kind::Precondition, format!("space {name:?} is open and has others"))
                .expected(describe(&open.tensors, &open.space.vectors), describe(tensors, vectors)));
        }
        if self.entries.values().filter(|entry| entry.opener == client).count() >= MAX_SPACES_OF_CLIENT {
            return Err(Error::new(Kind::Capacity, "the client has opened too many spaces of vectors")
                .expected(format!("at most {MAX_SPACES_OF_CLIENT}: close one"), "one more"));
        }
        let names = vectors.iter().map(|name| name.len()).sum::<usize>();
        if names > MAX_VECTOR_NAMES {
            let error = Error::new(Kind::Config, "the names of a space's vectors are too long together");
            return Err(error.expected(format!("at most {MAX_VECTOR_NAMES} bytes"), format!("{names} bytes")));
        }
        // 0 means no space.
        let id = SpaceId(self.last.wrapping_add(1).max(1));
        let space = Arc::new(Space { id, name: name.clone(), vectors: vectors.to_vec() });
        space.check()?;
        for one in vectors.iter().chain([name]) {
            check_printable("name of a space or a vector", one)?;
        }
        let spec = SpaceSpec { space, tensors: tensors.to_vec(), keep_for_ms };
        if self.entries.len() >= MAX_SPACES {
            let free = self.entries.values().find(|entry| entry.coordinator.is_none());
            let advice = free.map_or_else(String::new, |entry| {
                format!("; {:?} has no coordinator: drop it", entry.spec.space.name)
            });
            return Err(Error::new(Kind::Capacity, format!("too many spaces of vectors are open{advice}"))
                .expected(format!("at most {MAX_SPACES}"), "one more"));
        }
        let spec = self.restore(spec, SpaceStanding { opener: client, ..SpaceStanding::default() })?;
        Ok((spec, true))
    }

    /// Lists a space that slices have open already.
    pub fn restore(&mut self, mut spec: SpaceSpec, standing: SpaceStanding) -> Result<SpaceSpec> {
        spec.keep_for_ms = spec.keep_for_ms.min(MAX_KEEP_MS);
        let name = spec.space.name.clone();
        self.last = self.last.max(spec.space.id.0);
        let SpaceStanding { opener, seat, holder, coordinator, key } = standing;
        let mut entry = SpaceEntry {
            spec: spec.clone(),
            opener,
            term: seat.term,
            coordinator,
            key,
            holder,
            state: seat.state,
            round: None,
            replicas: BTreeMap::new(),
            waiter: None,
            memory: self.meter.take(Purpose::Identities, 0)?,
        };
        entry.memory.grow_to(entry.bytes())?;
        self.entries.insert(name.clone(), entry);
        // Replicas that came before the space ask again.
        let early: Vec<_> = self.early.keys().filter(|(space, _)| *space == name).cloned().collect();
        for key in early {
            if let Some((waiter, _)) = self.early.remove(&key) {
                waiter(None);
            }
        }
        Ok(spec)
    }

    /// Removes a space; its replicas and its coordinator stop waiting. `None`: there is none.
    pub fn close(&mut self, space: SpaceId) -> Option<SpaceSpec> {
        let name = self.entries.iter().find(|(_, entry)| entry.spec.space.id == space)?.0.clone();
        let mut entry = self.entries.remove(&name)?;
        if let Some(waiter) = entry.waiter.take() {
            waiter(entry.report());
        }
        entry.replicas.into_values().filter_map(|replica| replica.waiter).for_each(|waiter| waiter(None));
        Some(entry.spec)
    }

    /// All spaces, each with the name of its coordinator, if it has one.
    pub fn list(&self) -> Vec<(SpaceSpec, Option<Arc<str>>)> {
        let holder = |entry: &SpaceEntry| entry.coordinator.map(|_| entry.holder.clone());
        self.entries.values().map(|entry| (entry.spec.clone(), holder(entry))).collect()
    }

    /// The spaces without a coordinator.
    pub fn vacant(&self) -> Vec<VacantSpace> {
        let vacant = self.entries.values().filter(|entry| entry.coordinator.is_none());
        let untaken = |entry: &SpaceEntry| (entry.term == 0 && entry.opener != 0).then_some(entry.opener);
        vacant.map(|entry| VacantSpace { spec: entry.spec.clone(), untaken_of: untaken(entry) }).collect()
    }

    /// Removes the replicas that have neither held a portion nor waited for one since the last call: they are
    /// gone although their clients live. One that asks again is back.
    pub fn drop_idle_replicas(&mut self) {
        self.entries.values_mut().for_each(SpaceEntry::drop_idle_replicas);
    }

    /// A space by its identifier.
    pub fn spec(&self, space: SpaceId) -> Result<SpaceSpec> {
        let found = self.entries.values().find(|entry| entry.spec.space.id == space);
        found.map(|entry| entry.spec.clone()).ok_or_else(no_space)
    }

    fn entry(&mut self, space: SpaceId) -> Result<&mut SpaceEntry> {
        self.entries.values_mut().find(|entry| entry.spec.space.id == space).ok_or_else(no_space)
    }

    /// Begins a batch unless it has begun, and answers when it is over. `None`: the coordinator waits, and
    /// the waiter from `later` gets the answer.
    pub fn batch(
        &mut self,
        who: Claimant,
        (space, term): (SpaceId, u64),
        task: &BatchTask,
        later: impl FnOnce() -> SpaceWaiter<BatchReport>,
    ) -> Result<Option<BatchReport>> {
        task.check()?;
        let entry = self.entry(space)?;
        entry.seat(who, term)?;
        let last = entry.round.as_ref().map_or(0, |round| round.task().batch);
        if task.batch < last {
            return Err(Error::new(Kind::StalePush, "a later batch has begun")
                .expected(format!("batch {last} or later"), format!("batch {}", task.batch)));
        }
        if task.batch > last {
            let begun = AskedBatch::Waits(*task);
            let before = entry.round.replace(begun);
            if let Err(error) = entry.memory.grow_to(entry.bytes()) {
                entry.round = before;
                return Err(error);
            }
            entry.settle();
        }
        if entry.round.as_ref().is_some_and(AskedBatch::is_over) {
            return Ok(Some(entry.report()));
        }
        entry.waiter = Some(later());
        Ok(None)
    }

    /// Ends the coordinator's wait, and returns the present state of its batch. A coordinator that lost its
    /// seat in the meantime does not get it back, because it may be gone.
    pub fn withdraw_batch(&mut self, space: SpaceId, term: u64) -> Result<BatchReport> {
        let entry = self.entry(space)?;
        entry.check_term(term)?;
        entry.waiter = None;
        Ok(entry.report())
    }

    /// Frees the seats of an ended client and removes its replicas, whose portions go to others. The spaces
    /// stay open. Returns those whose seats are free now.
    pub fn forget_client(&mut self, client: u64) -> Vec<SpaceId> {
        let mut vacated = Vec::new();
        for entry in self.entries.values_mut() {
            if entry.coordinator.take_if(|held| *held == client).is_some() {
                entry.waiter = None;
                vacated.push(entry.spec.space.id);
            }
            let own = entry.replicas.range((client, 0)..=(client, u64::MAX));
            for id in own.map(|(id, _)| *id).collect::<Vec<_>>() {
                entry.leave(id);
            }
            entry.settle();
        }
        self.early.retain(|(_, (holder, _)), _| *holder != client);
        vacated
    }
}

/// The error of an unknown space.
pub fn no_space() -> Error {
    Error::new(Kind::Config, "no such space is open: it was closed, or never opened")
}

fn check_name(what: &str, name: &str) -> Result<()> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(Error::new(Kind::Config, format!("invalid name of a {what}"))
            .expected(format!("1 to {MAX_NAME} bytes"), format!("{} bytes", name.len())));
    }
    check_printable(&format!("name of a {what}"), name)
}

#[cfg(test)]
mod tests;
