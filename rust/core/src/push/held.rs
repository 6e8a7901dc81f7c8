//! In-process pushes in doubt: slices whose push a policy still held at the deadline. The caller of the push
//! asks such a slice for the outcome.

use crate::base::error::Result;
use crate::base::sync::{Arc, Mutex, lock};
use crate::push::residue::Residue;
use crate::slice::frame::Identity;
use crate::slice::identity::Completion;
use crate::slice::{Resolved, Slice};
use crate::verbs::{Fate, InDoubt};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// A slice whose push a policy still held at the deadline.
#[derive(Debug)]
pub(crate) struct HeldDoubt {
    slice: Arc<Slice>,
    identity: Identity,
    residue: Mutex<Option<Residue<Vec<u8>>>>,
    /// Signalled when the slice knows more; `None` before the first query.
    answer: Mutex<Option<Receiver<()>>>,
}

impl HeldDoubt {
    pub(crate) fn new(slice: Arc<Slice>, identity: Identity, residue: Option<Residue<Vec<u8>>>) -> Self {
        Self { slice, identity, residue: Mutex::new(residue), answer: Mutex::default() }
    }

    /// Waits until the slice knows the outcome, up to the timeout, and resolves the push.
    fn resolve(&self, timeout: Duration) -> Result<Resolved> {
        let mut answer = lock(&self.answer).take();
        if answer.is_none() {
            let (done, receiver) = sync_channel(1);
            let later = || -> Completion { Box::new(move |_| done.try_send(()).unwrap_or_default()) };
            if let Some(resolved) = self.slice.resolve_later(self.identity, later) {
                return resolved;
            }
            answer = Some(receiver);
        }
        if let Some(receiver) = answer
            && receiver.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout)
        {
            *lock(&self.answer) = Some(receiver);
        }
        // If the outcome is not known yet, this error says what the push waits for.
        self.slice.resolve(self.identity)
    }
}

impl InDoubt for HeldDoubt {
    fn tensor(&self) -> &Arc<str> {
        &self.slice.spec().name
    }

    fn shard(&self) -> u32 {
        0
    }

    fn elements(&self) -> Range<usize> {
        self.slice.range()
    }

    fn result(&self, timeout: Duration) -> Result<Fate> {
        let fate = match self.resolve(timeout)? {
            Resolved::Applied(applied) => Fate::Applied { version: applied.version },
            Resolved::Fenced => Fate::Fenced,
            Resolved::Unknown => Fate::Unknown,
        };
        // Taken out, so that repeated queries return the content once.
        if let (Some(residue), Fate::Fenced) = (lock(&self.residue).take(), fate) {
            residue.give_back()?;
        }
        Ok(fate)
    }
}
