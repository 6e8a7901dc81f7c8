//! Seats, batches and replicas of spaces.

use super::*;
use crate::coordination::batch::FailureKind;
use crate::coordination::portions::Then;
use std::sync::mpsc::{Receiver, channel};

const COORDINATOR: Claimant = Claimant { client: 9, key: [9; 32] };
const OPENER: u64 = 9;

fn names(list: &[&str]) -> Vec<Arc<str>> {
    list.iter().map(|name| Arc::from(*name)).collect()
}

fn open(spaces: &mut Spaces, client: u64, name: &str, keep_for_ms: u64) -> Result<(SpaceSpec, bool)> {
    spaces.open(client, &name.into(), (&names(&["w"]), &names(&["g"])), keep_for_ms)
}

fn task(batch: u64, min_replicas: u64) -> BatchTask {
    BatchTask { batch, portions: 4, asked: 4, samples: 40, vector: 1, min_replicas, backups: true }
}

/// One space "s" with a coordinator in its first term.
struct InTerm {
    spaces: Spaces,
    space: SpaceId,
    reports: (std::sync::mpsc::Sender<BatchReport>, Receiver<BatchReport>),
}

fn in_term() -> InTerm {
    let mut spaces = Spaces::new(0, Meter::new(u64::MAX));
    let (spec, new) = open(&mut spaces, OPENER, "s", 1000).unwrap();
    assert!(new);
    let take = SeatRequest::Take { at_least: 0, name: "c".into() };
    assert_eq!(spaces.coordinate(COORDINATOR, spec.space.id, &take).unwrap().term, 1);
    InTerm { spaces, space: spec.space.id, reports: channel() }
}

impl InTerm {
    /// `None`: the coordinator waits.
    fn batch(&mut self, task: BatchTask) -> Result<Option<BatchReport>> {
        let to = self.reports.0.clone();
        self.spaces
            .batch(COORDINATOR, (self.space, 1), &task, || Box::new(move |report| to.send(report).unwrap()))
    }

    fn next_report(&self) -> Option<BatchReport> {
        self.reports.1.try_recv().ok()
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
    let mut at = in_term();
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
    assert!(at.next_report().is_none());
    let last = at.wait(1, Some((1, 1)));
    let report = at.next_report().unwrap();
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
    let mut at = in_term();
    assert!(at.batch(BatchTask { backups: false, asked: 1, ..task(1, 1) }).unwrap().is_none());
    assert_eq!(at.take(1, None), 0);
    let waiting = at.wait(2, None);
    at.spaces.forget_client(1);
    assert_eq!(portion(&waiting), 0);
    assert!(matches!(at.ask(2, None, Then::Leave), Err(None)));
    assert_eq!(at.take(3, None), 0);
    assert!(matches!(at.ask(3, Some((1, 0)), Then::Rest), Err(None)));
    assert_eq!(at.next_report().unwrap().replicas, 1);
    // A report of another batch counts for nothing.
    assert!(at.batch(task(2, 1)).unwrap().is_none());
    assert_eq!(at.take(3, Some((1, 3))), 0);
    assert_eq!(at.spaces.withdraw_batch(at.space, 1).unwrap().finished, [None, None, None, None]);
}

#[test]
fn a_coordinator_that_goes_while_it_waits_leaves_a_free_seat() {
    let mut at = in_term();
    assert!(at.batch(task(1, 1)).unwrap().is_none());
    assert_eq!(at.spaces.forget_client(COORDINATOR.client), [at.space]);
    // Its call ends only now.
    assert!(!at.spaces.withdraw_batch(at.space, 1).unwrap().over);
    assert_eq!(at.spaces.list()[0].1, None);
    let take = SeatRequest::Take { at_least: 0, name: "other".into() };
    let other = Claimant { client: 8, key: [8; 32] };
    assert_eq!(at.spaces.coordinate(other, at.space, &take).unwrap().term, 2);
    assert_eq!(at.spaces.withdraw_batch(at.space, 1).unwrap_err().kind, Kind::Fenced);
}

#[test]
fn a_loss_that_is_not_finite_ends_the_batch() {
    let mut at = in_term();
    assert!(at.batch(task(1, 1)).unwrap().is_none());
    assert_eq!(at.take(1, None), 0);
    let report = Some(PortionReport { batch: 1, portion: 0, outcome: Ok(f64::NAN) });
    let request =
        ReplicaRequest { space: "s".into(), replica: 1, name: "r".into(), report, then: Then::Rest };
    at.spaces.portion(1, &request, || Box::new(|_| ())).unwrap();
    let report = at.next_report().unwrap();
    assert!(report.over);
    let failure = &report.failures[0];
    assert_eq!((failure.kind, &*failure.replica, &*failure.tensor), (FailureKind::NotFinite, "r", ""));
}

#[test]
fn a_failure_in_a_tensor_that_cannot_be_is_refused() {
    let mut at = in_term();
    assert!(at.batch(task(1, 1)).unwrap().is_none());
    assert_eq!(at.take(1, None), 0);
    for (bytes, refused) in [(crate::tensor::MAX_NAME + 1, true), (crate::tensor::MAX_NAME, false)] {
        let outcome = Err((FailureKind::NotFinite, "t".repeat(bytes).into()));
        let report = Some(PortionReport { batch: 1, portion: 0, outcome });
        let request =
            ReplicaRequest { space: "s".into(), replica: 1, name: "r".into(), report, then: Then::Rest };
        let answer = at.spaces.portion(1, &request, || Box::new(|_| ()));
        assert_eq!(answer.err().map(|error| error.kind), refused.then_some(Kind::Config));
        assert_eq!(at.next_report().is_none(), refused);
    }
}

#[test]
fn those_who_wait_learn_that_a_space_opens_and_closes() {
    let mut at = in_term();
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
    assert!(at.spaces.portion(2, &request("later"), || Box::new(|_| panic!("withdrawn"))).unwrap().is_none());
    assert_eq!(at.spaces.withdraw_portion(2, &request("later")), Some(None));
    open(&mut at.spaces, OPENER, "later", 0).unwrap();
    assert_eq!(early.try_recv().unwrap(), None);
    let waiting = at.wait(1, None);
    assert!(at.batch(task(1, 5)).unwrap().is_none());
    assert!(at.spaces.close(at.space).is_some() && at.spaces.close(at.space).is_none());
    assert_eq!(waiting.try_recv().unwrap(), None);
    assert!(!at.next_report().unwrap().over);
    assert_eq!(at.batch(task(2, 1)).unwrap_err().kind, Kind::Config);
}

#[test]
fn memory_is_given_back_and_what_does_not_fit_is_refused() {
    let meter = Meter::new(4 * REPLICA_BYTES);
    let mut spaces = Spaces::new(0, meter.clone());
    let (spec, _) = open(&mut spaces, OPENER, "s", 0).unwrap();
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

fn take(at_least: u64) -> SeatRequest {
    SeatRequest::Take { at_least, name: "other".into() }
}

#[test]
fn a_seat_belongs_to_the_key_that_has_taken_it() {
    let mut at = in_term();
    let (stranger, space) = (Claimant { client: 8, key: [8; 32] }, at.space);
    let denied = |answer: Result<()>| assert_eq!(answer.unwrap_err().kind, Kind::Denied);
    denied(at.spaces.check_seat(space, 1, &stranger.key));
    at.spaces.check_seat(space, 1, &COORDINATOR.key).unwrap();
    let store = |term| SeatRequest::Store { term, state: Arc::from(&b"mine"[..]) };
    denied(at.spaces.coordinate(stranger, space, &store(1)).map(drop));
    denied(at.spaces.batch(stranger, (space, 1), &task(1, 1), || panic!("it waits")).map(drop));
    at.spaces.coordinate(stranger, space, &SeatRequest::Leave { term: 1 }).unwrap();
    assert!(at.spaces.list()[0].1.is_some());
    assert_eq!(at.spaces.coordinate(stranger, space, &take(0)).unwrap_err().kind, Kind::Precondition);
    // Its session has ended: with the same key it is the same coordinator, under another incarnation.
    at.spaces.forget_client(COORDINATOR.client);
    denied(at.spaces.coordinate(stranger, space, &store(1)).map(drop));
    let again = Claimant { client: 10, ..COORDINATOR };
    at.spaces.coordinate(again, space, &store(1)).unwrap();
    assert_eq!(at.spaces.forget_client(10), [space]);
    // A free seat may be taken, which fences the former one.
    assert_eq!(at.spaces.coordinate(stranger, space, &take(0)).unwrap().term, 2);
    assert_eq!(at.spaces.check_seat(space, 1, &COORDINATOR.key).unwrap_err().kind, Kind::Fenced);
    assert_eq!(at.spaces.check_seat(space, 1 << 40, &stranger.key).unwrap_err().kind, Kind::Fenced);
}

#[test]
fn no_term_leaves_none_for_the_next_coordinator() {
    let mut at = in_term();
    for term in [1 << 62, (1 << 62) - 1, 1 << 21, u64::MAX] {
        let refused = at.spaces.coordinate(COORDINATOR, at.space, &take(term)).unwrap_err();
        assert_eq!(refused.kind, Kind::Config);
    }
    assert_eq!(at.spaces.coordinate(COORDINATOR, at.space, &take(1 << 20)).unwrap().term, (1 << 20) + 1);
}

#[test]
fn a_client_has_a_share_of_the_spaces() {
    let mut spaces = Spaces::new(0, Meter::new(u64::MAX));
    let full = |refused: Result<(SpaceSpec, bool)>| refused.unwrap_err();
    for k in 0..MAX_SPACES_OF_CLIENT {
        let (spec, _) = open(&mut spaces, 1, &format!("1/{k}"), u64::MAX).unwrap();
        assert_eq!(spec.keep_for_ms, MAX_KEEP_MS);
    }
    assert_eq!(full(open(&mut spaces, 1, "1/more", 0)).kind, Kind::Capacity);
    // One that is open is found all the same.
    assert!(!open(&mut spaces, 1, "1/0", 0).unwrap().1);
    let others = (2..).flat_map(|client| (0..MAX_SPACES_OF_CLIENT).map(move |k| (client, k)));
    for (client, k) in others.take(MAX_SPACES - MAX_SPACES_OF_CLIENT) {
        open(&mut spaces, client, &format!("{client}/{k}"), 0).unwrap();
    }
    let refused = full(open(&mut spaces, 99, "99", 0));
    assert!(refused.kind == Kind::Capacity && refused.message.contains("\"1/0\" has no coordinator"));
    let vacant = spaces.vacant();
    assert!(vacant.len() == MAX_SPACES && vacant[0].untaken_of == Some(1));
}

#[test]
fn replicas_that_are_gone_and_those_of_one_client_do_not_fill_a_space() {
    let mut at = in_term();
    let waiting = at.wait(1, None);
    assert!(at.batch(task(1, 3)).unwrap().is_none());
    for client in [2, 3] {
        assert!(matches!(at.ask(client, None, Then::Rest), Err(None)));
    }
    assert_eq!(portion(&waiting), 0);
    at.spaces.drop_idle_replicas();
    assert_eq!(at.take(3, None), 2);
    // The first two hold portions or have asked; the other one is a ghost.
    at.spaces.drop_idle_replicas();
    assert_eq!(at.spaces.withdraw_batch(at.space, 1).unwrap().replicas, 2);
    let name: Arc<str> = "r".into();
    let mut ask = |replica| {
        let (name, report) = (name.clone(), None);
        let request = ReplicaRequest { space: "s".into(), replica, name, report, then: Then::Rest };
        at.spaces.portion(9, &request, || Box::new(|_| ()))
    };
    (1..=MAX_REPLICAS_OF_CLIENT as u64).for_each(|replica| assert!(ask(replica).is_ok()));
    assert_eq!(ask(1 << 20).unwrap_err().kind, Kind::Capacity);
}

#[test]
fn a_portion_that_a_replica_never_held_is_not_reported() {
    let mut at = in_term();
    assert!(at.batch(task(1, 1)).unwrap().is_none());
    assert_eq!(at.take(1, None), 0);
    let report = |client: u64, portion, outcome| {
        let report = Some(PortionReport { batch: 1, portion, outcome });
        let name = format!("r{client}").into();
        ReplicaRequest { space: "s".into(), replica: 1, name, report, then: Then::Rest }
    };
    let failed = || Err((FailureKind::NotFinite, "".into()));
    for (client, portion, outcome) in [(1, 1, Ok(1.0)), (2, 0, Ok(1.0)), (2, 0, failed()), (1, 9, failed())] {
        let request = report(client, portion, outcome);
        let refused = at.spaces.portion(client, &request, || Box::new(|_| ())).unwrap_err();
        assert_eq!(refused.kind, Kind::StalePush);
    }
    let standing = at.spaces.withdraw_batch(at.space, 1).unwrap();
    assert_eq!((standing.replicas, standing.finished), (1, vec![None; 4]));
    // Its portion may be reported again, until it has reported another one.
    for _ in 0..2 {
        at.spaces.portion(1, &report(1, 0, Ok(1.0)), || Box::new(|_| ())).unwrap();
    }
    assert_eq!(at.take(1, Some((1, 0))), 1);
    at.spaces.portion(1, &report(1, 0, Ok(1.0)), || Box::new(|_| ())).unwrap();
}
