//! Portions of a range of samples, leased to workers. A table tracks which portions of the current epoch are
//! leased, returned or finished.
//!
//! A worker holds one portion at a time and reports it finished with its next request. So a request that is
//! repeated because its answer was lost changes nothing: a worker that has not finished its portion gets the
//! same one again. The portions of an ended client's workers go to other workers. The next epoch begins, for
//! all workers, when every portion of the current one is finished.

use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::memory::{Charge, Meter, Purpose};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

/// Most tables of a shard.
const MAX_TABLES: usize = 1 << 10;
/// Most workers of a table.
const MAX_WORKERS: usize = 1 << 16;
/// Largest epoch that a worker may name.
const MAX_EPOCH: u64 = 1 << 62;
/// Longest name, in bytes.
const MAX_NAME: usize = 256;
/// Bytes of a table, with the longest name.
const TABLE_BYTES: u64 = (MAX_NAME + 2 * size_of::<(Arc<str>, PortionTable)>()) as u64;
/// Bytes of a worker, or of a returned portion.
const WORKER_BYTES: u64 = 2 * size_of::<(PortionWorker, PortionMember, PortionWorker)>() as u64;

/// The samples 0 to `n`, in portions of `size`; the last one may be shorter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Samples {
    /// Workers that give the same name share the portions.
    pub name: Arc<str>,
    /// Number of samples.
    pub n: u64,
    /// Number of samples in a portion.
    pub size: u64,
    /// The seed from which the workers draw the order of the samples.
    pub seed: u64,
}

impl Samples {
    fn portions(&self) -> u64 {
        self.n.div_ceil(self.size)
    }

    fn check(&self) -> Result<()> {
        if self.name.is_empty() || self.name.len() > MAX_NAME {
            return Err(Error::new(Kind::Config, "portions without a name, or with one that is too long")
                .expected(format!("1 to {MAX_NAME} bytes"), self.name.len()));
        }
        for (what, value) in [("n", self.n), ("size", self.size)] {
            if value == 0 {
                let message = format!("portions {:?}: invalid {what}", self.name);
                return Err(Error::new(Kind::Config, message).expected("at least 1", value));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n={}, size={}, seed={}", self.n, self.size, self.seed)
    }
}

/// What a worker does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It takes a portion, or waits for one.
    Take,
    /// It takes none now.
    Rest,
    /// It leaves, and returns its portion.
    Leave,
}

/// A worker's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The samples that it wants portions of.
    pub samples: Samples,
    /// Which of its client's workers asks: a random number, not 0.
    pub worker: u64,
    /// Number of the table that it knows from the last answer; 0: none.
    pub run: u64,
    /// The epoch that it is in. If the request creates the table, this is the table's first epoch.
    pub epoch: u64,
    /// The portion of that epoch that it has finished.
    pub finished: Option<u64>,
    /// What it does next.
    pub then: Then,
}

/// What a worker gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// This portion, leased to the worker until it is finished.
    Portion(u64),
    /// The worker's epoch is over.
    Over,
    /// Nothing: it did not ask for more, or nothing was free yet.
    Nothing,
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortionAnswer {
    /// Number of the table. If it differs from that of the last answer, the finished portions were forgotten.
    pub run: u64,
    /// The current epoch.
    pub epoch: u64,
    /// Number of unfinished portions in that epoch.
    pub unfinished: u64,
    /// What the worker gets.
    pub given: Given,
}

/// Called at most once, with the answer of a waiting worker, while the tables are locked: it must not call
/// into them.
pub type PortionWaiter = Box<dyn FnOnce(PortionAnswer) + Send>;

/// A client, and the number of one of its workers.
type PortionWorker = (u64, u64);

#[derive(Default)]
struct PortionMember {
    held: Option<u64>,
    waiter: Option<PortionWaiter>,
}

impl fmt::Debug for PortionMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortionMember")
            .field("held", &self.held)
            .field("waits", &self.waiter.is_some())
            .finish()
    }
}

/// The portions of one range of samples.
#[derive(Debug)]
struct PortionTable {
    samples: Samples,
    run: u64,
    epoch: u64,
    /// The first portion that was never given out in this epoch.
    next: u64,
    /// Portions before `next` that were returned.
    returned: BTreeSet<u64>,
    /// Number of portions that members hold. All portions before `next` that are neither held nor returned
    /// are finished.
    leased: u64,
    members: BTreeMap<PortionWorker, PortionMember>,
    /// Waiting workers in order of arrival.
    queue: VecDeque<PortionWorker>,
    memory: Charge,
}

impl PortionTable {
    fn answer(&self, given: Given) -> PortionAnswer {
        let unfinished = self.samples.portions() - self.next + self.returned.len() as u64 + self.leased;
        PortionAnswer { run: self.run, epoch: self.epoch, unfinished, given }
    }

    fn join(&mut self, worker: PortionWorker) -> Result<()> {
        if self.members.contains_key(&worker) {
            return Ok(());
        }
        if self.members.len() >= MAX_WORKERS {
            let message = format!("portions {:?} have too many workers", self.samples.name);
            return Err(Error::new(Kind::Capacity, message)
                .expected(format!("at most {MAX_WORKERS}"), "one more")
                .retry_after_ms(1000));
        }
        self.memory.grow_to(self.bytes() + WORKER_BYTES)?;
        self.members.insert(worker, PortionMember::default());
        Ok(())
    }

    /// Bytes of the table. A worker that leaves returns at most one portion.
    fn bytes(&self) -> u64 {
        TABLE_BYTES + WORKER_BYTES * (self.members.len() + self.returned.len()) as u64
    }

    fn free(&mut self) -> Option<u64> {
        if let Some(portion) = self.returned.pop_first() {
            return Some(portion);
        }
        (self.next < self.samples.portions()).then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Finishes a portion, even if its lease ended meanwhile, unless another worker holds the portion by now.
    fn finish(&mut self, worker: PortionWorker, portion: u64) {
        match self.members.get_mut(&worker) {
            Some(member) if member.held == Some(portion) => {
                member.held = None;
                self.leased -= 1;
            }
            _ => drop(self.returned.remove(&portion)),
        }
    }

    /// Removes a worker, and returns its portion so that others get it.
    fn leave(&mut self, worker: PortionWorker) {
        if let Some(PortionMember { held: Some(portion), .. }) = self.members.remove(&worker) {
            self.leased -= 1;
            self.returned.insert(portion);
        }
        self.queue.retain(|other| *other != worker);
    }

    fn begin(&mut self, epoch: u64) {
        (self.epoch, self.next, self.leased) = (epoch, 0, 0);
        self.returned.clear();
        self.queue.clear();
        let over = self.answer(Given::Over);
        for member in self.members.values_mut() {
            member.held = None;
            if let Some(waiter) = member.waiter.take() {
                waiter(over);
            }
        }
    }

    /// Begins the next epoch if this one is over; otherwise gives free portions to waiting workers.
    fn settle(&mut self) {
        if self.leased == 0 && self.returned.is_empty() && self.next == self.samples.portions() {
            self.begin(self.epoch.saturating_add(1));
        }
        while let Some(worker) = self.queue.front().copied()
            && let Some(portion) = self.free()
        {
            self.queue.pop_front();
            self.leased += 1;
            let answer = self.answer(Given::Portion(portion));
            if let Some(member) = self.members.get_mut(&worker) {
                member.held = Some(portion);
                if let Some(waiter) = member.waiter.take() {
                    waiter(answer);
                }
            }
        }
        self.memory.shrink_to(self.bytes());
    }

    /// A portion for the worker; `None`: it waits.
    fn take(
        &mut self,
        worker: PortionWorker,
        later: impl FnOnce() -> PortionWaiter,
    ) -> Option<PortionAnswer> {
        let held = self.members.get(&worker).and_then(|member| member.held);
        let free = if held.is_none() { self.free() } else { None };
        self.leased += u64::from(free.is_some());
        let portion = held.or(free);
        let member = self.members.get_mut(&worker)?;
        let Some(portion) = portion else {
            if member.waiter.replace(later()).is_none() {
                self.queue.push_back(worker);
            }
            return None;
        };
        (member.held, member.waiter) = (Some(portion), None);
        Some(self.answer(Given::Portion(portion)))
    }
}

/// All tables of a shard.
#[derive(Debug)]
pub struct Portions {
    tables: BTreeMap<Arc<str>, PortionTable>,
    /// Number of the last table.
    run: u64,
    meter: Arc<Meter>,
}

impl Portions {
    /// Begins without tables. Their numbers count up from `run`, which must be random if workers may remember
    /// numbers of an earlier process.
    pub fn new(run: u64, meter: Arc<Meter>) -> Self {
        Self { tables: BTreeMap::new(), run, meter }
    }

    /// Answers a worker's request. `None`: the worker waits, and the waiter from `later` gets the answer.
    pub fn ask(
        &mut self,
        client: u64,
        ask: &Ask,
        later: impl FnOnce() -> PortionWaiter,
    ) -> Result<Option<PortionAnswer>> {
        ask.samples.check()?;
        if ask.epoch > MAX_EPOCH {
            return Err(Error::new(Kind::Config, "invalid epoch of portions")
                .expected(format!("at most {MAX_EPOCH}"), ask.epoch));
        }
        let worker = (client, ask.worker);
        if ask.then == Then::Leave && !self.tables.contains_key(&ask.samples.name) {
            let answer =
                PortionAnswer { run: ask.run, epoch: ask.epoch, unfinished: 0, given: Given::Nothing };
            return Ok(Some(answer));
        }
        let table = self.table(ask)?;
        let known = ask.run == table.run;
        if ask.epoch > table.epoch && ask.run != 0 {
            if known {
                return Err(Error::new(Kind::Precondition, "portions of an epoch that has not begun")
                    .expected(format!("at most epoch {}", table.epoch), ask.epoch));
            }
            // The worker knows a table that was lost, and a worker that does not know it came first.
            table.begin(ask.epoch);
        }
        if known
            && ask.epoch == table.epoch
            && let Some(portion) = ask.finished
        {
            table.finish(worker, portion);
            table.settle();
        }
        if ask.then == Then::Leave {
            table.leave(worker);
            table.settle();
            let answer = table.answer(Given::Nothing);
            self.drop_unused();
            return Ok(Some(answer));
        }
        if let Err(error) = table.join(worker) {
            self.drop_unused();
            return Err(error);
        }
        Ok(match ask.then {
            _ if ask.run != 0 && ask.epoch < table.epoch => Some(table.answer(Given::Over)),
            Then::Take => table.take(worker, later),
            _ => Some(table.answer(Given::Nothing)),
        })
    }

    fn table(&mut self, ask: &Ask) -> Result<&mut PortionTable> {
        let name = &ask.samples.name;
        if !self.tables.contains_key(name) {
            if self.tables.len() >= MAX_TABLES {
                return Err(Error::new(Kind::Capacity, "too many kinds of portions")
                    .expected(format!("at most {MAX_TABLES} names"), "one more"));
            }
            let memory = self.meter.take(Purpose::Identities, TABLE_BYTES)?;
            // 0 stands for no table.
            self.run = self.run.wrapping_add(1).max(1);
            let table = PortionTable {
                samples: ask.samples.clone(),
                run: self.run,
                epoch: ask.epoch,
                next: 0,
                returned: BTreeSet::new(),
                leased: 0,
                members: BTreeMap::new(),
                queue: VecDeque::new(),
                memory,
            };
            self.tables.insert(name.clone(), table);
        }
        match self.tables.get_mut(name) {
            Some(table) if table.samples == ask.samples => Ok(table),
            Some(table) => {
                let message = format!("portions {name:?} are of other samples");
                Err(Error::new(Kind::Precondition, message).expected(&table.samples, &ask.samples))
            }
            None => Err(Error::new(Kind::Internal, "a table of portions that is not there")),
        }
    }

    /// Ends a worker's wait, and returns an answer without a portion. `None`: the waiter has just got its
    /// answer.
    pub fn withdraw(&mut self, client: u64, ask: &Ask) -> Option<PortionAnswer> {
        let table = self.tables.get_mut(&ask.samples.name)?;
        let worker = (client, ask.worker);
        drop(table.members.get_mut(&worker)?.waiter.take()?);
        table.queue.retain(|other| *other != worker);
        Some(table.answer(Given::Nothing))
    }

    /// Removes the workers of an ended client, and gives their portions to others.
    pub fn forget_client(&mut self, client: u64) {
        for table in self.tables.values_mut() {
            let workers = table.members.range((client, 0)..=(client, u64::MAX));
            let workers: Vec<_> = workers.map(|(worker, _)| *worker).collect();
            for worker in &workers {
                table.leave(*worker);
            }
            if !workers.is_empty() {
                table.settle();
            }
        }
        self.drop_unused();
    }

    fn drop_unused(&mut self) {
        self.tables.retain(|_, table| !table.members.is_empty());
    }

    /// Numbers of tables, of workers and of leased portions.
    pub fn counts(&self) -> (u64, u64, u64) {
        let workers = self.tables.values().map(|table| table.members.len() as u64).sum();
        (self.tables.len() as u64, workers, self.tables.values().map(|table| table.leased).sum())
    }
}

#[cfg(test)]
mod tests {
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
        fn told(&mut self) -> Option<Given> {
            let answer = self.answers.1.try_recv().ok()?;
            Some(self.note(answer))
        }

        /// Takes portions for as long as they come without a wait.
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
        assert_eq!((a.told(), tables.counts()), (None, (1, 2, 1)));
        // The last finished portion ends the epoch for both.
        assert_eq!(b.next(&mut tables), Some(Given::Over));
        assert_eq!(a.told(), Some(Given::Over));
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
        assert_eq!(b.told(), Some(portion(0)));
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
        assert_eq!(a.told(), Some(Given::Over));
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
        assert_eq!((b.told(), tables.counts()), (None, (1, 1, 0)));
        assert_eq!(b.next(&mut tables), Some(portion(0)));
        // A second request replaces the first.
        let mut c = worker(3, 1, 1);
        assert_eq!((c.next(&mut tables), c.next(&mut tables)), (None, None));
        tables.forget_client(2);
        assert_eq!((c.told(), c.told()), (Some(portion(0)), None));
    }

    #[test]
    fn a_table_that_was_lost_begins_the_newest_epoch_anew() {
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
}
