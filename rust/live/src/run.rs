//! The event loop of a run: a heap of virtual times, and the event at each. Tests keep it equal to that of
//! `fastps.simulate`: the same order of equal times, the same steps.

use crate::durations::duration;
use crate::fit::Fit;
use crate::log::{Log, Message};
use crate::member::Member;
use crate::problems::Problem;
use crate::problems::digits::{Digits, digits};
use crate::random::{Draws, Purpose};
use crate::server::Server;
use crate::settings::{Settings, Training};
use crate::worker::{Ack, Worker};
use fastps_core::error::{Error, Kind, Result};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// A value above this, or one that is not finite, means that the run has diverged.
const DIVERGED: f32 = 1e6;
/// Most members, including those that are gone.
const MOST_MEMBERS: usize = 256;

/// An event at a virtual time.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    /// The gradient of a member arrives, if it is still this turn.
    Arrive(usize, u64),
    /// A pause ends.
    Resume(usize),
    /// A lease ends.
    Lose(usize),
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    time: f64,
    /// Keeps the order of equal times.
    order: u64,
    event: Event,
}

impl Eq for Entry {}

impl Ord for Entry {
    /// The earliest entry is the largest, which a heap gives first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.time.total_cmp(&self.time).then(other.order.cmp(&self.order))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Outcome of a step; its number is part of the step's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Applied = 0,
    Kept = 1,
    TooStale = 2,
    NotFinite = 3,
    Lost = 4,
}

/// One run, at a moment of its virtual time.
pub(crate) struct Run {
    pub(crate) settings: Settings,
    pub(crate) server: Server,
    pub(crate) members: Vec<Member>,
    pub(crate) log: Log,
    pub(crate) now: f64,
    /// Updates since the start, including those before the workers were last restarted.
    pub(crate) updates: u64,
    pub(crate) fit: Fit,
    /// Members that wait for others, longest wait first.
    waiting: Vec<usize>,
    queue: BinaryHeap<Entry>,
    entries: u64,
    /// Difference between the number of updates and the server's version.
    base: i64,
    values: Vec<f32>,
    gradient: Vec<f32>,
    point: Option<[f64; 2]>,
    lr: Option<f64>,
    stands: bool,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run").field("now", &self.now).field("updates", &self.updates).finish_non_exhaustive()
    }
}

impl Run {
    /// A run at its start.
    pub(crate) fn new(settings: Settings) -> Result<Self> {
        let start = match settings.problem {
            Problem::Toy(_) => settings.start.map(|v| v as f32).to_vec(),
            Problem::Digits => Digits::start(settings.seed),
        };
        Self::from(settings, start, Log::new(), 0.0, 0)
    }

    /// The same run with other settings: its workers leave, and as many begin at the server's values.
    pub(crate) fn restarted(mut self, settings: Settings) -> Result<Self> {
        (0..self.members.len()).for_each(|k| self.count_unended(k));
        let same = matches!(
            (self.settings.problem, settings.problem),
            (Problem::Toy(_), Problem::Toy(_)) | (Problem::Digits, Problem::Digits)
        );
        let start = match settings.problem {
            _ if same => self.values,
            Problem::Toy(_) => settings.start.map(|v| v as f32).to_vec(),
            Problem::Digits => Digits::start(settings.seed),
        };
        let mut run = Self::from(settings, start, Log { diverged: 0, ..self.log }, self.now, self.updates)?;
        run.message("set", None, "the workers were restarted from the present point".to_owned());
        Ok(run)
    }

    fn from(settings: Settings, start: Vec<f32>, log: Log, now: f64, updates: u64) -> Result<Self> {
        let server = Server::new(&settings, &start)?;
        let base = updates as i64 - server.version() as i64;
        let (workers, len) = (settings.workers as usize, start.len());
        let mut run = Self {
            settings,
            server,
            members: Vec::new(),
            log,
            now,
            updates,
            fit: Fit::default(),
            waiting: Vec::new(),
            queue: BinaryHeap::new(),
            entries: 0,
            base,
            values: start,
            gradient: vec![0.0; len],
            point: None,
            lr: None,
            stands: false,
        };
        for _ in 0..workers {
            run.members.push(Member::default());
        }
        for k in 0..workers {
            run.enter(k)?;
        }
        run.follow();
        run.evaluate();
        run.log.point(updates, now);
        Ok(run)
    }

    /// The server's values.
    pub(crate) fn values(&self) -> &[f32] {
        &self.values
    }

    /// The server's point in the plane; NaN for digits.
    pub(crate) fn point(&self) -> [f64; 2] {
        self.in_plane(&self.values)
    }

    /// Values as a point in the plane; NaN for digits.
    pub(crate) fn in_plane(&self, values: &[f32]) -> [f64; 2] {
        match (self.settings.problem, values) {
            (Problem::Toy(_), [x, y]) => [f64::from(*x), f64::from(*y)],
            _ => [f64::NAN; 2],
        }
    }

    /// Sets the learning rate of all pushes from now on, instead of the optimizer's.
    pub(crate) fn set_lr(&mut self, lr: f64) {
        self.lr = Some(lr);
        self.fit = Fit::default(); // the path continues at another rate
        for worker in self.members.iter_mut().filter_map(|member| member.worker.as_mut()) {
            worker.lr = Some(lr);
        }
    }

    // -- time -----------------------------------------------------------------------------------------------

    /// Handles events until a time, a number of updates or a number of events is reached.
    pub(crate) fn advance(&mut self, time: f64, updates: f64, events: u32) -> u32 {
        let mut handled = 0;
        while handled < events && (self.updates as f64) < updates {
            let Some(entry) = self.queue.peek().copied().filter(|entry| entry.time <= time) else {
                // The clock advances even without events.
                if time.is_finite() {
                    self.now = self.now.max(time);
                }
                break;
            };
            self.queue.pop();
            if let Event::Arrive(k, turn) = entry.event
                && turn != self.members[k].turn
            {
                continue;
            }
            self.now = entry.time;
            handled += 1;
            self.log.handled += 1;
            match entry.event {
                Event::Arrive(k, _) => self.arrive(k),
                Event::Resume(k) => self.resume(k),
                Event::Lose(k) => self.lose(k),
            }
        }
        if self.queue.is_empty() && !self.stands {
            self.stand_still();
        }
        handled
    }

    /// Returns whether no event will ever happen.
    pub(crate) fn stands(&self) -> bool {
        self.stands
    }

    fn at(&mut self, time: f64, event: Event) {
        self.entries += 1;
        self.queue.push(Entry { time, order: self.entries, event });
    }

    fn message(&mut self, kind: &'static str, worker: Option<usize>, text: String) {
        self.log.messages.push(Message { time: self.now, kind, worker, text });
    }

    // -- steps ----------------------------------------------------------------------------------------------

    /// Lets a member join.
    fn enter(&mut self, k: usize) -> Result<()> {
        let mut worker = Worker::join(&mut self.server, &self.settings, k)?;
        worker.lr = self.lr;
        let ready = worker.ready(&self.server)?;
        let now = self.now;
        let member = &mut self.members[k];
        if member.step == 0 {
            member.born = now;
        }
        member.worker = Some(worker);
        if ready {
            self.begin(k);
            return Ok(());
        }
        (member.starting, member.since) = (true, Some(now));
        self.waiting.push(k);
        Ok(())
    }

    /// Begins to compute the next gradient.
    fn begin(&mut self, k: usize) {
        let (now, delay) = (self.now, self.settings.delay);
        let member = &mut self.members[k];
        member.step += 1;
        (member.began, member.delay) = (now, delay);
        member.arrives = now + 2.0 * delay + duration(&self.settings, k, member.step);
        let (arrives, turn) = (member.arrives, member.turn);
        self.at(arrives, Event::Arrive(k, turn));
    }

    /// Handles an arriving gradient: pushes it, and fetches unless others have to come first.
    fn arrive(&mut self, k: usize) {
        let Some(mut worker) = self.members[k].worker.take() else {
            return self.come_back(k); // it lost its place while it was paused
        };
        let mut gradient = std::mem::take(&mut self.gradient);
        self.compute(k, &worker.values, &mut gradient);
        let together = matches!(self.settings.training, Training::Together(_));
        let done = if together {
            worker.begin(&self.server, &self.settings, &gradient).map(|()| None)
        } else {
            worker.step(&self.server, &self.settings, &gradient).map(Some)
        };
        self.gradient = gradient;
        self.members[k].worker = Some(worker);
        let counted = self.follow();
        self.members[k].version = if counted { self.updates } else { 0 };
        match done {
            Ok(None) => {
                self.members[k].since = Some(self.now);
                self.waiting.push(k);
            }
            Ok(Some(ack)) => self.end_step(k, Ok(ack)),
            Err(error) => self.end_step(k, Err(error)),
        }
        if !self.waiting.is_empty() {
            self.release();
        }
    }

    /// Computes the gradient of a member's step at its values.
    fn compute(&mut self, k: usize, values: &[f32], gradient: &mut [f32]) {
        let place = self.in_plane(values);
        let (settings, member) = (&self.settings, &mut self.members[k]);
        member.place = place;
        match settings.problem {
            Problem::Toy(toy) => {
                let (loss, mut slope) = (toy.at)(place[0], place[1]);
                if settings.noise > 0.0 {
                    let mut draws = Draws::at(settings.seed, Purpose::Noise, k as u64, member.step);
                    slope = slope.map(|g| g + settings.noise * draws.normal());
                }
                gradient.iter_mut().zip(slope).for_each(|(g, s)| *g = s as f32);
                member.loss = loss;
            }
            Problem::Digits => {
                let mut draws = Draws::at(settings.seed, Purpose::Batch, k as u64, member.step);
                member.loss = digits().gradient(values, settings.batch, &mut draws, gradient);
            }
        }
        if std::mem::take(&mut member.breaks) {
            gradient[0] = f32::NAN;
        }
    }

    /// Lets members continue whose wait is over.
    fn release(&mut self) {
        // A step may end a warm start that others wait for.
        while self.release_some() && self.waiting.iter().any(|k| self.members[*k].starting) {}
    }

    /// Asks each waiting member once; returns whether one could continue.
    fn release_some(&mut self) -> bool {
        let mut released = false;
        for k in self.waiting.clone() {
            let member = &mut self.members[k];
            let paused = member.paused(self.now);
            let Some(worker) = member.worker.as_mut().filter(|_| !paused) else { continue };
            let ready = worker.ready(&self.server);
            if matches!(ready, Ok(false)) {
                continue;
            }
            released = true;
            self.waiting.retain(|other| *other != k);
            let starts = std::mem::take(&mut member.starting);
            let ack = ready.and_then(|_| {
                if starts { Ok(Ack::default()) } else { worker.end(&self.server, &self.settings) }
            });
            member.waits_no_more(self.now);
            if starts {
                self.begin(k);
                continue;
            }
            if self.settings.training.shares() {
                // Others may have made more versions since, if it was paused.
                let made = ack.as_ref().ok().filter(|ack| ack.scale.is_some());
                member.version = made.map_or(0, |ack| (ack.version as i64 + self.base) as u64);
            }
            self.end_step(k, ack);
        }
        released
    }

    /// Records a finished step, and begins the next one.
    fn end_step(&mut self, k: usize, ack: Result<Ack>) {
        let ack = ack.unwrap_or_else(|error| Ack { refused: Some(error), ..Ack::default() });
        let outcome = match &ack.refused {
            Some(error) if error.kind == Kind::NonFinite => Outcome::NotFinite,
            Some(_) => Outcome::TooStale,
            None if ack.scale.is_none() => Outcome::Kept,
            None => Outcome::Applied,
        };
        if let Some(error) = &ack.refused {
            self.refuse(k, error);
        }
        self.members[k].refused = ack.refused.is_some();
        self.log.refused += u64::from(ack.refused.is_some());
        self.count(k, &ack);
        self.record(k, outcome, &ack);
        self.begin(k);
    }

    /// Counts a push that was acknowledged, if there was one.
    fn count(&mut self, k: usize, ack: &Ack) {
        self.log.count_bytes(self.settings.codec_index(), ack.bytes);
        if ack.scale.is_none() {
            return;
        }
        let member = &mut self.members[k];
        member.applied += 1;
        member.staleness = ack.staleness;
        self.log.acknowledged += 1;
        self.log.plain_bytes += 4 * self.server.len() as u64;
        if let Some(staleness) = ack.staleness {
            self.log.count(staleness);
        }
    }

    /// Counts the push of a member that leaves while it waits: it was applied, but its step never ends.
    fn count_unended(&mut self, k: usize) {
        let worker = self.members[k].worker.as_mut();
        if let Some(ack) = worker.and_then(|worker| worker.acknowledged(&self.server, &self.settings)) {
            self.count(k, &ack);
        }
    }

    /// Records a refusal, unless the member's last step was refused, too.
    fn refuse(&mut self, k: usize, error: &Error) {
        let member = &self.members[k];
        if !member.refused {
            let place = format!(" (worker {k}, step {}, virtual time {})", member.step, rounded(self.now));
            self.message("refused", Some(k), format!("{error}{place}"));
        }
    }

    fn record(&mut self, k: usize, outcome: Outcome, ack: &Ack) {
        let (member, force, server) = (&self.members[k], self.server.in_force(), self.point());
        let receipt = ack.scale.is_some();
        let momentum = if self.has_momentum() && self.updates > 0 { force.momentum } else { f64::NAN };
        self.log.rows.push([
            self.log.rows.count as f64,
            k as f64,
            member.step as f64,
            member.began,
            member.began + member.delay,
            member.arrives - member.delay,
            member.arrives,
            self.now,
            member.place[0],
            member.place[1],
            server[0],
            server[1],
            f64::from(outcome as u8),
            member.version as f64,
            ack.staleness.filter(|_| receipt).map_or(-1.0, |staleness| staleness as f64),
            ack.scale.map_or(f64::NAN, f64::from),
            ack.bytes as f64,
            member.loss,
            momentum,
            if receipt { force.lr } else { f64::NAN },
        ]);
    }

    /// Returns whether the optimizer has a momentum that a correction may change.
    pub(crate) fn has_momentum(&self) -> bool {
        matches!(self.settings.optimizer.name(), "sgd" | "rmsprop")
    }

    /// Counts the server's updates and reads its values; returns whether there are new ones.
    fn follow(&mut self) -> bool {
        let made = (self.server.version() as i64 + self.base) as u64;
        let first = self.point.is_none();
        if made == self.updates && !first {
            return false;
        }
        let was = std::mem::replace(&mut self.updates, made);
        // The first client asks, so that no worker counts as having pulled.
        if self.server.pull(1, &mut self.values).is_err() {
            return false;
        }
        let point = self.point();
        if let Problem::Toy(toy) = self.settings.problem {
            self.fit.point(toy, point, self.point);
        }
        self.point = Some(point);
        if first {
            return false;
        }
        if self.log.diverged == 0 && self.values.iter().any(|v| v.is_nan() || v.abs() > DIVERGED) {
            self.log.diverged = made;
            self.message("diverged", None, format!("diverged at update {made}"));
        }
        let every = self.settings.evaluate_every.saturating_mul(self.log.thinned);
        if made / every != was / every {
            self.evaluate();
            self.log.point(made, self.now);
        }
        true
    }

    /// Computes the loss at the server's values.
    pub(crate) fn evaluate(&mut self) -> [f64; 2] {
        (self.log.loss, self.log.error) = match self.settings.problem {
            Problem::Toy(toy) => {
                let [x, y] = self.point();
                ((toy.at)(x, y).0, f64::NAN)
            }
            Problem::Digits => digits().evaluate(&self.values),
        };
        [self.log.loss, self.log.error]
    }

    // -- what happens to workers ----------------------------------------------------------------------------

    /// Returns whether a member lives; if not, records that.
    fn lives(&mut self, k: usize) -> bool {
        let member = self.members.get(k);
        if member.is_some_and(|member| !member.dead && member.left.is_none()) {
            return true;
        }
        let state = if member.is_none() { "has not joined yet" } else { "was gone already" };
        self.message("lost", Some(k), format!("worker {k} {state}"));
        false
    }

    /// Kills a worker. It keeps its place until its lease ends.
    pub(crate) fn kill(&mut self, k: usize) {
        if !self.lives(k) {
            return;
        }
        let now = self.now;
        let member = &mut self.members[k];
        let text = format!("worker {k} killed in step {}", member.step);
        if !member.paused(now) {
            member.silent = now;
        }
        member.dead = true;
        member.turn += 1;
        if member.worker.is_none() {
            member.left = Some(now);
        }
        member.waits_no_more(now);
        self.waiting.retain(|other| *other != k);
        self.message("killed", Some(k), text);
        self.at_end_of_lease(k);
    }

    /// Stops a worker for some time.
    pub(crate) fn pause(&mut self, k: usize, seconds: f64) {
        if !self.lives(k) {
            return;
        }
        let (now, lease) = (self.now, self.settings.lease);
        self.message("paused", Some(k), format!("worker {k} paused in step {}", self.members[k].step));
        let member = &mut self.members[k];
        if !member.put_off(now, seconds) {
            return;
        }
        let (arrives, turn, waits, resumes) =
            (member.arrives, member.turn, member.since.is_some(), member.resumes);
        let loses = resumes > member.silent + lease;
        if !waits {
            self.at(arrives, Event::Arrive(k, turn));
        }
        self.at(resumes, Event::Resume(k));
        if loses {
            self.at_end_of_lease(k);
        }
    }

    /// Lets another worker join.
    pub(crate) fn join(&mut self) -> Result<()> {
        if self.members.len() >= MOST_MEMBERS {
            return Err(Error::new(Kind::Capacity, "too many workers have joined")
                .expected(format!("at most {MOST_MEMBERS}"), "one more"));
        }
        let (k, now) = (self.members.len(), self.now);
        self.members.push(Member { born: now, ..Member::default() });
        let text = match self.enter(k) {
            Ok(()) => format!("worker {k} joined after {} updates", self.updates),
            Err(error) => {
                self.members[k].left = Some(now);
                format!("worker {k} was refused: {error}")
            }
        };
        self.message("joined", Some(k), text);
        self.stands = false;
        Ok(())
    }

    /// Makes a worker's next gradient NaN.
    pub(crate) fn break_next(&mut self, k: usize) {
        if self.lives(k) {
            self.members[k].breaks = true;
        }
    }

    /// Ends the place of a member that has been silent for a whole lease.
    fn at_end_of_lease(&mut self, k: usize) {
        let member = &self.members[k];
        let end = self.now.max(member.silent + self.settings.lease);
        if end < f64::INFINITY && member.worker.is_some() {
            self.at(end, Event::Lose(k));
        }
    }

    fn resume(&mut self, k: usize) {
        let member = &self.members[k];
        if member.dead || member.paused(self.now) {
            return;
        }
        if member.worker.is_none() && member.since.is_some() {
            self.come_back(k); // it waited, and has lost its place
        } else {
            self.release();
        }
    }

    fn lose(&mut self, k: usize) {
        let now = self.now;
        let member = &mut self.members[k];
        if !member.dead && !member.paused(now) {
            return;
        }
        if member.dead {
            member.left = member.left.or(Some(now));
        }
        self.count_unended(k);
        let Some(worker) = self.members[k].worker.take() else { return };
        worker.leave(&self.server);
        self.waiting.retain(|other| *other != k);
        self.message("lost", Some(k), format!("worker {k} lost its place"));
        self.follow(); // its leaving may have completed a version
        self.release();
    }

    /// Lets a member that has lost its place join again; its gradient is dropped.
    fn come_back(&mut self, k: usize) {
        let now = self.now;
        let member = &mut self.members[k];
        member.waits_no_more(now);
        if !std::mem::take(&mut member.starting) {
            (member.version, member.loss) = (0, f64::NAN);
            self.record(k, Outcome::Lost, &Ack::default());
        }
        let text = match self.enter(k) {
            Ok(()) => format!("worker {k} joined again after {} updates", self.updates),
            Err(error) => {
                // Others have taken all places.
                self.members[k].left = Some(now);
                format!("worker {k} was refused: {error}")
            }
        };
        self.message("joined", Some(k), text);
    }

    /// Records that no event will happen any more, and who waits for whom.
    fn stand_still(&mut self) {
        self.stands = true;
        let waits = |k: &usize| {
            let others: Vec<_> =
                (0..self.members.len()).filter(|o| o != k && self.members[*o].worker.is_some()).collect();
            let busy: Vec<_> = others.iter().copied().filter(|o| !self.waiting.contains(o)).collect();
            let whom: Vec<_> = if busy.is_empty() { others } else { busy }
                .into_iter()
                .map(|o| format!("worker {o}{}", if self.members[o].dead { " (killed)" } else { "" }))
                .collect();
            let whom = if whom.is_empty() { "no worker".to_owned() } else { whom.join(", ") };
            let member = &self.members[*k];
            let since = rounded(member.since.unwrap_or(self.now));
            format!("worker {k} has waited in step {} since {since} for {whom}", member.step)
        };
        let lines: Vec<_> = self.waiting.iter().map(waits).collect();
        let text = if lines.is_empty() {
            "no workers are left".to_owned()
        } else {
            format!("no worker can continue (virtual time {}): {}", rounded(self.now), lines.join("; "))
        };
        self.message("standstill", None, text);
    }
}

/// A time for people.
fn rounded(time: f64) -> f64 {
    let scaled = time * 1e4;
    if scaled.abs() < 1e15 { scaled.round() / 1e4 } else { time }
}
