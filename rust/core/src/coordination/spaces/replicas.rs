//! The replicas of a space: they take portions, and report each with their next request.

use super::{MAX_REPLICAS, REPLICA_BYTES, SpaceWaiter, Spaces, check_name};
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::coordination::batch::{BatchTask, FailureKind, ReplicaId};
use crate::coordination::portions::Then;
use crate::memory::Purpose;
use crate::tensor::{MAX_NAME, SpaceId};

/// A replica's report of its portion.
#[derive(Clone, Debug, PartialEq)]
pub struct PortionReport {
    /// Number of the batch.
    pub batch: u64,
    /// The portion.
    pub portion: u64,
    /// The sum of its samples' losses, if every shard has added it; else why not, and the tensor concerned.
    pub outcome: Result<f64, (FailureKind, Arc<str>)>,
}

impl PortionReport {
    /// Fails if the name of the failed tensor, which the batch stores, exceeds the limit on names.
    fn check(&self) -> Result<()> {
        match &self.outcome {
            Err((_, tensor)) if tensor.len() > MAX_NAME => {
                let error = Error::new(Kind::Config, "the tensor's name in a failed portion is too long");
                Err(error.expected(format!("at most {MAX_NAME} bytes"), format!("{} bytes", tensor.len())))
            }
            _ => Ok(()),
        }
    }
}

/// A replica's request.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaRequest {
    /// Name of the space, which need not be open yet.
    pub space: Arc<str>,
    /// Which of its client's replicas asks: a random number, not 0.
    pub replica: u64,
    /// Name of the replica, for others.
    pub name: Arc<str>,
    /// Outcome of its last portion.
    pub report: Option<PortionReport>,
    /// Its next action.
    pub then: Then,
}

/// A portion for a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenPortion {
    /// The space.
    pub space: SpaceId,
    /// The tensors, whose gradients it sends.
    pub tensors: Vec<Arc<str>>,
    /// The batch.
    pub task: BatchTask,
    /// The portion.
    pub portion: u64,
    /// The portion that it will probably get next, in this batch or in the next one.
    pub likely_next: Option<u64>,
}

/// The answer to a replica: a portion, or nothing yet.
pub type ReplicaAnswer = Option<GivenPortion>;

pub(super) struct SpaceReplica {
    pub(super) name: Arc<str>,
    pub(super) waiter: Option<SpaceWaiter<ReplicaAnswer>>,
    /// It had neither a portion nor a waiter when the idle ones were last looked for.
    pub(super) idle: bool,
}

impl Spaces {
    /// Answers a replica's request. `None`: the replica waits, and the waiter from `later` gets the answer.
    pub fn portion(
        &mut self,
        client: u64,
        request: &ReplicaRequest,
        later: impl FnOnce() -> SpaceWaiter<ReplicaAnswer>,
    ) -> Result<Option<ReplicaAnswer>> {
        check_name("replica", &request.name)?;
        request.report.as_ref().map_or(Ok(()), PortionReport::check)?;
        let id = (client, request.replica);
        let Some(entry) = self.entries.get_mut(&request.space) else {
            return self.wait_for_space(id, request, later);
        };
        if let Some(report) = &request.report {
            entry.check_report(id, report)?;
        }
        if request.then != Then::Leave {
            entry.join(id, request)?;
        }
        if let Some(report) = &request.report {
            entry.note_report(id, &request.name, report);
        }
        if request.then == Then::Leave {
            entry.leave(id);
            entry.settle();
            return Ok(Some(None));
        }
        entry.settle();
        if request.then == Then::Rest {
            return Ok(Some(None));
        }
        let given = entry.take(id);
        if let Some(replica) = entry.replicas.get_mut(&id) {
            replica.name = request.name.clone();
            replica.idle = false;
            replica.waiter = if given.is_some() { None } else { Some(later()) };
        }
        Ok(given.map(Some))
    }

    fn wait_for_space(
        &mut self,
        id: ReplicaId,
        request: &ReplicaRequest,
        later: impl FnOnce() -> SpaceWaiter<ReplicaAnswer>,
    ) -> Result<Option<ReplicaAnswer>> {
        if request.then != Then::Take {
            return Ok(Some(None));
        }
        if self.early.len() >= MAX_REPLICAS || request.space.len() > MAX_NAME {
            let message = "too many replicas wait for a space to be opened, or for one with too long a name";
            return Err(
                Error::new(Kind::Capacity, message).expected(format!("at most {MAX_REPLICAS}"), "one more")
            );
        }
        let charge = self.meter.take(Purpose::Identities, REPLICA_BYTES + request.space.len() as u64)?;
        self.early.insert((request.space.clone(), id), (later(), charge));
        Ok(None)
    }

    /// Ends a replica's wait. `None`: the waiter has just got its answer.
    pub fn withdraw_portion(&mut self, client: u64, request: &ReplicaRequest) -> Option<ReplicaAnswer> {
        let id = (client, request.replica);
        if self.early.remove(&(request.space.clone(), id)).is_some() {
            return Some(None);
        }
        drop(self.entries.get_mut(&request.space)?.replicas.get_mut(&id)?.waiter.take()?);
        Some(None)
    }
}
