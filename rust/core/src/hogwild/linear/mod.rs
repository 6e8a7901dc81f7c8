//! Linear models that threads train by stochastic gradient descent without any lock (Niu et al. 2011): each
//! thread on its own copy of the coefficients (see `copies`), or all on the same ones. With one thread, the
//! steps are those of scikit-learn's `SGDClassifier` and `SGDRegressor`.
//!
//! An example costs only its non-zeros, because the effect of a penalty on all coefficients is deferred (see
//! `clock`). While threads work, coefficient j is `scale * weights[j]`; after they have met, the scale is
//! folded in.

mod clock;
mod copies;
mod loss;
mod rows;
mod sweep;

pub use crate::hogwild::work_queue::{Stop, shuffle};
pub use clock::{Schedule, Settings};
pub use loss::Loss;
pub use rows::{Csr, FeatureRows, Number};

use crate::base::error::Result;
use crate::base::isa::{Isa, prefetch};
use crate::base::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::hogwild::work_queue::{Deal, together};
use crate::memory::RacyBuffer;
use clock::Clock;
use copies::{Curvature, Meeting};
use rows::{Dense, FeatureRow, Sparse};

/// Examples in a block that a thread takes.
const BLOCK: usize = 128;
/// How many examples ahead rows are prefetched: no CPU predicts a shuffled order.
const AHEAD: usize = 4;
/// The scale is folded in before it gets smaller than this.
const SMALLEST: f64 = 1e-9;
/// The limit with averaging: its sums are differences, which lose as many digits as the scale does.
const SMALLEST_AVERAGED: f64 = 0.1;
/// If an example shrinks the coefficients by a smaller factor, one thread does all the work.
const STEEP: f64 = 0.95;

/// The examples of one pass.
#[derive(Clone, Copy)]
pub struct Examples<'a> {
    /// The matrix; checked before the first pass.
    pub rows: FeatureRows<'a>,
    /// One target per row: -1 or 1 for classes.
    pub targets: &'a [f32],
    /// One weight per row, if they differ.
    pub weights: Option<&'a [f32]>,
    /// The rows to learn from, in order.
    pub order: &'a [u32],
}

impl Examples<'_> {
    /// The weight of example `i`, including that of its class.
    #[inline(always)]
    fn weight(&self, settings: &Settings, i: usize) -> f64 {
        let class = if self.targets[i] > 0.0 { settings.weight_pos } else { settings.weight_neg };
        class * self.weights.map_or(1.0, |weights| f64::from(weights[i]))
    }

    /// Prefetches everything about example `i` except its row.
    #[inline(always)]
    fn fetch(&self, i: usize) {
        self.rows.fetch_start(i);
        prefetch(&self.targets[i..=i]);
        if let Some(weights) = self.weights {
            prefetch(&weights[i..=i]);
        }
    }
}

/// The result of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassResult {
    /// Sum of the losses, each before its step; 0 unless requested.
    pub loss: f64,
    /// The number of examples that were learned from: all of the order, unless the pass was stopped.
    pub examples: usize,
}

/// A linear model in training.
pub struct Linear {
    settings: Settings,
    isa: Isa,
    weights: RacyBuffer,
    /// The negated L1 penalty that each coefficient has received; empty without L1 (scikit-learn's q).
    truncated: RacyBuffer,
    /// For the average: the sum over changes of the change times the sum of scales before it.
    missed: RacyBuffer,
    intercept: AtomicU64,
    average: Mutex<Average>,
    t: u64,
    /// The cumulative L1 penalty that each coefficient should have received.
    truncation: f64,
    /// Measured on the first examples that several threads learned from.
    curvature: Option<Curvature>,
}

/// Sums of coefficients and intercepts over the examples since the average began.
#[derive(Clone, Debug, Default)]
struct Average {
    weights: Vec<f64>,
    intercept: f64,
}

impl Linear {
    /// A model that starts with these coefficients; `t` is the count of its next example, 1 for a new model.
    pub fn new(settings: Settings, coefficients: &[f32], intercept: f64, t: u64) -> Result<Self> {
        settings.validate()?;
        let (isa, n) = (Isa::get()?, coefficients.len());
        let weights = RacyBuffer::filled(n, 0.0);
        weights.store(isa, 0, coefficients);
        let truncated = RacyBuffer::filled(if settings.l1() > 0.0 { n } else { 0 }, 0.0);
        let averaged = if settings.average > 0 { n } else { 0 };
        let average = Mutex::new(Average { weights: vec![0.0; averaged], intercept: 0.0 });
        let missed = RacyBuffer::filled(averaged, 0.0);
        let intercept = AtomicU64::new(intercept.to_bits());
        Ok(Self {
            settings,
            isa,
            weights,
            truncated,
            missed,
            intercept,
            average,
            t: t.max(1),
            truncation: 0.0,
            curvature: None,
        })
    }

    /// Continues an average that another training started.
    pub fn with_average(self, coefficients: &[f32], intercept: f64) -> Self {
        let n = self.averaged() as f64;
        let mut average = lock(&self.average);
        average.weights = coefficients.iter().map(|w| n * f64::from(*w)).collect();
        average.intercept = n * intercept;
        drop(average);
        self
    }

    /// Replaces the coefficients, between two passes, by as many others.
    pub fn assign(&mut self, coefficients: &[f32], intercept: f64) {
        let n = self.weights.len().min(coefficients.len());
        self.weights.store(self.isa, 0, &coefficients[..n]);
        self.intercept.store(intercept.to_bits(), Ordering::Relaxed);
    }

    /// Changes the step of the schedule `Constant`.
    pub fn set_eta(&mut self, eta: f64) {
        self.settings.eta0 = eta;
    }

    /// The coefficients.
    pub fn coefficients(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.weights.len()];
        self.weights.load(self.isa, 0, &mut out);
        out
    }

    /// The sum of the coefficients' squares and the sum of their magnitudes; not finite if a coefficient is
    /// not.
    pub fn norms(&self) -> (f64, f64) {
        sweep::norms(self.isa, &self.weights)
    }

    /// The intercept.
    pub fn intercept(&self) -> f64 {
        f64::from_bits(self.intercept.load(Ordering::Relaxed))
    }

    /// The count of the next example: one more than the number of examples that were learned from.
    pub fn t(&self) -> u64 {
        self.t
    }

    /// Mean coefficients and intercept since averaging started; `None` before that.
    pub fn average(&self) -> Option<(Vec<f32>, f64)> {
        let n = self.averaged() as f64;
        let average = lock(&self.average);
        (n > 0.0).then(|| (average.weights.iter().map(|w| (w / n) as f32).collect(), average.intercept / n))
    }

    /// The number of examples in the average.
    fn averaged(&self) -> u64 {
        if self.settings.average == 0 { 0 } else { self.t.saturating_sub(self.settings.average) }
    }

    /// One pass over the examples. If it is stopped, what was learned until then is kept.
    pub fn pass(
        &mut self,
        examples: Examples<'_>,
        threads: usize,
        want_loss: bool,
        stop: Stop<'_>,
    ) -> Result<PassResult> {
        let mut pass = PassResult { loss: 0.0, examples: 0 };
        while pass.examples < examples.order.len() && !stop() {
            let rest = Examples { order: &examples.order[pass.examples..], ..examples };
            let run = self.run(rest, threads, want_loss, stop)?;
            pass.loss += run.loss;
            pass.examples += run.examples;
        }
        Ok(pass)
    }

    /// Runs until the examples end, or until the scale is so small that all threads must meet to fold it in.
    fn run(
        &mut self,
        examples: Examples<'_>,
        threads: usize,
        want_loss: bool,
        stop: Stop<'_>,
    ) -> Result<PassResult> {
        let clock = Clock::new(&self.settings, self.t, self.truncation);
        // One thread computes an average: in a sum over all time, the updates that races lose are no longer
        // negligible.
        let one = threads <= 1 || self.settings.average > 0 || clock.kept() < STEEP;
        let may_pay = !one && self.settings.l1() == 0.0 && Curvature::may_pay(examples.order.len(), threads);
        if may_pay && self.curvature.is_none() {
            self.curvature = Some(self.measure(&examples));
        }
        let meeting = if one { None } else { self.meeting(examples.order.len(), threads) };
        // With long steps, threads that change the same coefficients disturb each other.
        let warm_up = match meeting {
            Some(_) => 0,
            None => self.settings.warm_up().saturating_sub(self.t) as usize,
        };
        let alone = one || warm_up > 0;
        let order = match warm_up {
            1.. if threads > 1 => &examples.order[..warm_up.min(examples.order.len())],
            _ => examples.order,
        };
        let examples = Examples { order, ..examples };
        let block = meeting.as_ref().map_or(BLOCK, Meeting::block);
        let deal = Deal::new(examples.order.len(), block, stop);
        let smallest = if self.settings.average > 0 { SMALLEST_AVERAGED } else { SMALLEST };
        let worker = LinearWorker { model: self, examples, deal: &deal, alone, meeting, smallest, want_loss };
        let results = together(if alone { 1 } else { threads }, |thread| match examples.rows {
            FeatureRows::Dense(values) => {
                worker.work(thread, clock, |i| Dense::row(values, self.weights.len(), i))
            }
            FeatureRows::Csr32(csr) => worker.work(thread, clock, |i| Sparse::row(csr, i)),
            FeatureRows::Csr64(csr) => worker.work(thread, clock, |i| Sparse::row(csr, i)),
        })?;
        let (done, loss) = (deal.done(), results.iter().map(|(loss, _)| loss).sum());
        let latest = results.iter().map(|(_, clock)| *clock).max_by_key(|clock| clock.t);
        let mut clock = latest.unwrap_or(clock);
        let end = self.t + done as u64;
        if clock.t > end {
            clock = Clock::new(&self.settings, self.t, self.truncation);
        }
        clock.skip(end);
        self.fold(&clock);
        (self.t, self.truncation) = (end, clock.truncation);
        Ok(PassResult { loss, examples: done })
    }

    fn measure(&self, examples: &Examples<'_>) -> Curvature {
        let (columns, loss) = (self.weights.len(), self.settings.loss);
        let weight = |i| examples.weight(&self.settings, i);
        match examples.rows {
            FeatureRows::Dense(values) => {
                Curvature::of(examples, columns, loss, weight, |i| Dense::row(values, columns, i))
            }
            FeatureRows::Csr32(csr) => {
                Curvature::of(examples, columns, loss, weight, |i| Sparse::row(csr, i))
            }
            FeatureRows::Csr64(csr) => {
                Curvature::of(examples, columns, loss, weight, |i| Sparse::row(csr, i))
            }
        }
    }

    /// The meeting of threads that learn on copies. `None` with an L1 penalty, because truncations of two
    /// copies cannot be added up, and in passes too short for copies; the threads then change the shared
    /// coefficients directly.
    fn meeting(&self, examples: usize, threads: usize) -> Option<Meeting<'_>> {
        let curvature = self.curvature.as_ref()?;
        let every = curvature.every(examples, threads)?;
        Some(Meeting {
            isa: self.isa,
            weights: &self.weights,
            intercept: &self.intercept,
            intercept_decay: self.settings.intercept_decay,
            curvature,
            threads,
            every,
        })
    }

    /// Turns the weights into the coefficients; the caller restarts the sums of the clock. No other thread
    /// may work at the same time.
    fn fold(&self, clock: &Clock<'_>) {
        let mut average = lock(&self.average);
        for (j, sum) in average.weights.iter_mut().enumerate() {
            *sum += clock.sum * f64::from(self.weights.get(j)) - f64::from(self.missed.get(j));
            self.missed.set(j, 0.0);
        }
        if clock.scale != 1.0 {
            sweep::scale(self.isa, &self.weights, clock.scale);
        }
    }
}

impl std::fmt::Debug for Linear {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Linear").field("settings", &self.settings).field("t", &self.t).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Examples<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Examples").field("order", &self.order.len()).finish_non_exhaustive()
    }
}

/// The work of one thread.
struct LinearWorker<'a> {
    model: &'a Linear,
    examples: Examples<'a>,
    deal: &'a Deal<'a>,
    alone: bool,
    /// `None` if the threads change the shared coefficients directly.
    meeting: Option<Meeting<'a>>,
    smallest: f64,
    want_loss: bool,
}

impl<'a> LinearWorker<'a> {
    /// Processes blocks; returns the sum of losses and the thread's clock.
    fn work<R: FeatureRow>(
        &self,
        thread: usize,
        mut clock: Clock<'a>,
        row: impl Fn(usize) -> R,
    ) -> (f64, Clock<'a>) {
        let (begin, mut loss) = (clock.t, 0.0);
        let mut own = self.meeting.as_ref().map(|meeting| (meeting, meeting.join(thread)));
        while let Some(block) = self.deal.take() {
            clock.skip(begin + block.start as u64);
            if clock.scale < self.smallest {
                self.deal.give_back(block.start);
                break;
            }
            // The intercept is in every example, so each thread keeps a private one for the length of a
            // block.
            let (weights, before) = match &own {
                Some((_, own)) => (&own.weights, own.intercept),
                None => (&self.model.weights, self.model.intercept()),
            };
            let (mut intercept, mut sum, examples) = (before, 0.0, block.len());
            for place in block {
                if let Some(later) = self.examples.order.get(place + 2 * AHEAD) {
                    self.examples.fetch(*later as usize);
                }
                loss += self.example(&mut clock, weights, &row, place, &mut intercept);
                if clock.averages() {
                    sum += intercept;
                }
                clock.tick();
            }
            match &mut own {
                Some((meeting, own)) => {
                    own.intercept = intercept;
                    meeting.learned(own, examples, clock.eta);
                }
                None => self.give(intercept - before, sum),
            }
        }
        if let Some((meeting, mut own)) = own {
            meeting.meet(&mut own, clock.eta);
        }
        (loss, clock)
    }

    /// Takes one step, and returns the loss before it if that is requested.
    #[inline(always)]
    fn example<R: FeatureRow>(
        &self,
        clock: &mut Clock<'_>,
        weights: &RacyBuffer,
        row: &impl Fn(usize) -> R,
        place: usize,
        intercept: &mut f64,
    ) -> f64 {
        let (model, settings) = (self.model, &self.model.settings);
        let i = self.examples.order[place] as usize;
        let next = self.examples.order.get(place + AHEAD).map(|next| row(*next as usize));
        let (row, y) = (row(i), f64::from(self.examples.targets[i]));
        let p = clock.scale * row.dot(model.isa, weights) + *intercept;
        let loss = if self.want_loss { settings.loss.value(y, p) } else { 0.0 };
        let update = -clock.eta * settings.loss.slope(y, p) * self.examples.weight(settings, i);
        clock.shrink();
        if self.alone && clock.scale < self.smallest {
            model.fold(clock);
            clock.folded();
        }
        if update != 0.0 {
            let step = update / clock.scale;
            row.add_and_fetch(model.isa, weights, step as f32, next.as_ref());
            if clock.sum != 0.0 {
                row.add(model.isa, &model.missed, (step * clock.sum) as f32);
            }
            if settings.fit_intercept {
                *intercept += update * settings.intercept_decay;
            }
        } else if let Some(next) = next {
            next.fetch();
        }
        if settings.l1() > 0.0 {
            row.each(|j, _| model.truncate(clock, j));
        }
        loss
    }

    /// Adds the changes of a block to the intercept, with no loss in races.
    fn give(&self, change: f64, sum: f64) {
        let shared = &self.model.intercept;
        if self.alone {
            let changed = self.model.intercept() + change;
            shared.store(changed.to_bits(), Ordering::Relaxed);
        } else if change != 0.0 {
            let add = |bits| Some((f64::from_bits(bits) + change).to_bits());
            let _ = shared.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        }
        if self.model.settings.average > 0 {
            lock(&self.model.average).intercept += sum;
        }
    }
}

impl Linear {
    /// Gives coefficient `j` the L1 penalty that it should have received by now, but never moves it past
    /// zero.
    #[inline(always)]
    fn truncate(&self, clock: &Clock<'_>, j: usize) {
        let (before, had) = (f64::from(self.weights.get(j)), f64::from(self.truncated.get(j)));
        // Never negative: a thread that is ahead may have given more than is due here.
        let due = (clock.truncation + had * before.signum()).max(0.0) / clock.scale;
        let after = if before > 0.0 {
            (before - due).max(0.0)
        } else if before < 0.0 {
            (before + due).min(0.0)
        } else {
            return;
        };
        let after = after as f32;
        let change = f64::from(after) - before;
        self.weights.set(j, after);
        self.truncated.set(j, (had + clock.scale * change) as f32);
        if clock.sum != 0.0 {
            self.missed.set(j, (f64::from(self.missed.get(j)) + change * clock.sum) as f32);
        }
    }
}
