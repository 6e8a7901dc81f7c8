//! What becomes of the slices of one push: their answers are gathered, and make receipts or an error.

use crate::error::{Error, Kind, Result};
use crate::frame::Applied;
use crate::sync::{Arc, AtomicU64, Mutex, Ordering, lock};
use crate::verbs::{Gradient, InDoubt, PartialPush, PushError, Pushed, Receipt};
use std::ops::Range;
use std::sync::{Condvar, PoisonError};
use std::time::Duration;

/// Gathers the answers of one call's slices.
#[derive(Debug)]
pub(crate) struct Collect {
    results: Mutex<Vec<Option<Result<Applied>>>>,
    missing: AtomicU64,
    complete: Condvar,
}

impl Collect {
    pub(crate) fn new(n: usize) -> Arc<Self> {
        Arc::new(Self {
            results: Mutex::new(vec![None; n]),
            missing: AtomicU64::new(n as u64),
            complete: Condvar::new(),
        })
    }

    pub(crate) fn put(&self, k: usize, result: Result<Applied>) {
        let mut results = lock(&self.results);
        results[k] = Some(result);
        if self.missing.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.complete.notify_all();
        }
    }

    /// Whether slice `k` was answered with a refusal.
    pub(crate) fn was_refused(&self, k: usize) -> bool {
        matches!(lock(&self.results)[k], Some(Err(_)))
    }

    pub(crate) fn wait(&self, timeout: Duration) -> Vec<Option<Result<Applied>>> {
        let results = lock(&self.results);
        let missing = |_: &mut Vec<_>| self.missing.load(Ordering::Relaxed) > 0;
        let waited = self.complete.wait_timeout_while(results, timeout, missing);
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }
}

/// The answers of a push, sorted by what they say.
#[derive(Debug, Default)]
pub struct Outcomes {
    /// Index of the gradient, elements, answer.
    pub applied: Vec<(usize, Range<usize>, Applied)>,
    /// Name, elements, reason.
    pub refused: Vec<(Arc<str>, Range<usize>, Error)>,
    /// Slices whose answer is missing.
    pub in_doubt: Vec<Arc<dyn InDoubt>>,
}

impl Outcomes {
    /// Receipts if everything was applied, else what failed. `bytes`: sent per gradient; `late`: what to say of a missing
    /// answer.
    pub fn into_pushed(self, gradients: &[Gradient], bytes: &[u64]) -> Pushed {
        let whole = |k: usize| {
            let name = &gradients[k].name;
            !self.refused.iter().any(|(n, ..)| n == name) && !self.in_doubt.iter().any(|d| d.tensor() == name)
        };
        let mut merged: Vec<_> = bytes.iter().map(|bytes| Receipt::of_nothing(*bytes)).collect();
        for (k, _, applied) in &self.applied {
            merged[*k].add(applied);
        }
        let error = match (self.refused.first(), self.in_doubt.first()) {
            (None, None) => return Ok(merged),
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
        let receipts = receipts.map(|(k, receipt)| (gradients[k].name.clone(), receipt)).collect();
        let torn = self.applied.iter().filter(|(k, ..)| !whole(*k));
        let applied =
            torn.map(|(k, range, applied)| (gradients[*k].name.clone(), range.clone(), *applied)).collect();
        let partial =
            PartialPush { error, receipts, refused: self.refused, applied, in_doubt: self.in_doubt };
        Err(PushError::Partial(Box::new(partial)))
    }
}
