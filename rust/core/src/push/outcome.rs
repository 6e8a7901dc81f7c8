//! The outcome of a push: collects the answers of its slices and turns them into receipts or an error. A
//! receipt is made only if every slice of its tensor applied the push.

use crate::base::error::{Error, Kind, Result};
use crate::base::sync::{Arc, Mutex, lock};
use crate::slice::frame::Applied;
use crate::slice::identity::Completion;
use crate::verbs::{InDoubt, PartialPush, PushError, Pushed, Receipt};
use std::fmt;
use std::ops::Range;
use std::sync::Condvar;
use std::time::Duration;

/// Collects the answers of slices whose push a policy holds.
#[derive(Debug, Default)]
pub(crate) struct Collect {
    late: Mutex<Late>,
    complete: Condvar,
}

#[derive(Default)]
struct Late {
    missing: usize,
    results: Vec<(usize, Result<Applied>)>,
    then: Option<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Late").field("missing", &self.missing).finish_non_exhaustive()
    }
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
                let then = late.then.take();
                drop(late);
                if let Some(then) = then {
                    then();
                }
            }
        })
    }

    /// Calls `then` once when all answers have arrived, at once if they have. All are expected by now.
    pub(crate) fn when_complete(&self, then: Box<dyn FnOnce() + Send>) {
        let mut late = lock(&self.late);
        if late.missing > 0 {
            late.then = Some(then);
            return;
        }
        drop(late);
        then();
    }

    /// Waits until all answers have arrived or the timeout ends, and returns those that did.
    pub(crate) fn wait(&self, timeout: Duration) -> Vec<(usize, Result<Applied>)> {
        let waited = self.complete.wait_timeout_while(lock(&self.late), timeout, |late| late.missing > 0);
        // Lock again, because ThreadSanitizer does not see the lock that the wait returns.
        drop(waited);
        std::mem::take(&mut lock(&self.late).results)
    }
}

/// The receipt of each tensor, if every slice applied its part. `tensors`: of each, the bytes sent and the
/// number of its slices' `answers`, which come tensor by tensor.
#[inline(always)]
pub(crate) fn receipts<'a>(
    tensors: impl ExactSizeIterator<Item = (u64, usize)>,
    mut answers: impl Iterator<Item = Option<&'a Applied>>,
) -> Option<Vec<Receipt>> {
    let mut receipts = Vec::with_capacity(tensors.len());
    for (bytes, slices) in tensors {
        let mut receipt = Receipt::of_nothing(bytes);
        for applied in answers.by_ref().take(slices) {
            receipt.add(applied?);
        }
        receipts.push(receipt.done());
    }
    Some(receipts)
}

/// The answers of a push, sorted by outcome.
#[derive(Debug, Default)]
pub struct Outcomes {
    /// Slices that applied the push: index of the gradient, elements, answer.
    pub applied: Vec<(usize, Range<usize>, Applied)>,
    /// Slices that refused it: index of the gradient, elements, reason.
    pub refused: Vec<(usize, Range<usize>, Error)>,
    /// Slices whose answer is missing: index of the gradient and the slice.
    pub in_doubt: Vec<(usize, Arc<dyn InDoubt>)>,
    /// Reason for the first missing answer; `None` if the push was still held.
    pub why_in_doubt: Option<Error>,
}

impl Outcomes {
    /// Returns receipts if everything was applied, else failures. `names` gives the name of each gradient,
    /// `bytes` the bytes sent for it.
    pub fn into_pushed(mut self, names: &dyn Fn(usize) -> Arc<str>, bytes: &[u64]) -> Pushed {
        self.applied.sort_by_key(|(k, ..)| *k);
        let mut slices = vec![0; bytes.len()];
        self.applied.iter().for_each(|(k, ..)| slices[*k] += 1);
        let answers = self.applied.iter().map(|(.., applied)| Some(applied));
        let receipts = receipts(bytes.iter().copied().zip(slices), answers).unwrap_or_default();
        let error = match (self.refused.first(), self.in_doubt.first()) {
            (None, None) => return Ok(receipts),
            (Some((.., error)), _) => error.clone(),
            (None, Some((_, doubt))) => self.why_in_doubt.take().unwrap_or_else(|| {
                Error::new(Kind::Deadline, "the push was still held at the call's deadline")
                    .tensor(doubt.tensor().clone())
            }),
        };
        if self.applied.is_empty() && self.in_doubt.is_empty() {
            return Err(PushError::Refused(error));
        }
        let mut whole = vec![true; bytes.len()];
        let failed = self.refused.iter().map(|(k, ..)| k).chain(self.in_doubt.iter().map(|(k, _)| k));
        failed.for_each(|k| whole[*k] = false);
        let receipts = receipts.into_iter().enumerate().filter(|(k, _)| whole[*k]);
        let torn = self.applied.into_iter().filter(|(k, ..)| !whole[*k]);
        Err(PushError::Partial(Box::new(PartialPush {
            error,
            receipts: receipts.map(|(k, receipt)| (names(k), receipt)).collect(),
            refused: self.refused.into_iter().map(|(k, range, error)| (names(k), range, error)).collect(),
            applied: torn.map(|(k, range, applied)| (names(k), range, applied)).collect(),
            in_doubt: self.in_doubt.into_iter().map(|(_, doubt)| doubt).collect(),
        })))
    }
}
