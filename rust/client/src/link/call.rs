//! One call of a user: its parts (one per slice), the outcome of each, and how a thread waits for them.

use crate::link::payload::Memory;
use crate::link::send::Abandoned;
use crate::link::state::Link;
use crate::state::doubt::{Doubt, Residue};
use crate::state::runtime::{Process, lock};
use crate::state::waiting;
use bytes::Bytes;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::Applied;
use fastps_core::verbs::Caller;
use fastps_transport::wire::{Pace, Spin};
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Interval at which a caller is asked whether it still waits.
const CALLER_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// One slice of a call.
pub(crate) struct CallPart {
    /// Index of the tensor in the call.
    pub(crate) tensor: usize,
    pub(crate) name: Arc<str>,
    pub(crate) link: Arc<Link>,
    pub(crate) slice: u64,
    pub(crate) elements: Range<usize>,
    /// Bytes of the payload, as sent and as expected back.
    pub(crate) sent_bytes: usize,
    pub(crate) answer_bytes: Option<usize>,
    pub(crate) residue: Mutex<Option<Residue>>,
    /// Set when the frame is queued.
    pub(crate) tag: AtomicU64,
}

/// A server's answer to a part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartAnswer {
    /// For pulls, only `version` and `own` are meaningful.
    pub(crate) applied: Applied,
    pub(crate) step: u64,
}

/// Outcome of a part.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Open,
    Answered(PartAnswer),
    /// Certainly not applied.
    Failed(Error),
    InDoubt(Arc<Doubt>),
}

/// A call under way.
pub(crate) struct Call {
    process: Process,
    begun: Instant,
    /// Set once its wait was reported.
    told: AtomicBool,
    pub(crate) deadline: Instant,
    /// Set for a push or assignment: unanswered after being sent, it is in doubt.
    pub(crate) identified: bool,
    pub(crate) parts: Vec<CallPart>,
    memories: Vec<Arc<Memory>>,
    state: Mutex<CallState>,
    changed: Notify,
}

/// Values as received.
pub(crate) struct ArrivedValues {
    pub(crate) bytes: Bytes,
    /// Set for values in the server's memory, which must not be held for long.
    pub(crate) lent: bool,
}

impl ArrivedValues {
    /// A copy of lent values, which may be kept.
    fn kept(self) -> Self {
        if self.lent { Self { bytes: Bytes::copy_from_slice(&self.bytes), lent: false } } else { self }
    }
}

struct CallState {
    outcomes: Vec<Outcome>,
    open: usize,
    done: bool,
    /// Values not taken yet, by part; those of consecutive parts may be one.
    arrived: VecDeque<(usize, ArrivedValues)>,
    /// Set while a caller takes values as they arrive.
    taken: bool,
    callbacks: Vec<Box<dyn FnOnce() + Send>>,
}

impl CallState {
    fn is_open(&self, part: usize) -> bool {
        matches!(self.outcomes[part], Outcome::Open)
    }
}

impl Call {
    pub(crate) fn new(
        process: Process,
        deadline: Instant,
        identified: bool,
        parts: Vec<CallPart>,
        memories: Vec<Arc<Memory>>,
    ) -> Arc<Self> {
        let state = CallState {
            outcomes: parts.iter().map(|_| Outcome::Open).collect(),
            open: parts.len(),
            done: parts.is_empty(),
            arrived: VecDeque::new(),
            taken: false,
            callbacks: Vec::new(),
        };
        let state = Mutex::new(state);
        let call = Arc::new(Self {
            process,
            begun: Instant::now(),
            told: AtomicBool::new(false),
            deadline,
            identified,
            parts,
            memories,
            state,
            changed: Notify::new(),
        });
        call.memories.iter().for_each(|memory| memory.belongs_to(Arc::downgrade(&call)));
        call
    }

    /// Delivers the outcome of a part; only the first one counts.
    pub(crate) fn deliver(&self, part: usize, outcome: Outcome, values: Option<ArrivedValues>) {
        self.deliver_all([(part, outcome)], values.map(|values| (part, values)));
    }

    /// Delivers the outcomes of many parts. Values belong to the part named with them, and perhaps to some
    /// after it.
    pub(crate) fn deliver_all(
        &self,
        outcomes: impl IntoIterator<Item = (usize, Outcome)>,
        values: impl IntoIterator<Item = (usize, ArrivedValues)>,
    ) {
        let mut state = lock(&self.state);
        let before = state.open;
        for (part, values) in values {
            if state.is_open(part) {
                let values = if state.taken { values } else { values.kept() };
                state.arrived.push_back((part, values));
            }
        }
        for (part, mut outcome) in outcomes {
            if !state.is_open(part) {
                continue;
            }
            if let (Some(residue), Outcome::Failed(error)) =
                (lock(&self.parts[part].residue).take(), &mut outcome)
            {
                drop(state);
                if let Err(worse) = residue.refused(error.kind) {
                    *error = worse;
                }
                state = lock(&self.state);
            }
            state.outcomes[part] = outcome;
            state.open -= 1;
        }
        let open = state.open;
        drop(state);
        if open == before {
            return;
        }
        if open > 0 {
            self.changed.notify_waiters();
            return;
        }
        self.memories.iter().for_each(|memory| memory.withdraw());
        if !self.finish() {
            // The rest of it waits to be written to a peer that does not read.
            self.parts.iter().for_each(|part| part.link.recall());
        }
    }

    /// Completes the call once every part has its outcome and no connection reads the caller's memory.
    /// Returns whether it is complete.
    pub(crate) fn finish(&self) -> bool {
        let mut state = lock(&self.state);
        if state.done || state.open > 0 || !self.memories.iter().all(|memory| memory.is_idle()) {
            return state.done;
        }
        state.done = true;
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.changed.notify_waiters();
        for callback in callbacks {
            callback();
        }
        true
    }

    pub(crate) fn is_done(&self) -> bool {
        self.process.check().is_err() || lock(&self.state).done || Instant::now() >= self.deadline
    }

    pub(crate) fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        if self.process.check().is_ok() {
            let mut state = lock(&self.state);
            if !state.done {
                state.callbacks.push(callback);
                return;
            }
        }
        callback();
    }

    /// Ends the call: unsent parts are withdrawn, unanswered parts are in doubt.
    pub(crate) fn expire(&self) {
        for first in 0..self.parts.len() {
            // Another part of the same frame may have ended it.
            if !matches!(lock(&self.state).outcomes[first], Outcome::Open) {
                continue;
            }
            let (parts, abandoned) = self.parts[first].link.abandon(self, first);
            match abandoned {
                Abandoned::NotSent(error) => {
                    parts.for_each(|k| self.deliver(k, Outcome::Failed(error.clone()), None));
                }
                Abandoned::Sent(doubts) => {
                    parts.zip(doubts).for_each(|(k, doubt)| self.deliver(k, Outcome::InDoubt(doubt), None));
                }
                // Its answer is being delivered right now.
                Abandoned::Answered => {}
            }
        }
    }

    /// Waits until all is done or the timeout or the deadline passes (that ends the call). Hands out values
    /// as they arrive, or keeps them without a caller. Returns whether all is done. The waiting thread drives
    /// the client's connections itself.
    pub(crate) fn wait(&self, timeout: Duration, caller: Option<&mut dyn Caller>) -> Result<bool> {
        self.process.check()?;
        let until = crate::state::time::after(timeout).min(self.deadline);
        // A call without parts is done already.
        let Some(driver) = self.parts.first().and_then(|part| part.link.driver.upgrade()) else {
            return Ok(lock(&self.state).done);
        };
        let takes = caller.is_some();
        lock(&self.state).taken = takes;
        let done = driver.drive(async |spin| self.waiting(until, caller, spin).await);
        if takes {
            let mut state = lock(&self.state);
            state.taken = false;
            let left = std::mem::take(&mut state.arrived);
            state.arrived.extend(left.into_iter().map(|(part, values)| (part, values.kept())));
        }
        if self.parts.iter().any(|part| part.link.has_frames()) {
            driver.nudge();
        }
        Ok(done)
    }

    async fn waiting(&self, until: Instant, mut caller: Option<&mut dyn Caller>, spin: &mut Spin) -> bool {
        let (mut expired, mut asked, pace) = (false, Instant::now(), Pace::new());
        loop {
            let changed = self.changed.notified();
            if let Some(caller) = &mut caller {
                self.hand_out(*caller);
            }
            {
                let state = lock(&self.state);
                if state.done && (caller.is_none() || state.arrived.is_empty()) {
                    return true;
                }
            }
            let now = Instant::now();
            let tell_at =
                (!self.told.load(Ordering::Relaxed)).then(|| self.begun + waiting::REPORT_WAIT_AFTER);
            if tell_at.is_some_and(|at| now >= at) {
                self.say_for_what_it_waits();
            }
            if let Some(caller) = &mut caller
                && now >= asked + CALLER_CHECK_INTERVAL
            {
                asked = now;
                if let Some(at_end) = caller.leaves() {
                    self.on_done(at_end);
                    return false;
                }
            }
            let next = if expired {
                now + Duration::from_secs(1)
            } else if now >= self.deadline {
                expired = true;
                self.expire();
                continue;
            } else if now >= until {
                return false;
            } else if caller.is_some() {
                until.min(asked + CALLER_CHECK_INTERVAL)
            } else {
                until
            };
            let next = tell_at.filter(|at| *at > now).map_or(next, |at| next.min(at));
            // The timeout is handled above.
            let _ = tokio::time::timeout_at(next.into(), spin.wait(changed, &pace)).await;
        }
    }

    /// Reports once per call what its first unanswered part waits for.
    fn say_for_what_it_waits(&self) {
        if self.told.swap(true, Ordering::Relaxed) {
            return;
        }
        let open = (0..self.parts.len()).find(|part| lock(&self.state).is_open(*part));
        if let Some(part) = open {
            let (what, text) = self.parts[part].link.waits_for();
            waiting::say(what, &text);
        }
    }

    /// Hands out the values that have arrived.
    pub(crate) fn hand_out(&self, caller: &mut dyn Caller) {
        for (part, values) in self.take_arrived() {
            caller.take(part.tensor, part.elements.start, &values);
        }
    }

    /// The outcomes of a completed call, with their parts.
    pub(crate) fn outcomes(&self) -> Vec<(&CallPart, Outcome)> {
        self.parts.iter().zip(lock(&self.state).outcomes.iter().cloned()).collect()
    }

    /// Takes the values that arrived and were not handed out.
    pub(crate) fn take_arrived(&self) -> Vec<(&CallPart, Bytes)> {
        let arrived = std::mem::take(&mut lock(&self.state).arrived);
        arrived.into_iter().map(|(part, values)| (&self.parts[part], values.bytes)).collect()
    }
}

impl CallPart {
    pub(crate) fn tag(&self) -> u64 {
        self.tag.load(Ordering::Acquire)
    }

    pub(crate) fn refused(&self, mut error: Error) -> Error {
        // A slice's number means nothing to a user. A tensor still being registered keeps its retry time.
        if error.kind == Kind::UnknownTensor && error.retry_after_ms.is_none() {
            error.message = self.link.gone(&self.name);
        }
        error.tensor(self.name.clone()).shard(self.link.shard())
    }

    pub(crate) fn frame_error(&self, message: &str) -> Error {
        self.refused(Error::new(Kind::Frame, message))
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("parts", &self.parts.len()).finish_non_exhaustive()
    }
}
