//! Momentum of a path: least squares of each step on the one before it and on the slope (Mitliagkas, Zhang,
//! Hadjis, Re 2016).

use crate::problems::{Problem, Toy};
use crate::run::Run;
use crate::settings::Settings;
use fastps_core::error::{Error, Kind, Result};

/// Least number of steps for a fit.
const LEAST_STEPS: u64 = 6;
/// Updates of a repeated run, per worker, and at least.
const UPDATES_PER_WORKER: u64 = 4;
const LEAST_UPDATES: u64 = 8;
/// Most repeated runs.
const MOST_RUNS: u64 = 1 << 20;

/// The sums of the normal equations, over both coordinates.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fit {
    last: Option<([f64; 2], [f64; 2])>,
    steps: u64,
    dd: f64,
    dg: f64,
    gg: f64,
    nd: f64,
    ng: f64,
}

impl Fit {
    /// Adds the next point of the path.
    pub(crate) fn point(&mut self, toy: &Toy, point: [f64; 2], before: Option<[f64; 2]>) {
        let Some(before) = before else { return };
        let step = [point[0] - before[0], point[1] - before[1]];
        let slope = (toy.at)(before[0], before[1]).1;
        // The first step has no step before.
        if let Some((_, past)) = self.last {
            for k in 0..2 {
                self.dd += past[k] * past[k];
                self.dg -= past[k] * slope[k];
                self.gg += slope[k] * slope[k];
                self.nd += past[k] * step[k];
                self.ng -= slope[k] * step[k];
            }
            self.steps += 1;
        }
        self.last = Some((point, step));
    }

    /// Momentum and rate; NaN if there are too few steps, or they do not determine both.
    pub(crate) fn solve(&self) -> [f64; 2] {
        let det = self.dd * self.gg - self.dg * self.dg;
        if self.steps < LEAST_STEPS || det.is_nan() || det <= 0.0 {
            return [f64::NAN; 2];
        }
        [(self.nd * self.gg - self.ng * self.dg) / det, (self.ng * self.dd - self.nd * self.dg) / det]
    }
}

/// Runs that differ in their seeds, and the mean of their paths.
#[derive(Debug)]
pub(crate) struct Repeated {
    settings: Settings,
    toy: &'static Toy,
    runs: u64,
    sums: Vec<[f64; 2]>,
}

impl Repeated {
    pub(crate) fn new(settings: Settings) -> Result<Self> {
        let Problem::Toy(toy) = settings.problem else {
            return Err(Error::new(Kind::Config, "the momentum is fitted to paths in a plane")
                .expected("a function of two variables", "the digits"));
        };
        let updates = UPDATES_PER_WORKER * u64::from(settings.workers);
        let sums = vec![[0.0; 2]; updates.max(LEAST_UPDATES) as usize + 1];
        Ok(Self { settings, toy, runs: 0, sums })
    }

    /// Repeats more runs; returns their number so far.
    pub(crate) fn run(&mut self, runs: u32) -> Result<u64> {
        if self.runs + u64::from(runs) > MOST_RUNS {
            return Err(
                Error::new(Kind::Config, "too many runs").expected(MOST_RUNS, self.runs + u64::from(runs))
            );
        }
        for _ in 0..runs {
            let mut settings = self.settings.clone();
            settings.seed = settings.seed.wrapping_add(self.runs);
            let mut run = Run::new(settings)?;
            for (updates, sum) in self.sums.iter_mut().enumerate() {
                run.advance(f64::INFINITY, updates as f64, u32::MAX);
                let point = run.point();
                *sum = [sum[0] + point[0], sum[1] + point[1]];
            }
            self.runs += 1;
        }
        Ok(self.runs)
    }

    /// Writes runs, momentum, rate, 1 - 1/M, and the mean path of x; returns its length.
    pub(crate) fn read(&self, output: &mut Vec<f64>) -> u32 {
        let n = self.runs as f64;
        let (mut fit, mut before) = (Fit::default(), None);
        for sum in &self.sums {
            let mean = [sum[0] / n, sum[1] / n];
            fit.point(self.toy, mean, before);
            before = Some(mean);
        }
        let [momentum, rate] = fit.solve();
        output.extend([n, momentum, rate, 1.0 - 1.0 / f64::from(self.settings.workers)]);
        output.extend(self.sums.iter().map(|sum| sum[0] / n));
        self.sums.len() as u32
    }
}
