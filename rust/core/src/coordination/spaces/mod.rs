//! Where the coordinator of a space and its replicas meet, on shard 0: the coordinator's seat and state, and
//! the batch whose portions the replicas compute.
//!
//! A coordinator takes the seat of a space and with it a new term, which fences former coordinators. It asks
//! for one batch after the other; replicas take portions and report them with their next request. Both wait
//! here. A request that is repeated because its answer was lost changes nothing.

mod entry;
mod replicas;
mod seat;

use super::batch::{BatchTask, Finished, PortionFailure, ReplicaId};
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::base::text;
use crate::memory::{Charge, Meter, Purpose};
use crate::tensor::{Space, SpaceId};
use entry::{AskedBatch, SpaceEntry};
use replicas::SpaceReplica;
pub use replicas::{GivenPortion, PortionReport, ReplicaAnswer, ReplicaRequest};
pub use seat::{Seat, SeatRequest};
use std::collections::BTreeMap;
use std::fmt;

/// Most spaces at a time.
const MAX_SPACES: usize = 1 << 10;
/// Most replicas of a space, and most that wait for spaces to be opened.
const MAX_REPLICAS: usize = 1 << 16;
/// Most bytes of a coordinator's state.
pub const MAX_STATE: usize = 1 << 16;
/// Longest name of a coordinator or a replica, in bytes.
const MAX_NAME: usize = 256;
/// Bytes of a replica with the longest name.
const REPLICA_BYTES: u64 = (MAX_NAME + 2 * size_of::<(ReplicaId, SpaceReplica)>()) as u64;

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

/// The present state of a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchReport {
    /// Number of the batch.
    pub batch: u64,
    /// Whether it is over: every portion is finished, or one has failed.
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
    /// the same tensors and vectors. `true`: it is new.
    pub fn open(
        &mut self,
        name: &Arc<str>,
        tensors: &[Arc<str>],
        vectors: &[Arc<str>],
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
        // 0 stands for no space.
        let id = SpaceId(self.last.wrapping_add(1).max(1));
        let space = Arc::new(Space { id, name: name.clone(), vectors: vectors.to_vec() });
        space.check()?;
        let spec = SpaceSpec { space, tensors: tensors.to_vec(), keep_for_ms };
        self.restore(spec.clone(), Seat { term: 0, state: Arc::default() }, "".into())?;
        Ok((spec, true))
    }

    /// Lists a space that slices have open already, with its seat, and what was in it called.
    pub fn restore(&mut self, spec: SpaceSpec, seat: Seat, holder: Arc<str>) -> Result<()> {
        if self.entries.len() >= MAX_SPACES {
            return Err(Error::new(Kind::Capacity, "too many spaces of vectors are open")
                .expected(format!("at most {MAX_SPACES}"), "one more"));
        }
        let name = spec.space.name.clone();
        self.last = self.last.max(spec.space.id.0);
        let mut entry = SpaceEntry {
            spec,
            term: seat.term,
            coordinator: None,
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
        Ok(())
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
        client: u64,
        (space, term): (SpaceId, u64),
        task: &BatchTask,
        later: impl FnOnce() -> SpaceWaiter<BatchReport>,
    ) -> Result<Option<BatchReport>> {
        task.check()?;
        let entry = self.entry(space)?;
        entry.seat(client, term)?;
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
    /// stay open.
    pub fn forget_client(&mut self, client: u64) {
        for entry in self.entries.values_mut() {
            if entry.coordinator.take_if(|held| *held == client).is_some() {
                entry.waiter = None;
            }
            let own = entry.replicas.range((client, 0)..=(client, u64::MAX));
            for id in own.map(|(id, _)| *id).collect::<Vec<_>>() {
                entry.leave(id);
            }
            entry.settle();
        }
        self.early.retain(|(_, (holder, _)), _| *holder != client);
    }
}

fn no_space() -> Error {
    Error::new(Kind::Config, "no such space is open: it was closed, or never opened")
}

fn check_name(what: &str, name: &str) -> Result<()> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(Error::new(Kind::Config, format!("invalid name of a {what}"))
            .expected(format!("1 to {MAX_NAME} bytes"), format!("{} bytes", name.len())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::batch::FailureKind;
    use crate::coordination::portions::Then;
    use std::sync::mpsc::{Receiver, channel};

    const COORDINATOR: u64 = 9;

    fn names(list: &[&str]) -> Vec<Arc<str>> {
        list.iter().map(|name| Arc::from(*name)).collect()
    }

    fn task(batch: u64, min_replicas: u64) -> BatchTask {
        BatchTask { batch, portions: 4, asked: 4, samples: 40, vector: 1, min_replicas, backups: true }
    }

    /// One space "s" with a coordinator in its first term.
    struct At {
        spaces: Spaces,
        space: SpaceId,
        told: (std::sync::mpsc::Sender<BatchReport>, Receiver<BatchReport>),
    }

    fn at() -> At {
        let mut spaces = Spaces::new(0, Meter::new(u64::MAX));
        let (spec, new) = spaces.open(&"s".into(), &names(&["w"]), &names(&["g"]), 1000).unwrap();
        assert!(new);
        let take = SeatRequest::Take { at_least: 0, name: "c".into() };
        assert_eq!(spaces.coordinate(COORDINATOR, spec.space.id, &take).unwrap().term, 1);
        At { spaces, space: spec.space.id, told: channel() }
    }

    impl At {
        /// `None`: the coordinator waits.
        fn batch(&mut self, task: BatchTask) -> Result<Option<BatchReport>> {
            let to = self.told.0.clone();
            self.spaces.batch(COORDINATOR, (self.space, 1), &task, || {
                Box::new(move |report| to.send(report).unwrap())
            })
        }

        fn told(&self) -> Option<BatchReport> {
            self.told.1.try_recv().ok()
        }

        /// Given now, or what the replica waits with.
        fn ask(
            &mut self,
            client: u64,
            report: Option<(u64, u64)>,
            then: Then,
        ) -> Result<GivenPortion, Option<Receiver<ReplicaAnswer>>> {
            let report =
                report.map(|(batch, portion)| PortionReport { batch, portion, outcome: Ok(portion as f64) });
            let name = format!("r{client}").into();
            let request = ReplicaRequest { space: "s".into(), replica: 1, name, report, then };
            let (to, answer) = channel();
            let later = || -> SpaceWaiter<ReplicaAnswer> { Box::new(move |given| to.send(given).unwrap()) };
            match self.spaces.portion(client, &request, later).unwrap() {
                Some(Some(given)) => Ok(given),
                Some(None) => Err(None),
                None => Err(Some(answer)),
            }
        }

        fn take(&mut self, client: u64, report: Option<(u64, u64)>) -> u64 {
            self.ask(client, report, Then::Take).unwrap().portion
        }

        fn wait(&mut self, client: u64, report: Option<(u64, u64)>) -> Receiver<ReplicaAnswer> {
            self.ask(client, report, Then::Take).unwrap_err().unwrap()
        }
    }

    fn portion(answer: &Receiver<ReplicaAnswer>) -> u64 {
        answer.try_recv().unwrap().unwrap().portion
    }

    #[test]
    fn portions_are_dealt_when_enough_replicas_are_there() {
        let mut at = at();
        let first = at.wait(1, None);
        assert!(at.batch(task(1, 2)).unwrap().is_none());
        assert!(first.try_recv().is_err());
        // Two contiguous ranges; the first replica was waiting.
        assert_eq!(at.take(2, None), 2);
        assert_eq!(portion(&first), 0);
        assert_eq!((at.take(1, Some((1, 0))), at.take(2, Some((1, 2)))), (1, 3));
        // A request whose answer was lost gets the same portion again.
        assert_eq!((at.take(1, Some((1, 0))), at.take(1, None)), (1, 1));
        let idle = at.ask(2, Some((1, 3)), Then::Take).unwrap();
        assert_eq!((idle.portion, idle.likely_next), (1, Some(2)));
        assert!(at.told().is_none());
        let last = at.wait(1, Some((1, 1)));
        let report = at.told().unwrap();
        assert!(report.over && report.failures.is_empty());
        assert_eq!((report.backups_issued, report.backups_won, report.replicas), (1, 0, 2));
        let losses: Vec<_> = report.finished.iter().map(|one| one.as_ref().unwrap().loss).collect();
        assert_eq!(losses, [0.0, 1.0, 2.0, 3.0]);
        // The same batch again is the same report; the next one begins with the same ranges.
        assert_eq!(at.batch(task(1, 2)).unwrap().unwrap(), report);
        assert!(at.batch(task(2, 2)).unwrap().is_none());
        assert_eq!((portion(&last), at.take(2, Some((1, 1)))), (0, 2));
        assert_eq!(at.batch(task(1, 2)).unwrap_err().kind, Kind::StalePush);
    }

    #[test]
    fn what_a_gone_replica_held_goes_to_one_that_waits() {
        let mut at = at();
        assert!(at.batch(BatchTask { backups: false, asked: 1, ..task(1, 1) }).unwrap().is_none());
        assert_eq!(at.take(1, None), 0);
        let waiting = at.wait(2, None);
        at.spaces.forget_client(1);
        assert_eq!(portion(&waiting), 0);
        assert!(matches!(at.ask(2, None, Then::Leave), Err(None)));
        assert_eq!(at.take(3, None), 0);
        assert!(matches!(at.ask(3, Some((1, 0)), Then::Rest), Err(None)));
        assert_eq!(at.told().unwrap().replicas, 1);
        // A report of another batch counts for nothing.
        assert!(at.batch(task(2, 1)).unwrap().is_none());
        assert_eq!(at.take(3, Some((1, 3))), 0);
        assert_eq!(at.spaces.withdraw_batch(at.space, 1).unwrap().finished, [None, None, None, None]);
    }

    #[test]
    fn a_coordinator_that_goes_while_it_waits_leaves_a_free_seat() {
        let mut at = at();
        assert!(at.batch(task(1, 1)).unwrap().is_none());
        at.spaces.forget_client(COORDINATOR);
        // Its call ends only now.
        assert!(!at.spaces.withdraw_batch(at.space, 1).unwrap().over);
        assert_eq!(at.spaces.list()[0].1, None);
        let take = SeatRequest::Take { at_least: 0, name: "other".into() };
        assert_eq!(at.spaces.coordinate(8, at.space, &take).unwrap().term, 2);
        assert_eq!(at.spaces.withdraw_batch(at.space, 1).unwrap_err().kind, Kind::Fenced);
    }

    #[test]
    fn a_loss_that_is_not_finite_ends_the_batch() {
        let mut at = at();
        assert!(at.batch(task(1, 1)).unwrap().is_none());
        assert_eq!(at.take(1, None), 0);
        let report = Some(PortionReport { batch: 1, portion: 0, outcome: Ok(f64::NAN) });
        let request =
            ReplicaRequest { space: "s".into(), replica: 1, name: "r".into(), report, then: Then::Rest };
        at.spaces.portion(1, &request, || Box::new(|_| ())).unwrap();
        let report = at.told().unwrap();
        assert!(report.over);
        let failure = &report.failures[0];
        assert_eq!((failure.kind, &*failure.replica, &*failure.tensor), (FailureKind::NotFinite, "r", ""));
    }

    #[test]
    fn a_failure_in_a_tensor_that_cannot_be_is_refused() {
        let mut at = at();
        assert!(at.batch(task(1, 1)).unwrap().is_none());
        assert_eq!(at.take(1, None), 0);
        for (bytes, refused) in [(crate::tensor::MAX_NAME + 1, true), (crate::tensor::MAX_NAME, false)] {
            let outcome = Err((FailureKind::NotFinite, "t".repeat(bytes).into()));
            let report = Some(PortionReport { batch: 1, portion: 0, outcome });
            let request =
                ReplicaRequest { space: "s".into(), replica: 1, name: "r".into(), report, then: Then::Rest };
            let answer = at.spaces.portion(1, &request, || Box::new(|_| ()));
            assert_eq!(answer.err().map(|error| error.kind), refused.then_some(Kind::Config));
            assert_eq!(at.told().is_none(), refused);
        }
    }

    #[test]
    fn those_who_wait_learn_that_a_space_opens_and_closes() {
        let mut at = at();
        let request = |space: &str| ReplicaRequest {
            space: space.into(),
            replica: 1,
            name: "r".into(),
            report: None,
            then: Then::Take,
        };
        let (to, early) = channel();
        let later = || -> SpaceWaiter<ReplicaAnswer> { Box::new(move |given| to.send(given).unwrap()) };
        assert!(at.spaces.portion(1, &request("later"), later).unwrap().is_none());
        assert!(
            at.spaces.portion(2, &request("later"), || Box::new(|_| panic!("withdrawn"))).unwrap().is_none()
        );
        assert_eq!(at.spaces.withdraw_portion(2, &request("later")), Some(None));
        at.spaces.open(&"later".into(), &names(&["w"]), &names(&["g"]), 0).unwrap();
        assert_eq!(early.try_recv().unwrap(), None);
        let waiting = at.wait(1, None);
        assert!(at.batch(task(1, 5)).unwrap().is_none());
        assert!(at.spaces.close(at.space).is_some() && at.spaces.close(at.space).is_none());
        assert_eq!(waiting.try_recv().unwrap(), None);
        assert!(!at.told().unwrap().over);
        assert_eq!(at.batch(task(2, 1)).unwrap_err().kind, Kind::Config);
    }

    #[test]
    fn memory_is_given_back_and_what_does_not_fit_is_refused() {
        let meter = Meter::new(4 * REPLICA_BYTES);
        let mut spaces = Spaces::new(0, meter.clone());
        let (spec, _) = spaces.open(&"s".into(), &names(&["w"]), &names(&["g"]), 0).unwrap();
        let opened = meter.used();
        let id = spec.space.id;
        let term = spaces
            .coordinate(COORDINATOR, id, &SeatRequest::Take { at_least: 4, name: "c".into() })
            .unwrap()
            .term;
        assert_eq!(term, 5);
        let store = |len: usize| SeatRequest::Store { term, state: vec![1; len].into() };
        assert_eq!(spaces.coordinate(COORDINATOR, id, &store(MAX_STATE)).unwrap_err().kind, Kind::Capacity);
        spaces.coordinate(COORDINATOR, id, &store(100)).unwrap();
        assert_eq!(meter.used(), opened + 101);
        let batch = BatchTask { portions: 1 << 16, asked: 1 << 16, samples: 1 << 20, ..task(1, 1) };
        let refused = spaces.batch(COORDINATOR, (id, term), &batch, || Box::new(|_| ()));
        assert_eq!(refused.unwrap_err().kind, Kind::Capacity);
        assert_eq!(meter.used(), opened + 101);
        spaces.coordinate(COORDINATOR, id, &store(0)).unwrap();
        spaces.close(id);
        assert_eq!(meter.used(), 0);
    }
}
