//! The step of one user's row and one item's row for one rating.

use super::FactorRule;
use crate::memory::{LINE, Lines, RacyBuffer};

/// Of a row's elements the factor on the stepped value, and the term added afterwards.
pub(super) type Fixed = (Vec<f32>, Vec<f32>);

/// A row to step.
pub(super) struct FactorRow<'a> {
    pub(super) rows: &'a RacyBuffer,
    pub(super) at: usize,
    pub(super) fixed: &'a Fixed,
}

impl FactorRow<'_> {
    #[inline(always)]
    fn line(&self, lines: impl Lines, at: usize) -> [f32; LINE] {
        self.rows.line(lines, self.at + at)
    }

    /// Stores `kept * from + step * other` in this row, where an element is not fixed.
    #[inline(always)]
    fn step(
        &self,
        lines: impl Lines,
        at: usize,
        kept: f32,
        from: &[f32; LINE],
        step: f32,
        other: &[f32; LINE],
    ) {
        let (kept_here, added) = (&self.fixed.0[at..at + LINE], &self.fixed.1[at..at + LINE]);
        let mut line = [0.0; LINE];
        for k in 0..LINE {
            line[k] = (kept * from[k] + step * other[k]) * kept_here[k] + added[k];
        }
        self.rows.set_line(lines, self.at + at, &line);
    }
}

/// The step for one rating; returns the error before the step.
pub(super) struct RatingStep<'a> {
    pub(super) stride: usize,
    pub(super) user: FactorRow<'a>,
    pub(super) item: FactorRow<'a>,
    pub(super) rating: f32,
    pub(super) rule: FactorRule,
}

impl RatingStep<'_> {
    #[inline(always)]
    pub(super) fn run(self, lines: impl Lines) -> f32 {
        let Self { stride, user, item, rating, rule } = self;
        let mut sums = [0.0_f32; LINE];
        for at in (0..stride).step_by(LINE) {
            let (p, q) = (user.line(lines, at), item.line(lines, at));
            for k in 0..LINE {
                sums[k] += p[k] * q[k];
            }
        }
        // Pairwise, because adding 16 values one by one would take longer than the rest of the step.
        for half in [8, 4, 2, 1] {
            for k in 0..half {
                sums[k] += sums[k + half];
            }
        }
        let error = rating - sums[0];
        let step = rule.lr as f32 * error;
        let kept = (1.0 - rule.lr * rule.regularization) as f32;
        for at in (0..stride).step_by(LINE) {
            let (p, q) = (user.line(lines, at), item.line(lines, at));
            user.step(lines, at, kept, &p, step, &q);
            item.step(lines, at, kept, &q, step, &p);
        }
        error
    }
}
