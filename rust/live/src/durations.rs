//! The duration of a worker's step: a function of seed, worker and step.

use crate::random::{Draws, Purpose};
use crate::settings::{Settings, Times};

/// Exponent of the Pareto distribution's tail.
const SHAPE: f64 = 1.5;

/// Virtual seconds of a step, from 1.
pub(crate) fn duration(settings: &Settings, worker: usize, step: u64) -> f64 {
    let mean = mean(settings.times, worker, settings.workers);
    let mut draws = Draws::at(settings.seed, Purpose::Duration, worker as u64, step);
    let seconds = match settings.times.kind {
        0 => mean,
        1 => mean * draws.exponential(),
        _ => mean * (SHAPE - 1.0) / SHAPE * libm::exp(draws.exponential() / SHAPE),
    };
    seconds.max(f64::MIN_POSITIVE)
}

/// The mean of a worker; those that join late are as fast as the first one.
fn mean(times: Times, worker: usize, workers: u32) -> f64 {
    let (k, last) = (worker as f64, f64::from(workers) - 1.0);
    let spread = if last > 0.0 && k <= last { libm::pow(times.spread, k / last) } else { 1.0 };
    let straggler = if k == last { times.straggler } else { 1.0 };
    times.mean * spread * straggler
}
