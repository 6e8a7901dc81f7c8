//! A slice of a push whose answer is missing. Its content returns to the residual once it is known not to
//! be applied.

use crate::state::runtime::{Process, lock};
use bytes::Bytes;
use fastps_core::codec::ErrorFeedback;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::verbs::{Fate, InDoubt};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Content of a body, restored to its residual if the push was refused or fenced.
pub(crate) type Residue = fastps_core::residue::Residue<Bytes>;

/// A slice of a push that was sent and not answered in time.
///
/// ```text
///                             +--> applied   its content is dropped
/// in doubt -- KIND_RESOLVE ---+--> fenced    its content returns to the residual
///                             +--> unknown   dropped, since the server may have applied it
/// ```
///
/// The first fate is final.
pub(crate) struct Doubt {
    process: Process,
    tensor: Arc<str>,
    shard: u32,
    elements: Range<usize>,
    /// Residual that the content would return to.
    feedback: Option<Arc<Mutex<ErrorFeedback>>>,
    state: Mutex<(Option<Fate>, Option<Residue>)>,
    settled: Condvar,
}

impl Doubt {
    pub(crate) fn new(
        process: Process,
        tensor: Arc<str>,
        shard: u32,
        elements: Range<usize>,
        residue: Option<Residue>,
    ) -> Arc<Self> {
        let feedback = residue.as_ref().map(|r| r.feedback.clone());
        let state = Mutex::new((None, residue));
        Arc::new(Self { process, tensor, shard, elements, feedback, state, settled: Condvar::new() })
    }

    /// Sets the fate; the first one counts. Fenced content returns to its residual before anyone can see the
    /// fate.
    pub(crate) fn settle(&self, fate: Fate) {
        let mut state = lock(&self.state);
        if state.0.is_some() {
            return;
        }
        if let Some(residue) = state.1.take().filter(|_| fate == Fate::Fenced)
            && let Err(error) = residue.give_back()
        {
            tracing::warn!(%error, "content of a fenced push is lost");
        }
        state.0 = Some(fate);
        self.settled.notify_all();
    }

    pub(crate) fn is_settled(&self) -> bool {
        lock(&self.state).0.is_some()
    }

    /// Error of the push that left the doubt.
    pub(crate) fn error(&self) -> Error {
        if lock(&self.state).0 == Some(Fate::Unknown) {
            let message = "sent, and not answered before the server forgot this client: whether it was applied is unknown";
            return Error::new(Kind::UnknownOutcome, message);
        }
        Error::new(Kind::Deadline, "sent, but not answered in time: whether it was applied is in doubt")
    }

    /// Returns whether its content may still return to this residual.
    pub(crate) fn concerns(&self, feedback: &Arc<Mutex<ErrorFeedback>>) -> bool {
        self.feedback.as_ref().is_some_and(|f| Arc::ptr_eq(f, feedback)) && !self.is_settled()
    }

    pub(crate) fn wait_until(&self, deadline: Instant) -> Result<Fate> {
        self.process.check()?;
        let mut state = lock(&self.state);
        loop {
            if let Some(fate) = state.0 {
                return Ok(fate);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(
                    Kind::Deadline,
                    "an earlier push is still in doubt: its server has not answered",
                )
                .tensor(self.tensor.clone())
                .shard(self.shard));
            }
            state = self.settled.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl InDoubt for Doubt {
    fn tensor(&self) -> &Arc<str> {
        &self.tensor
    }

    fn shard(&self) -> u32 {
        self.shard
    }

    fn elements(&self) -> Range<usize> {
        self.elements.clone()
    }

    fn result(&self, timeout: Duration) -> Result<Fate> {
        self.wait_until(crate::state::time::after(timeout))
    }
}

impl fmt::Debug for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InDoubt")
            .field("tensor", &self.tensor)
            .field("shard", &self.shard)
            .field("elements", &self.elements)
            .finish_non_exhaustive()
    }
}
