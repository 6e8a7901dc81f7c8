//! The quantities that depend only on the count of examples: the step, and the sums of the deferred
//! penalties.
//!
//! L2 shrinks every coefficient with every example. So that an example costs only its non-zeros, the
//! coefficients are kept as `scale * weights`, and the scale shrinks instead (Shalev-Shwartz, Singer, Srebro
//! 2007). The scale depends only on the count, so threads that work on different examples know it without
//! communication. The same holds for the cumulative L1 penalty that each coefficient should have received
//! (Tsuruoka, Tsujii, Ananiadou 2009), and for the sum of scales that averaging needs.

use crate::base::error::{Error, Kind, Result};
use crate::hogwild::linear::loss::Loss;

/// How the step changes with the count t, which starts at 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Schedule {
    /// `eta0`. A caller that lowers it between passes gets scikit-learn's `adaptive`.
    Constant,
    /// 1 / (alpha (t0 + t - 1)), with t0 by Bottou's heuristic.
    Optimal,
    /// `eta0` / t^`power_t`.
    InvScaling,
}

impl Schedule {
    /// Parses scikit-learn's name.
    pub fn parse(name: &str) -> Result<Self> {
        Ok(match name {
            "constant" | "adaptive" => Self::Constant,
            "optimal" => Self::Optimal,
            "invscaling" => Self::InvScaling,
            _ => {
                let names = "constant, optimal, invscaling or adaptive";
                return Err(Error::new(Kind::Config, "no such learning rate").expected(names, name));
            }
        })
    }
}

/// How training changes the coefficients; the names are scikit-learn's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The loss of a prediction.
    pub loss: Loss,
    /// Strength of the penalty alpha ((1 - `l1_ratio`) |w|^2 / 2 + `l1_ratio` |w|_1).
    pub alpha: f64,
    /// Share of L1; 0 means only L2.
    pub l1_ratio: f64,
    /// Set if there is a penalty. `Optimal` uses `alpha` even without one.
    pub penalty: bool,
    /// How the step changes.
    pub schedule: Schedule,
    /// First step of `Constant` and `InvScaling`.
    pub eta0: f64,
    /// Exponent of `InvScaling`.
    pub power_t: f64,
    /// Set if the intercept is learned.
    pub fit_intercept: bool,
    /// Factor on the intercept's steps: below 1 for sparse data, where the intercept is in every example.
    pub intercept_decay: f64,
    /// The count at which averaging starts; 0 disables it.
    pub average: u64,
    /// Weight of examples with a positive target.
    pub weight_pos: f64,
    /// Weight of all other examples.
    pub weight_neg: f64,
}

impl Settings {
    /// Fails for settings that training cannot work with.
    pub fn validate(&self) -> Result<()> {
        let number = |name: &str, value: f64, good: bool, expected: &str| {
            let error = || Error::new(Kind::Config, format!("invalid {name}")).expected(expected, value);
            if good && value.is_finite() { Ok(()) } else { Err(error()) }
        };
        number("alpha", self.alpha, self.alpha >= 0.0, "a number >= 0")?;
        number("l1_ratio", self.l1_ratio, (0.0..=1.0).contains(&self.l1_ratio), "0 to 1")?;
        number("eta0", self.eta0, self.eta0 >= 0.0, "a number >= 0")?;
        number("power_t", self.power_t, true, "a number")?;
        if self.schedule == Schedule::Optimal {
            number(
                "alpha",
                self.alpha,
                self.alpha > 0.0,
                "more than 0, because the learning rate is optimal",
            )?;
        }
        if let Loss::Huber(c) = self.loss {
            number("epsilon", c, c >= 0.0, "a number >= 0")?;
        }
        Ok(())
    }

    /// The fraction of the scale that is lost per unit of step.
    fn l2(&self) -> f64 {
        if self.penalty { self.alpha * (1.0 - self.l1_ratio) } else { 0.0 }
    }

    /// Loss of each coefficient per unit of step.
    pub(super) fn l1(&self) -> f64 {
        if self.penalty { self.alpha * self.l1_ratio } else { 0.0 }
    }

    /// The count up to which long steps of concurrent threads would disturb each other: with `Optimal`, until
    /// the steps are a tenth of the first. One thread takes these steps (the warm start of Dean et al. 2012).
    pub(super) fn warm_up(&self) -> u64 {
        if self.schedule == Schedule::Optimal { (9.0 * self.first()) as u64 } else { 0 }
    }

    /// t0 of `Optimal`: its first step is the one that a coefficient of typical size would take.
    fn first(&self) -> f64 {
        let typical = self.alpha.sqrt().recip().sqrt();
        typical.recip() * self.loss.slope(1.0, -typical).max(1.0) / self.alpha
    }
}

/// The state of a thread that is a function of the count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock<'a> {
    settings: &'a Settings,
    first: f64,
    /// The next example's count.
    pub(super) t: u64,
    /// The step of the current example.
    pub(super) eta: f64,
    /// The coefficients are `scale * weights`.
    pub(super) scale: f64,
    /// The cumulative L1 penalty that each coefficient should have received.
    pub(super) truncation: f64,
    /// Sum of the scales that belong to the average, since the last fold.
    pub(super) sum: f64,
}

impl<'a> Clock<'a> {
    pub(super) fn new(settings: &'a Settings, t: u64, truncation: f64) -> Self {
        let first = if settings.schedule == Schedule::Optimal { settings.first() } else { 0.0 };
        let mut clock = Self { settings, first, t, eta: settings.eta0, scale: 1.0, truncation, sum: 0.0 };
        clock.eta = clock.step(t);
        clock
    }

    fn step(&self, t: u64) -> f64 {
        match self.settings.schedule {
            Schedule::Constant => self.settings.eta0,
            Schedule::Optimal => 1.0 / (self.settings.alpha * (self.first + t as f64 - 1.0)),
            Schedule::InvScaling => self.settings.eta0 / (t as f64).powf(self.settings.power_t),
        }
    }

    /// The factor of the current example on the scale.
    pub(super) fn kept(&self) -> f64 {
        (1.0 - self.settings.l2() * self.eta).max(0.0)
    }

    /// Applies the penalties of the current example.
    #[inline(always)]
    pub(super) fn shrink(&mut self) {
        self.scale *= self.kept();
        self.truncation += self.settings.l1() * self.eta;
    }

    /// Ends the current example, which is in the coefficients, and moves on to the next one.
    #[inline(always)]
    pub(super) fn tick(&mut self) {
        if self.averages() {
            self.sum += self.scale;
        }
        self.t += 1;
        self.eta = self.step(self.t);
    }

    /// Returns whether the coefficients after the current example belong to the average.
    pub(super) fn averages(&self) -> bool {
        self.settings.average > 0 && self.t >= self.settings.average
    }

    /// Advances to count `t` over examples that other threads process.
    pub(super) fn skip(&mut self, t: u64) {
        let n = t.saturating_sub(self.t);
        let plain = self.settings.average == 0 && self.settings.l1() == 0.0;
        let before = self.first + self.t as f64 - 2.0;
        let factor = match self.settings.schedule {
            _ if !plain => None,
            _ if self.settings.l2() == 0.0 => Some(1.0),
            Schedule::Constant => Some(self.kept().powf(n as f64)),
            // The product of (first + t - 2) / (first + t - 1).
            Schedule::Optimal if before > 0.0 => Some(before / (before + n as f64)),
            _ => None,
        };
        if let Some(factor) = factor {
            self.scale *= factor;
            self.t += n;
            self.eta = self.step(self.t);
        } else {
            for _ in 0..n {
                self.shrink();
                self.tick();
            }
        }
    }

    /// Resets scale and sum, which were folded into the coefficients.
    pub(super) fn folded(&mut self) {
        (self.scale, self.sum) = (1.0, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_is_as_many_ticks() {
        for schedule in [Schedule::Constant, Schedule::Optimal, Schedule::InvScaling] {
            for (penalty, l1_ratio, average) in
                [(true, 0.0, 0), (true, 0.3, 0), (true, 0.0, 5), (false, 0.0, 0)]
            {
                let settings = Settings {
                    loss: Loss::Logistic,
                    alpha: 1e-3,
                    l1_ratio,
                    penalty,
                    schedule,
                    eta0: 0.5,
                    power_t: 0.25,
                    fit_intercept: true,
                    intercept_decay: 1.0,
                    average,
                    weight_pos: 1.0,
                    weight_neg: 1.0,
                };
                settings.validate().unwrap();
                let (mut one, mut other) = (Clock::new(&settings, 1, 0.0), Clock::new(&settings, 1, 0.0));
                for (t, n) in [(1, 100), (101, 1), (102, 0), (102, 1000)] {
                    one.skip(t + n);
                    (0..n).for_each(|_| {
                        other.shrink();
                        other.tick();
                    });
                    assert_eq!(one.t, other.t);
                    for (a, b) in [
                        (one.eta, other.eta),
                        (one.scale, other.scale),
                        (one.truncation, other.truncation),
                        (one.sum, other.sum),
                    ] {
                        assert!((a - b).abs() <= 1e-9 * b.abs(), "{schedule:?} {penalty} {l1_ratio} {a} {b}");
                    }
                }
            }
        }
    }
}
