//! Threads that learn on private copies of the coefficients.
//!
//! A core that writes a coefficient takes its cache line from the others, so threads that share the
//! coefficients of frequent features mostly wait for memory. Here each thread has a copy (as in `HogWild++`,
//! Zhang, Hsieh and Akella 2016). After some examples, it adds what it learned to the shared coefficients,
//! without a lock, and continues from their new values.
//!
//! If each thread moves a coefficient all the way to the value that its examples want, the sum of the moves
//! goes several times as far. `a`, the sum of a thread's steps times the curvature of the loss in that
//! coefficient, tells how far it moves: about a / (1 + a) of the way. `K` threads that took turns would move
//! K a / (1 + K a) of the way. So each thread adds (1 + a) / (1 + K a) of what it learned: all of it if the
//! steps are short or the feature is rare, and the mean over the threads if each went the whole way.

use super::rows::FeatureRow;
use super::{Examples, Loss};
use crate::base::isa::Isa;
use crate::base::sync::{AtomicU64, Ordering};
use crate::memory::{LINE, LineKernel, Lines, RacyBuffer, run_lines};

/// Minimum number of examples that a thread learns from between two meetings. With 256, the log-loss of w8a
/// was 0.3 % higher with two threads than with one; with 64, it is the same, and training takes a tenth
/// longer.
const EVERY: usize = 64;
/// Non-zeros that a thread processes per coefficient that it exchanges, so that meetings take about a tenth
/// of its time.
const WORK: usize = 2;
/// A pass with fewer meetings per thread than this is not worth the copies.
const MEETINGS: usize = 16;
/// Maximum block size, because training can stop only between blocks.
const LARGEST_BLOCK: usize = 4096;
/// The sample from which the curvature is estimated ends at this many non-zeros.
const SAMPLE: usize = 1 << 20;

/// Stands in for infinity in float64 and float32; its multiples by the number of threads stay finite.
const LARGEST: f64 = 1e30;

/// The curvature of the loss in each coefficient, as a mean over examples.
#[derive(Debug)]
pub(super) struct Curvature {
    columns: Vec<f32>,
    intercept: f64,
    /// Mean number of non-zeros per example.
    length: f64,
}

impl Curvature {
    /// Estimates the curvature from a sample of the examples. The squares of a feature ignore that features
    /// occur together, so that a step for one is also a step for the others; its products with the row's sum
    /// are right if all features are learned in the same direction. The formula between the two, closer to
    /// the squares, was found by experiment (docs/how-to/hogwild.md).
    pub(super) fn of<R: FeatureRow>(
        examples: &Examples<'_>,
        columns: usize,
        loss: Loss,
        weight: impl Fn(usize) -> f64,
        row: impl Fn(usize) -> R,
    ) -> Self {
        let (mut squares, mut products) = (vec![0.0_f32; columns], vec![0.0_f32; columns]);
        let (mut seen, mut rows, mut sums, mut weights) = (0, 0_usize, 0.0, 0.0);
        // Samples the whole order, because neighbours may be alike.
        let stride = (examples.order.len() / 4096).max(1);
        for i in examples.order.iter().step_by(stride).map(|i| *i as usize) {
            let (row, weight) = (row(i), weight(i));
            let mut sum = 0.0;
            row.each(|_, x| sum += x);
            row.each(|j, x| {
                squares[j] += weight as f32 * x * x;
                products[j] += weight as f32 * x * sum;
                seen += 1;
            });
            rows += 1;
            sums += weight * f64::from(sum);
            weights += weight;
            if seen >= SAMPLE {
                break;
            }
        }
        let n = rows.max(1) as f64;
        let mean = |square: f64, product: f64| {
            (square * (square * product.abs().max(square)).sqrt()).sqrt() * loss.curvature() / n
        };
        let both = squares.iter().zip(&products);
        Self {
            columns: both.map(|(s, p)| mean(f64::from(*s), f64::from(*p)) as f32).collect(),
            intercept: mean(weights, sums),
            length: seen as f64 / n,
        }
    }

    /// Returns whether a pass may be long enough for copies, whatever its examples are.
    pub(super) fn may_pay(examples: usize, threads: usize) -> bool {
        EVERY.saturating_mul(threads).saturating_mul(MEETINGS) <= examples
    }

    /// The number of examples after which each thread meets the others; `None` if the pass is too short for
    /// copies.
    pub(super) fn every(&self, examples: usize, threads: usize) -> Option<usize> {
        let work = (WORK * self.columns.len()) as f64;
        let every = EVERY.max((work / self.length.max(1.0)) as usize);
        (every.saturating_mul(threads).saturating_mul(MEETINGS) <= examples).then_some(every)
    }
}

/// State that the threads of a pass share.
pub(super) struct Meeting<'a> {
    pub(super) isa: Isa,
    pub(super) weights: &'a RacyBuffer,
    pub(super) intercept: &'a AtomicU64,
    pub(super) intercept_decay: f64,
    pub(super) curvature: &'a Curvature,
    pub(super) threads: usize,
    pub(super) every: usize,
}

/// One thread's copy of the coefficients.
pub(super) struct Own {
    pub(super) weights: RacyBuffer,
    pub(super) intercept: f64,
    /// The shared coefficients as of the last meeting.
    met: Vec<f32>,
    met_intercept: f64,
    /// Examples since the last meeting.
    examples: usize,
    thread: usize,
}

impl Meeting<'_> {
    /// Examples in a block that a thread takes. Blocks are large, because the rows of a block's first
    /// examples are not prefetched.
    pub(super) fn block(&self) -> usize {
        self.every.min(LARGEST_BLOCK)
    }

    /// Makes a copy for one thread.
    pub(super) fn join(&self, thread: usize) -> Own {
        let mut met = vec![0.0; self.weights.len()];
        self.weights.load(self.isa, 0, &mut met);
        let weights = RacyBuffer::filled(met.len(), 0.0);
        weights.store(self.isa, 0, &met);
        let intercept = f64::from_bits(self.intercept.load(Ordering::Relaxed));
        Own { weights, intercept, met, met_intercept: intercept, examples: 0, thread }
    }

    /// Counts examples that were learned from, and meets the other threads when it is time.
    pub(super) fn learned(&self, own: &mut Own, examples: usize, eta: f64) {
        own.examples += examples;
        if own.examples >= self.every {
            self.meet(own, eta);
        }
    }

    /// Adds what was learned to the shared coefficients, and takes over their new values. If two threads do
    /// this with one line at the same moment, what one of them learned there may be lost; so each thread
    /// starts at a different line.
    pub(super) fn meet(&self, own: &mut Own, eta: f64) {
        let steps = eta * std::mem::take(&mut own.examples) as f64;
        run_lines(self.isa, Meet { meeting: self, own, steps: steps as f32 });
        let a = (steps * self.curvature.intercept * self.intercept_decay).min(LARGEST);
        let change = (own.intercept - own.met_intercept) * (1.0 + a) / (1.0 + self.threads as f64 * a);
        let add = |bits| Some((f64::from_bits(bits) + change).to_bits());
        let before = self.intercept.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        own.intercept = before.map_or(own.intercept, f64::from_bits) + change;
        own.met_intercept = own.intercept;
    }
}

/// Makes one thread's coefficients and the shared ones equal.
struct Meet<'a, 'b> {
    meeting: &'a Meeting<'b>,
    own: &'a mut Own,
    steps: f32,
}

impl LineKernel for Meet<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run(self, lines: impl Lines) {
        let Self { meeting, own, steps } = self;
        let (n, threads) = (own.met.len(), meeting.threads as f32);
        let together = |shared: f32, learned: f32, curvature: f32| {
            let a = (steps * curvature).min(LARGEST as f32);
            shared + (1.0 + a) / (1.0 + threads * a) * learned
        };
        let (whole, first) = (n / LINE, n / LINE * own.thread / meeting.threads);
        for at in (first..whole).chain(0..first).map(|line| line * LINE) {
            let (met, curvature) = (&mut own.met[at..at + LINE], &meeting.curvature.columns[at..at + LINE]);
            let (mine, mut shared) = (own.weights.line(lines, at), meeting.weights.line(lines, at));
            for k in 0..LINE {
                shared[k] = together(shared[k], mine[k] - met[k], curvature[k]);
            }
            meeting.weights.set_line(lines, at, &shared);
            own.weights.set_line(lines, at, &shared);
            met.copy_from_slice(&shared);
        }
        for j in whole * LINE..n {
            let learned = own.weights.get(j) - own.met[j];
            own.met[j] = together(meeting.weights.get(j), learned, meeting.curvature.columns[j]);
            meeting.weights.set(j, own.met[j]);
            own.weights.set(j, own.met[j]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Meets threads that each learned `learned` of a coefficient, in which the loss has this curvature.
    fn met(columns: usize, threads: usize, learned: &[f32], curvature: f32, eta: f64) -> (Vec<f32>, f64) {
        let isa = Isa::best();
        let weights = RacyBuffer::filled(columns, 1.0);
        let intercept = AtomicU64::new(2.0_f64.to_bits());
        let curvature =
            Curvature { columns: vec![curvature; columns], intercept: f64::from(curvature), length: 1.0 };
        let meeting = Meeting {
            isa,
            weights: &weights,
            intercept: &intercept,
            intercept_decay: 1.0,
            curvature: &curvature,
            threads,
            every: 100,
        };
        let mut owns: Vec<_> = (0..learned.len()).map(|thread| meeting.join(thread)).collect();
        for (own, learned) in owns.iter_mut().zip(learned) {
            (0..columns).for_each(|j| own.weights.set(j, 1.0 + learned));
            own.intercept += f64::from(*learned);
            meeting.learned(own, 99, eta);
            // It is too early to meet.
            assert_eq!(own.weights.get(0), 1.0 + learned);
        }
        for own in &mut owns {
            meeting.learned(own, 1, eta);
            assert_eq!(own.weights.get(columns - 1), weights.get(columns - 1));
            assert_eq!(own.intercept, f64::from_bits(intercept.load(Ordering::Relaxed)));
        }
        let mut out = vec![0.0; columns];
        weights.load(isa, 0, &mut out);
        (out, f64::from_bits(intercept.load(Ordering::Relaxed)))
    }

    #[test]
    fn short_steps_add_up_and_long_ones_are_averaged() {
        for columns in [1, 15, 16, 17, 100] {
            let both = |value: f32| (vec![value; columns], f64::from(value) + 1.0);
            assert_eq!(met(columns, 2, &[0.5, 0.25], 0.0, 0.1), both(1.75));
            assert_eq!(met(columns, 2, &[0.5, 0.25], 1e30, 0.1), both(1.375));
            // Each has gone half of the way to 2; in turns they would go two thirds.
            let (weights, intercept) = met(columns, 2, &[0.5, 0.5], 0.1, 0.1);
            assert!(weights.iter().all(|w| (w - 5.0 / 3.0).abs() < 1e-6), "{weights:?}");
            assert!((intercept - 8.0 / 3.0).abs() < 1e-6, "{intercept}");
            // If four threads each go the whole way, the result goes it once, however far it is.
            assert_eq!(met(columns, 4, &[1.0; 4], 1e30, 0.1), both(2.0));
            assert_eq!(met(columns, 4, &[1.0; 4], f32::INFINITY, 1e30), both(2.0));
        }
    }

    #[test]
    fn passes_too_short_for_copies_have_none() {
        let curvature = Curvature { columns: vec![0.0; 10_000], intercept: 0.0, length: 10.0 };
        // Exchanging 10,000 coefficients pays after 2 x 10,000 / 10 = 2,000 examples, sixteen times per
        // thread.
        assert_eq!(curvature.every(64_000, 2), Some(2000));
        assert_eq!(curvature.every(63_999, 2), None);
        let short = Curvature { columns: vec![0.0; 10], ..curvature };
        assert_eq!(short.every(2048, 2), Some(64));
        assert_eq!(short.every(2047, 2), None);
        assert_eq!(short.every(1 << 40, usize::MAX), None);
    }
}
