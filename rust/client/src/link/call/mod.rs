//! One call of a user as data: its parts (one per slice), and the outcome and values of each.

pub(crate) mod payload;

use crate::link::call::payload::Memory;
use crate::state::doubt::{Doubt, Residue};
use crate::state::map::Entry;
use crate::state::runtime::{Process, lock};
use bytes::Bytes;
use fastps_core::error::{Error, Kind};
use fastps_core::frame::Applied;
use fastps_core::verbs::Caller;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// One slice of a call.
pub(crate) struct CallPart {
    /// Index of the tensor in the call.
    pub(crate) tensor: usize,
    pub(crate) name: Arc<str>,
    pub(crate) shard: usize,
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

/// Makes the connections that carry these parts return the caller's memory.
type Recall = Box<dyn Fn(&[CallPart]) + Send + Sync>;

/// A call under way.
pub(crate) struct Call {
    pub(crate) process: Process,
    pub(crate) deadline: Instant,
    /// Set for a push or assignment: unanswered after being sent, it is in doubt.
    pub(crate) identified: bool,
    pub(crate) parts: Vec<CallPart>,
    memories: Vec<Arc<Memory>>,
    recall: Recall,
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
        recall: Recall,
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
            deadline,
            identified,
            parts,
            memories,
            recall,
            state,
            changed: Notify::new(),
        });
        for memory in &call.memories {
            let call = Arc::downgrade(&call);
            memory.when_idle(Box::new(move || {
                if let Some(call) = call.upgrade() {
                    call.finish();
                }
            }));
        }
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
            (self.recall)(&self.parts);
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

    /// Signals outcomes, values and the end of the call.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Returns whether a part has no outcome yet.
    pub(crate) fn is_open(&self, part: usize) -> bool {
        lock(&self.state).is_open(part)
    }

    /// Returns whether it is complete and, for a caller that takes values, all of them were handed out.
    pub(crate) fn is_over(&self, takes: bool) -> bool {
        let state = lock(&self.state);
        state.done && (!takes || state.arrived.is_empty())
    }

    /// Sets whether a caller takes values as they arrive: otherwise they are kept.
    pub(crate) fn set_taken(&self, taken: bool) {
        let mut state = lock(&self.state);
        state.taken = taken;
        if !taken {
            let left = std::mem::take(&mut state.arrived);
            state.arrived.extend(left.into_iter().map(|(part, values)| (part, values.kept())));
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
    /// A part in the tensor's k-th slice.
    pub(crate) fn new(
        tensor: usize,
        entry: &Entry,
        k: usize,
        elements: Range<usize>,
        sent_bytes: usize,
        answer_bytes: Option<usize>,
    ) -> Self {
        let (slice, shard) = entry.slices[k];
        Self {
            tensor,
            name: entry.spec.name.clone(),
            shard,
            slice: slice.0,
            elements,
            sent_bytes,
            answer_bytes,
            residue: Mutex::new(None),
            tag: AtomicU64::new(0),
        }
    }

    pub(crate) fn tag(&self) -> u64 {
        self.tag.load(Ordering::Acquire)
    }

    /// The error with the part's tensor and shard.
    pub(crate) fn refused(&self, error: Error) -> Error {
        error.tensor(self.name.clone()).shard(self.shard as u32)
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
