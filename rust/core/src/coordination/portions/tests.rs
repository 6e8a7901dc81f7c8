use super::table::WORKER_BYTES;
use super::*;
use std::sync::mpsc;

fn tables() -> Portions {
    Portions::new(0, Meter::new(u64::MAX))
}

/// A well-behaved worker: it remembers its last answer, and finishes its portion with the next request.
struct At {
    client: u64,
    ask: Ask,
    answers: (mpsc::Sender<PortionAnswer>, mpsc::Receiver<PortionAnswer>),
}

fn worker(client: u64, n: u64, size: u64) -> At {
    let samples = Samples { name: "train".into(), n, size, seed: 0 };
    let ask = Ask { samples, worker: 1, run: 0, epoch: 0, finished: None, then: Then::Take };
    At { client, ask, answers: mpsc::channel() }
}

impl At {
    fn note(&mut self, answer: PortionAnswer) -> Given {
        (self.ask.run, self.ask.epoch) = (answer.run, answer.epoch);
        self.ask.finished = match answer.given {
            Given::Portion(portion) => Some(portion),
            _ => None,
        };
        answer.given
    }

    /// `None`: it waits.
    fn next(&mut self, tables: &mut Portions) -> Option<Given> {
        let sender = self.answers.0.clone();
        let later = move || -> PortionWaiter { Box::new(move |answer| sender.send(answer).unwrap()) };
        let answer = tables.ask(self.client, &self.ask, later).unwrap()?;
        Some(self.note(answer))
    }

    /// The answer that came while it waited.
    fn next_answer(&mut self) -> Option<Given> {
        let answer = self.answers.1.try_recv().ok()?;
        Some(self.note(answer))
    }

    /// Takes portions until one requires a wait.
    fn rest(&mut self, tables: &mut Portions) -> Vec<u64> {
        let mut taken = Vec::new();
        while let Some(Given::Portion(portion)) = self.next(tables) {
            taken.push(portion);
        }
        taken
    }
}

fn portion(k: u64) -> Given {
    Given::Portion(k)
}

#[test]
fn an_epoch_beyond_the_limit_is_refused() {
    let (mut tables, mut a) = (tables(), worker(1, 10, 3));
    a.ask.epoch = u64::MAX;
    let refused = tables.ask(1, &a.ask, || -> PortionWaiter { Box::new(|_| ()) });
    assert_eq!(refused.unwrap_err().kind, Kind::Config);
    assert_eq!(tables.counts(), (0, 0, 0));
}

#[test]
fn an_epoch_has_each_portion_once() {
    let (mut tables, mut a, mut b) = (tables(), worker(1, 10, 3), worker(2, 10, 3));
    assert_eq!(a.next(&mut tables), Some(portion(0)));
    assert_eq!(b.next(&mut tables), Some(portion(1)));
    assert_eq!(a.rest(&mut tables), [2, 3]);
    assert_eq!((a.next_answer(), tables.counts()), (None, (1, 2, 1)));
    // The last finished portion ends the epoch for both.
    assert_eq!(b.next(&mut tables), Some(Given::Over));
    assert_eq!(a.next_answer(), Some(Given::Over));
    assert_eq!((a.ask.epoch, b.ask.epoch), (1, 1));
    assert_eq!(b.rest(&mut tables), [0, 1, 2, 3]);
    // No worker waits, and a late one joins the current epoch.
    let mut late = worker(3, 10, 3);
    assert_eq!(late.next(&mut tables), Some(portion(0)));
    assert_eq!((late.ask.epoch, late.ask.run), (2, b.ask.run));
    assert_eq!(a.next(&mut tables), Some(Given::Over));
}

#[test]
fn a_question_may_be_repeated() {
    let (mut tables, mut a) = (tables(), worker(1, 4, 2));
    let first = a.ask.clone();
    assert_eq!(a.next(&mut tables), Some(portion(0)));
    let second = a.ask.clone();
    assert_eq!(a.next(&mut tables), Some(portion(1)));
    for ask in [first, second] {
        a.ask = ask;
        assert_eq!(a.next(&mut tables), Some(portion(1)));
    }
    let last = a.ask.clone();
    assert_eq!(a.next(&mut tables), Some(Given::Over));
    a.ask = last;
    assert_eq!(a.next(&mut tables), Some(Given::Over));
    assert_eq!(a.ask.epoch, 1);
}

#[test]
fn what_an_ended_client_held_goes_to_others() {
    let (mut tables, mut a, mut b) = (tables(), worker(1, 3, 1), worker(2, 3, 1));
    assert_eq!(a.next(&mut tables), Some(portion(0)));
    assert_eq!(b.rest(&mut tables), [1, 2]);
    tables.forget_client(1);
    assert_eq!(b.next_answer(), Some(portion(0)));
    assert_eq!(b.next(&mut tables), Some(Given::Over));
    tables.forget_client(2);
    assert_eq!(tables.counts(), (0, 0, 0));
}

#[test]
fn portions_that_came_back_are_given_first() {
    let (mut tables, mut a, mut b) = (tables(), worker(1, 9, 1), worker(2, 9, 1));
    assert_eq!(a.next(&mut tables), Some(portion(0)));
    assert_eq!(b.next(&mut tables), Some(portion(1)));
    a.ask.then = Then::Leave;
    a.ask.finished = None;
    assert_eq!(a.next(&mut tables), Some(Given::Nothing));
    assert_eq!(b.next(&mut tables), Some(portion(0)));
    assert_eq!(b.next(&mut tables), Some(portion(2)));
}

#[test]
fn a_lost_lease_takes_nothing_back_that_was_done() {
    let (mut tables, mut a, mut b) = (tables(), worker(1, 3, 1), worker(2, 3, 1));
    a.next(&mut tables);
    b.next(&mut tables);
    tables.forget_client(1);
    // No other worker holds the portion, so finishing it counts.
    a.client = 3;
    assert_eq!(a.next(&mut tables), Some(portion(2)));
    tables.forget_client(3);
    assert_eq!(b.next(&mut tables), Some(portion(2)));
    // Another worker holds it, so only that worker can finish it.
    a.client = 4;
    assert_eq!(a.next(&mut tables), None);
    assert_eq!(b.next(&mut tables), Some(Given::Over));
    assert_eq!(a.next_answer(), Some(Given::Over));
}

#[test]
fn a_worker_rests_and_leaves() {
    let (mut tables, mut a, mut b) = (tables(), worker(1, 2, 1), worker(2, 2, 1));
    assert_eq!(a.next(&mut tables), Some(portion(0)));
    a.ask.then = Then::Rest;
    assert_eq!(a.next(&mut tables), Some(Given::Nothing));
    assert_eq!(tables.counts(), (1, 1, 0));
    assert_eq!(b.rest(&mut tables), [1]);
    assert_eq!(b.ask.epoch, 1);
    for at in [&mut a, &mut b] {
        at.ask.then = Then::Leave;
        assert_eq!(at.next(&mut tables), Some(Given::Nothing));
        assert_eq!(at.next(&mut tables), Some(Given::Nothing));
    }
    assert_eq!(tables.counts(), (0, 0, 0));
    assert_eq!(tables.meter.used(), 0);
}

#[test]
fn whoever_waits_no_longer_is_given_nothing() {
    let (mut tables, mut a, mut b) = (tables(), worker(1, 1, 1), worker(2, 1, 1));
    assert_eq!(a.next(&mut tables), Some(portion(0)));
    assert_eq!(b.next(&mut tables), None);
    let nothing = tables.withdraw(2, &b.ask).unwrap();
    assert_eq!((nothing.given, nothing.unfinished), (Given::Nothing, 1));
    assert!(tables.withdraw(2, &b.ask).is_none());
    tables.forget_client(1);
    assert_eq!((b.next_answer(), tables.counts()), (None, (1, 1, 0)));
    assert_eq!(b.next(&mut tables), Some(portion(0)));
    // A second request replaces the first.
    let mut c = worker(3, 1, 1);
    assert_eq!((c.next(&mut tables), c.next(&mut tables)), (None, None));
    tables.forget_client(2);
    assert_eq!((c.next_answer(), c.next_answer()), (Some(portion(0)), None));
}

#[test]
fn a_table_that_was_lost_begins_the_newest_epoch_again() {
    let (mut a, mut fresh, mut old) = (worker(1, 2, 1), worker(2, 2, 1), worker(3, 2, 1));
    let mut before = tables();
    for _ in 0..3 {
        a.rest(&mut before);
    }
    a.next(&mut before);
    let known = a.ask.run;
    let mut after = Portions::new(100, Meter::new(u64::MAX));
    // A worker that knows no table comes first.
    assert_eq!(fresh.next(&mut after), Some(portion(0)));
    assert_eq!(a.next(&mut after), Some(portion(0)));
    assert_eq!((a.ask.epoch, a.ask.run == known), (3, false));
    assert_eq!(fresh.next(&mut after), Some(Given::Over));
    assert_eq!(fresh.ask.epoch, 3);
    // Another was in an earlier epoch when the table was lost.
    (old.ask.run, old.ask.epoch, old.ask.finished) = (known, 2, Some(1));
    assert_eq!(old.next(&mut after), Some(Given::Over));
    // The epoch has all its portions.
    assert_eq!(a.rest(&mut after), [1]);
    assert_eq!(a.ask.epoch, 4);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut tables = tables();
    worker(1, 10, 3).next(&mut tables);
    let refused = |tables: &mut Portions, change: &dyn Fn(&mut Ask)| {
        let mut ask = worker(2, 10, 3).ask;
        change(&mut ask);
        tables.ask(2, &ask, || Box::new(|_| ())).unwrap_err()
    };
    let other = refused(&mut tables, &|ask| ask.samples.seed = 7);
    assert_eq!(other.kind, Kind::Precondition);
    assert_eq!(other.expected.as_deref(), Some("n=10, size=3, seed=0"));
    assert_eq!(other.got.as_deref(), Some("n=10, size=3, seed=7"));
    assert!(other.message.contains("\"train\""), "{other}");
    for change in [
        &|ask: &mut Ask| ask.samples.n = 0,
        &|ask: &mut Ask| ask.samples.size = 0,
        &|ask: &mut Ask| ask.samples.name = "".into(),
        &|ask: &mut Ask| ask.samples.name = "ä".repeat(129).into(),
    ] as [&dyn Fn(&mut Ask); 4]
    {
        assert_eq!(refused(&mut tables, change).kind, Kind::Config);
    }
    let early = refused(&mut tables, &|ask| (ask.run, ask.epoch) = (1, 1));
    assert_eq!(early.kind, Kind::Precondition);
    assert_eq!(tables.counts(), (1, 1, 1));
}

#[test]
fn tables_are_bounded_and_counted() {
    let mut tables = tables();
    let ask = |tables: &mut Portions, client, name: &str| {
        let mut at = worker(client, 1 << 40, 1);
        at.ask.samples.name = name.into();
        tables.ask(client, &at.ask, || Box::new(|_| ())).map(|_| ())
    };
    for k in 0..MAX_TABLES {
        ask(&mut tables, 1, &format!("{k}")).unwrap();
    }
    assert_eq!(ask(&mut tables, 1, "one more").unwrap_err().kind, Kind::Capacity);
    tables.forget_client(1);
    assert_eq!((tables.counts(), tables.meter.used()), ((0, 0, 0), 0));

    let mut small = Portions::new(0, Meter::new(TABLE_BYTES + 2 * WORKER_BYTES));
    for client in 1..=2 {
        ask(&mut small, client, "train").unwrap();
    }
    assert_eq!(ask(&mut small, 3, "train").unwrap_err().kind, Kind::Capacity);
    // The portion that a worker returns takes the memory that the worker had.
    small.forget_client(1);
    assert_eq!(ask(&mut small, 3, "train").unwrap_err().kind, Kind::Capacity);
    ask(&mut small, 2, "train").unwrap();
    assert_eq!(small.counts(), (1, 1, 1));
}
