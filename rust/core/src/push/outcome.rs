//! The outcome of a push: collects the answers of its slices and turns them into receipts or an error. A
//! receipt is made only if every slice of its tensor applied the push.

use crate::base::error::{Error, Kind, Result};
use crate::base::sync::{Arc, Mutex, lock};
use crate::slice::frame::Applied;
use crate::slice::identity::Completion;
use crate::verbs::{InDoubt, PartialPush, PushError, Pushed, Receipt};
use std::ops::Range;
use std::sync::Condvar;
use std::time::Duration;

/// Collects the answers of slices whose push a policy holds.
#[derive(Debug, Default)]
pub(crate) struct Collect {
    late: Mutex<Late>,
    complete: Condvar,
}

#[derive(Debug, Default)]
struct Late {
    missing: usize,
    results: Vec<(usize, Result<Applied>)>,
}

impl Collect {
    /// The completion for the answer of slice `k`.
    pub(crate) fn expect(self: &Arc<Self>, k: usize) -> Completion {
        lock(&self.late).missing += 1;
        let collect = self.clone();
        Box::new(move |result| {
            let mut late = lock(&collect.late);
            late.missing -= 1;
            late.results.push((k, result));
            if late.missing == 0 {
                collect.complete.notify_all();
            }
        })
    }

    /// Waits until all answers have come or the timeout ends, and returns those that came.
    pub(crate) fn wait(&self, timeout: Duration) -> Vec<(usize, Result<Applied>)> {
        let waited = self.complete.wait_timeout_while(lock(&self.late), timeout, |late| late.missing > 0);
        // Lock again, because ThreadSanitizer does not see the lock that the wait returns.
        drop(waited);
        std::mem::take(&mut lock(&self.late).results)
    }
}

/// The answers of a push, sorted by outcome.
#[derive(Debug, Default)]
pub struct Outcomes {
    /// Slices that applied the push: index of the gradient, elements, answer.
    pub applied: Vec<(usize, Range<usize>, Applied)>,
    /// Slices that refused it: name of the tensor, elements, reason.
    pub refused: Vec<(Arc<str>, Range<usize>, Error)>,
    /// Slices whose answer is missing.
    pub in_doubt: Vec<Arc<dyn InDoubt>>,
}

impl Outcomes {
    /// Returns receipts if everything was applied, else what failed. `names` gives the name of each gradient,
    /// `bytes` the bytes sent for it.
    pub fn into_pushed(self, names: &dyn Fn(usize) -> Arc<str>, bytes: &[u64]) -> Pushed {
        let whole = |k: usize| {
            let name = &names(k);
            !self.refused.iter().any(|(n, ..)| n == name) && !self.in_doubt.iter().any(|d| d.tensor() == name)
        };
        let mut merged: Vec<_> = bytes.iter().map(|bytes| Receipt::of_nothing(*bytes)).collect();
        for (k, _, applied) in &self.applied {
            merged[*k].add(applied);
        }
        let error = match (self.refused.first(), self.in_doubt.first()) {
            (None, None) => return Ok(merged.into_iter().map(Receipt::done).collect()),
            (Some((.., error)), _) => error.clone(),
            (None, Some(doubt)) => {
                Error::new(Kind::Deadline, "the push was still held at the call's deadline")
                    .tensor(doubt.tensor().clone())
            }
        };
        if self.applied.is_empty() && self.in_doubt.is_empty() {
            return Err(PushError::Refused(error));
        }
        let receipts = merged.into_iter().enumerate().filter(|(k, _)| whole(*k));
        let receipts = receipts.map(|(k, receipt)| (names(k), receipt.done())).collect();
        let torn = self.applied.iter().filter(|(k, ..)| !whole(*k));
        let applied = torn.map(|(k, range, applied)| (names(*k), range.clone(), *applied)).collect();
        let partial =
            PartialPush { error, receipts, refused: self.refused, applied, in_doubt: self.in_doubt };
        Err(PushError::Partial(Box::new(partial)))
    }
}
