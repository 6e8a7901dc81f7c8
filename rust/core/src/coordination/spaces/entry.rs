//! A space as shard 0 keeps it: its seat, its batch and its replicas.

use super::replicas::{GivenPortion, PortionReport, ReplicaAnswer, ReplicaRequest, SpaceReplica};
use super::{
    BatchReport, Claimant, MAX_REPLICAS, MAX_REPLICAS_OF_CLIENT, REPLICA_BYTES, REPORT_BYTES, SeatKey,
    SpaceSpec, SpaceWaiter,
};
use crate::base::error::{Error, Kind, Result};
use crate::base::fault::fault;
use crate::base::sync::Arc;
use crate::coordination::batch::{Batch, BatchTask, FailureKind, Finished, PortionFailure, ReplicaId};
use crate::memory::Charge;
use std::collections::{BTreeMap, BTreeSet};

/// The batch that a coordinator has asked for.
///
/// ```text
///        asked           min_replicas are present           all portions finished, or one failed
/// none -------> Waits ----------------------------> Begun --------------------------------------> over
/// ```
///
/// A batch of a higher number replaces one in any state.
pub(super) enum AskedBatch {
    /// Too few replicas are present.
    Waits(BatchTask),
    Begun(Box<Batch>),
}

impl AskedBatch {
    pub(super) fn task(&self) -> BatchTask {
        match self {
            Self::Waits(task) => *task,
            Self::Begun(batch) => batch.task,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self, Self::Begun(batch) if batch.is_over())
    }
}

/// Memory of a space beside its names: its entry, its seat, and both once more in the catalog of the shard's
/// files.
const SPACE_BYTES: usize = 1024;
/// Memory of a name beside its text.
const NAME_BYTES: u64 = 64;

/// A space and its seat.
///
/// ```text
///           Take: term + 1              Leave, or the end of the coordinator's session
/// untaken -----------------> taken ------------------------------------------------------> vacant
///    |                         ^                                                             |   |
///    |                         +-- Take: term + 1, or a command with the last key and term --+   |
///    | the opener's session ends: all vectors are 0                                              |
///    +-----------------------------------> closed <---------------------- keep_for has passed ---+
/// ```
///
/// `CloseSpace` closes one in any state.
pub(super) struct SpaceEntry {
    pub(super) spec: SpaceSpec,
    /// The client that opened it; 0 if an earlier version did not record it.
    pub(super) opener: u64,
    pub(super) term: u64,
    /// The client in the seat.
    pub(super) coordinator: Option<u64>,
    /// The key of the last client in the seat; `None` if there was none, or an earlier version did not record
    /// it.
    pub(super) key: Option<SeatKey>,
    /// Name of the last coordinator in the seat.
    pub(super) holder: Arc<str>,
    pub(super) state: Arc<[u8]>,
    pub(super) round: Option<AskedBatch>,
    pub(super) replicas: BTreeMap<ReplicaId, SpaceReplica>,
    /// The coordinator, until its batch is over.
    pub(super) waiter: Option<SpaceWaiter<BatchReport>>,
    pub(super) memory: Charge,
}

impl SpaceEntry {
    pub(super) fn bytes(&self) -> u64 {
        let names: usize =
            self.spec.tensors.iter().chain(&self.spec.space.vectors).map(|name| name.len()).sum();
        let round = self.round.as_ref().map_or(0, |round| round.task().asked * size_of::<Finished>() as u64);
        let said = match &self.round {
            Some(AskedBatch::Begun(batch)) => batch.name_bytes(),
            _ => 0,
        };
        let state = if fault("state_not_charged") { 0 } else { self.state.len() };
        (SPACE_BYTES + names + self.holder.len() + state) as u64
            + NAME_BYTES * (self.spec.tensors.len() + self.spec.space.vectors.len()) as u64
            + REPLICA_BYTES * self.replicas.len() as u64
            // A portion is finished, and given, and its replica has a name.
            + 4 * round
            + said
    }

    /// Fails for a former coordinator.
    pub(super) fn check_term(&self, term: u64) -> Result<()> {
        if term == self.term {
            return Ok(());
        }
        let message = format!("another coordinator has taken over space {:?}", self.spec.space.name);
        Err(Error::new(Kind::Fenced, message).expected(format!("term {}", self.term), format!("term {term}")))
    }

    /// Fails unless the client with this key has taken the seat last, with this term. The seat of a
    /// coordinator whose key is not known is given to the first that names its term.
    pub(super) fn check_seat(&self, key: &SeatKey, term: u64) -> Result<()> {
        let name = &self.spec.space.name;
        if self.term == 0 {
            let error = Error::new(Kind::Precondition, format!("space {name:?} has no coordinator yet"));
            return Err(error.expected("a client that has taken its seat", format!("term {term}")));
        }
        self.check_term(term)?;
        if self.key.is_none_or(|own| own == *key) || fault("seat_for_all") {
            return Ok(());
        }
        let error = Error::new(Kind::Denied, format!("the seat of space {name:?} is another client's"));
        Err(error.expected("the secret of the client that has taken it", "another"))
    }

    /// [`SpaceEntry::check_seat`]; gives the coordinator its seat back if its session had ended or the server
    /// restarted.
    pub(super) fn seat(&mut self, who: Claimant, term: u64) -> Result<()> {
        self.check_seat(&who.key, term)?;
        (self.coordinator, self.key) = (Some(who.client), Some(who.key));
        Ok(())
    }

    pub(super) fn report(&self) -> BatchReport {
        let replicas = self.replicas.len() as u64;
        match &self.round {
            None => BatchReport { replicas, ..BatchReport::default() },
            Some(AskedBatch::Waits(task)) => {
                let finished = vec![None; task.asked as usize];
                BatchReport { batch: task.batch, replicas, finished, ..BatchReport::default() }
            }
            Some(AskedBatch::Begun(batch)) => BatchReport {
                batch: batch.task.batch,
                over: batch.is_over(),
                replicas,
                finished: batch.finished.clone(),
                backups_issued: batch.backups_issued,
                backups_won: batch.backups_won,
                failures: batch.failures.clone(),
            },
        }
    }

    /// The next portion for a replica, if there is one now.
    pub(super) fn take(&mut self, replica: ReplicaId) -> ReplicaAnswer {
        let Some(AskedBatch::Begun(batch)) = &mut self.round else { return None };
        let portion = batch.held(replica).or_else(|| batch.take(replica))?;
        let likely_next = batch.likely_next(replica);
        let SpaceSpec { space, tensors, .. } = &self.spec;
        Some(GivenPortion {
            space: space.id,
            tensors: tensors.clone(),
            task: batch.task,
            portion,
            likely_next,
        })
    }

    /// Begins the batch once enough replicas are present, gives portions to those that wait, and answers the
    /// coordinator of a batch that is over.
    pub(super) fn settle(&mut self) {
        if let Some(AskedBatch::Waits(task)) = self.round
            && self.replicas.len() as u64 >= task.min_replicas
        {
            let replicas: Vec<_> = self.replicas.keys().copied().collect();
            self.round = Some(AskedBatch::Begun(Box::new(Batch::new(task, &replicas))));
        }
        let waiting = self.replicas.iter().filter(|(_, replica)| replica.waiter.is_some());
        for id in waiting.map(|(id, _)| *id).collect::<Vec<_>>() {
            let Some(given) = self.take(id) else { continue };
            if let Some(waiter) = self.replicas.get_mut(&id).and_then(|replica| replica.waiter.take()) {
                waiter(Some(given));
            }
        }
        if self.round.as_ref().is_some_and(AskedBatch::is_over)
            && let Some(waiter) = self.waiter.take()
        {
            waiter(self.report());
        }
        self.memory.shrink_to(self.bytes());
    }

    /// Adds a replica that is not present yet; fails if there are too many, or no memory for it.
    pub(super) fn join(&mut self, id: ReplicaId, request: &ReplicaRequest) -> Result<()> {
        if self.replicas.contains_key(&id) {
            return Ok(());
        }
        if self.replicas.len() >= MAX_REPLICAS {
            let message = format!("space {:?} has too many replicas", request.space);
            return Err(
                Error::new(Kind::Capacity, message).expected(format!("at most {MAX_REPLICAS}"), "one more")
            );
        }
        if self.replicas.range((id.0, 0)..=(id.0, u64::MAX)).count() >= MAX_REPLICAS_OF_CLIENT {
            let message = format!("the client has too many replicas in space {:?}", request.space);
            let most = format!("at most {MAX_REPLICAS_OF_CLIENT}");
            return Err(Error::new(Kind::Capacity, message).expected(most, "one more"));
        }
        self.memory.grow_to(self.bytes() + REPLICA_BYTES)?;
        self.replicas.insert(id, SpaceReplica { name: request.name.clone(), waiter: None, idle: false });
        Ok(())
    }

    /// Fails for a report of a portion that the replica was not given, and if there is no memory for it.
    pub(super) fn check_report(&mut self, id: ReplicaId, report: &PortionReport) -> Result<()> {
        let bytes = self.bytes();
        match &self.round {
            Some(AskedBatch::Begun(batch)) if batch.task.batch == report.batch => {
                if !batch.was_given(id, report.portion) {
                    let message = "the replica reports a portion that it was not given, or has returned";
                    let error = Error::new(Kind::StalePush, message);
                    return Err(
                        error.expected("the portion that it holds", format!("portion {}", report.portion))
                    );
                }
                self.memory.grow_to(bytes + REPORT_BYTES)
            }
            _ => Ok(()),
        }
    }

    /// Records the outcome of a portion of the present batch; a report of another batch changes nothing.
    pub(super) fn note_report(&mut self, id: ReplicaId, replica: &Arc<str>, report: &PortionReport) {
        let Some(AskedBatch::Begun(batch)) = &mut self.round else { return };
        if batch.task.batch != report.batch {
            return;
        }
        match &report.outcome {
            Ok(loss) if loss.is_finite() => {
                batch.finish(id, replica, report.portion, *loss);
            }
            outcome => {
                let (kind, tensor) =
                    outcome.clone().err().unwrap_or_else(|| (FailureKind::NotFinite, "".into()));
                let (replica, portion) = (replica.clone(), report.portion);
                batch.fail(PortionFailure { replica, portion, kind, tensor });
            }
        }
    }

    /// Removes the replicas that have neither held a portion nor waited for one since the last call.
    pub(super) fn drop_idle_replicas(&mut self) {
        let holders = match &self.round {
            Some(AskedBatch::Begun(batch)) if !batch.is_over() => batch.holders(),
            _ => BTreeSet::new(),
        };
        let mut gone = Vec::new();
        for (id, replica) in &mut self.replicas {
            if replica.waiter.is_some() || holders.contains(id) {
                replica.idle = false;
            } else if std::mem::replace(&mut replica.idle, true) {
                gone.push(*id);
            }
        }
        if !gone.is_empty() {
            for id in gone {
                self.leave(id);
            }
            self.settle();
        }
    }

    pub(super) fn leave(&mut self, replica: ReplicaId) {
        if self.replicas.remove(&replica).is_some()
            && let Some(AskedBatch::Begun(batch)) = &mut self.round
        {
            batch.leave(replica);
        }
    }
}
