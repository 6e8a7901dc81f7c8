//! What an in-process push keeps of a slice whose push a policy holds: the way to ask what became of it, and
//! what returns to error feedback if it is never applied.

use crate::base::error::Result;
use crate::base::isa::Isa;
use crate::base::sync::{Arc, Mutex, lock};
use crate::kernel::codec::{CodecId, ErrorFeedback};
use crate::slice::frame::Identity;
use crate::slice::identity::Completion;
use crate::slice::{Resolved, Slice};
use crate::verbs::{Fate, InDoubt};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// A held body and the residuals that it came from.
#[derive(Debug)]
pub(crate) struct Residue {
    pub(crate) isa: Isa,
    pub(crate) slice: Arc<Slice>,
    pub(crate) feedback: Arc<Mutex<ErrorFeedback>>,
    pub(crate) codec: CodecId,
    pub(crate) body: Vec<u8>,
}

impl Residue {
    /// Gives the content back to the residual: it was not applied and never will be.
    pub(crate) fn give_back(&self) -> Result<()> {
        let (name, range) = (&self.slice.spec().name, self.slice.range());
        lock(&self.feedback).give_back(self.isa, name, range.start, self.codec, &self.body, range.len())
    }
}

/// A slice whose push a policy still held at the deadline.
#[derive(Debug)]
pub(crate) struct HeldDoubt {
    slice: Arc<Slice>,
    identity: Identity,
    residue: Mutex<Option<Residue>>,
    /// Told when the slice knows more, once it was asked.
    told: Mutex<Option<Receiver<()>>>,
}

impl HeldDoubt {
    pub(crate) fn new(slice: Arc<Slice>, identity: Identity, residue: Option<Residue>) -> Self {
        Self { slice, identity, residue: Mutex::new(residue), told: Mutex::default() }
    }

    /// What the slice knows, at the latest after the timeout.
    fn resolve(&self, timeout: Duration) -> Result<Resolved> {
        let mut told = lock(&self.told).take();
        if told.is_none() {
            let (done, receiver) = sync_channel(1);
            let later = || -> Completion { Box::new(move |_| done.try_send(()).unwrap_or_default()) };
            if let Some(resolved) = self.slice.resolve_later(self.identity, later) {
                return resolved;
            }
            told = Some(receiver);
        }
        if let Some(receiver) = told
            && receiver.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout)
        {
            *lock(&self.told) = Some(receiver);
        }
        // Too early, this says what is waited for.
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
        // Once, whoever asks again.
        if let (Some(residue), Fate::Fenced) = (lock(&self.residue).take(), fate) {
            residue.give_back()?;
        }
        Ok(fate)
    }
}
