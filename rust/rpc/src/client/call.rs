//! One call of a user: its parts (one per slice), what became of each, and how a thread waits for them.

use super::doubt::{Doubt, Residue};
use super::link::{Abandoned, Link};
use super::payload::Memory;
use super::runtime::{Process, lock};
use bytes::Bytes;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::Applied;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One slice of a call.
pub(super) struct Part {
    /// Index of the tensor in the call.
    pub(super) tensor: usize,
    pub(super) name: Arc<str>,
    pub(super) link: Arc<Link>,
    pub(super) slice: u64,
    pub(super) elements: Range<usize>,
    /// Bytes of the payload, as sent and as expected back.
    pub(super) sent_bytes: usize,
    pub(super) answer_bytes: Option<usize>,
    pub(super) residue: Mutex<Option<Residue>>,
    /// Set when the frame is queued.
    pub(super) tag: AtomicU64,
}

/// What a server said about a part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// For pulls, `version` and `own` alone mean something.
    pub(super) applied: Applied,
    pub(super) step: u64,
}

/// Takes values as they come.
pub(super) type Take<'a> = dyn FnMut(&Part, &Bytes) + 'a;

/// What became of a part.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    Open,
    Answered(Answer),
    /// Certainly not applied.
    Failed(Error),
    InDoubt(Arc<Doubt>),
}

/// A call under way.
pub(super) struct Call {
    process: Process,
    pub(super) deadline: Instant,
    /// A push or assignment: sent and unanswered means in doubt.
    pub(super) identified: bool,
    pub(super) parts: Vec<Part>,
    memories: Vec<Arc<Memory>>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    outcomes: Vec<Outcome>,
    open: usize,
    done: bool,
    /// Values that nobody has taken yet, by part.
    arrived: VecDeque<(usize, Bytes)>,
    callbacks: Vec<Box<dyn FnOnce() + Send>>,
}

impl Call {
    pub(super) fn new(
        process: Process,
        deadline: Instant,
        identified: bool,
        parts: Vec<Part>,
        memories: Vec<Arc<Memory>>,
    ) -> Arc<Self> {
        let state = State {
            outcomes: parts.iter().map(|_| Outcome::Open).collect(),
            open: parts.len(),
            done: parts.is_empty(),
            arrived: VecDeque::new(),
            callbacks: Vec::new(),
        };
        let state = Mutex::new(state);
        Arc::new(Self { process, deadline, identified, parts, memories, state, changed: Condvar::new() })
    }

    /// Notes what became of a part; only the first outcome counts.
    pub(super) fn deliver(&self, part: usize, outcome: Outcome, values: Option<Bytes>) {
        let mut state = lock(&self.state);
        if !matches!(state.outcomes[part], Outcome::Open) {
            return;
        }
        let residue = lock(&self.parts[part].residue).take();
        state.outcomes[part] = match (outcome, residue) {
            (Outcome::Failed(error), Some(residue)) => {
                drop(state);
                let error = residue.give_back().err().unwrap_or(error);
                state = lock(&self.state);
                Outcome::Failed(error)
            }
            (outcome, _) => outcome,
        };
        state.open -= 1;
        if let Some(values) = values {
            state.arrived.push_back((part, values));
        }
        if state.open > 0 {
            drop(state);
            self.changed.notify_all();
            return;
        }
        drop(state);
        self.memories.iter().for_each(|m| m.withdraw());
        let mut state = lock(&self.state);
        state.done = true;
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.changed.notify_all();
        for callback in callbacks {
            callback();
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.process.check().is_err() || lock(&self.state).done || Instant::now() >= self.deadline
    }

    pub(super) fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        if self.process.check().is_ok() {
            let mut state = lock(&self.state);
            if !state.done {
                state.callbacks.push(callback);
                return;
            }
        }
        callback();
    }

    /// Ends the call: what was not sent is withdrawn, what was sent and not answered is in doubt.
    pub(super) fn expire(&self) {
        for (index, part) in self.parts.iter().enumerate() {
            if !matches!(lock(&self.state).outcomes[index], Outcome::Open) {
                continue;
            }
            match part.link.abandon(part) {
                Abandoned::NotSent(error) => self.deliver(index, Outcome::Failed(error), None),
                Abandoned::Sent(doubt) => self.deliver(index, Outcome::InDoubt(doubt), None),
                // Its answer is being delivered this moment.
                Abandoned::Answered => {}
            }
        }
    }

    /// Waits until all is done or the timeout or the deadline passes (that ends the call); hands out values as they
    /// come. Tells whether all is done.
    pub(super) fn wait(&self, timeout: Duration, mut take: Option<&mut Take<'_>>) -> Result<bool> {
        self.process.check()?;
        let until = super::after(timeout).min(self.deadline);
        let mut state = lock(&self.state);
        loop {
            if let Some(take) = &mut take
                && !state.arrived.is_empty()
            {
                let arrived = std::mem::take(&mut state.arrived);
                drop(state);
                for (part, values) in arrived {
                    take(&self.parts[part], &values);
                }
                state = lock(&self.state);
                continue;
            }
            if state.done {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= self.deadline {
                drop(state);
                self.expire();
                state = lock(&self.state);
                while !state.done {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                continue;
            }
            if now >= until {
                return Ok(false);
            }
            state = self.changed.wait_timeout(state, until - now).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The outcomes of a call that is done, with their parts.
    pub(super) fn outcomes(&self) -> Vec<(&Part, Outcome)> {
        self.parts.iter().zip(lock(&self.state).outcomes.iter().cloned()).collect()
    }

    /// Takes the values that came and were not handed out.
    pub(super) fn take_arrived(&self) -> Vec<(&Part, Bytes)> {
        std::mem::take(&mut lock(&self.state).arrived).into_iter().map(|(i, v)| (&self.parts[i], v)).collect()
    }
}

impl Part {
    pub(super) fn tag(&self) -> u64 {
        self.tag.load(Ordering::Acquire)
    }

    pub(super) fn refused(&self, error: Error) -> Error {
        error.tensor(self.name.clone()).shard(self.link.shard())
    }

    pub(super) fn frame_error(&self, message: &str) -> Error {
        self.refused(Error::new(Kind::Frame, message))
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("parts", &self.parts.len()).finish_non_exhaustive()
    }
}
