//! Policies decide whether a new push is applied now, held, refused, or added to a version of several
//! gradients. Each push has a completion, so a policy can hold it and answer later. The slice asks its
//! shard's policy about every push that passes validation.

use crate::base::correction::Correction;
use crate::base::error::{Error, Result};
use crate::base::mode::Quorum;
use crate::base::sync::Arc;
use crate::kernel::codec::CodecId;
use crate::kernel::rows::Indices;
use crate::memory::Charge;
use crate::slice::Slice;
use crate::slice::frame::{Action, Applied, Base, Identity, Push};
use crate::slice::identity::{Completion, Outcome};
use crate::tensor::SliceId;
use std::fmt;

/// What to do with a push.
#[derive(Debug)]
pub enum Admission {
    /// Apply it now.
    Apply,
    /// Hold it: the slice passes it to [`Policy::hold`].
    Hold,
    /// Refuse it.
    Refuse(Error),
    /// Add the gradient to the sum that makes the next version.
    Share(Share),
}

/// How a gradient takes part in the sum that makes a version.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// The fewest gradients that may make the version.
    pub least: u32,
    /// How the gradients are combined.
    pub quorum: Quorum,
    /// Its position in the sum; `None`: the order of arrival.
    pub rank: Option<u32>,
}

/// The gradients that have arrived for a slice's next version.
#[derive(Clone, Copy)]
pub struct Gathered<'a> {
    /// Number of gradients.
    pub count: usize,
    /// Whether one of them is of this client.
    pub has: &'a dyn Fn(u64) -> bool,
    /// [`Verdict::arrivals`] when the slice's present version was made; 0 before the first.
    pub since: u64,
}

impl fmt::Debug for Gathered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, since, .. } = self;
        f.debug_struct("Gathered").field("count", count).field("since", since).finish_non_exhaustive()
    }
}

/// What a group's mode and members mean for a version.
#[derive(Clone, Copy, Debug)]
pub struct Verdict {
    /// How the gradients are combined.
    pub quorum: Quorum,
    /// Nothing more is awaited.
    pub all: bool,
    /// As many have arrived as make the version once the mode's grace is over.
    pub enough: bool,
    /// Number of workers that have joined any group so far: those who join later are not awaited in a version
    /// that is under way.
    pub arrivals: u64,
}

/// Decides what happens to pushes; a shard has one policy.
pub trait Policy: Send + Sync + fmt::Debug {
    /// Decides about one push to one slice. Must not block.
    fn admit(&self, slice: &Slice, push: &Push<'_>) -> Admission;
    /// Takes a push to hold, and releases it later from any thread.
    fn hold(&self, held: Held);
    /// Judges the gradients for the next version of a slice of this group; called under the slice's lock.
    /// `None`: each gradient makes its own version.
    fn judge(&self, _group: u32, _gathered: Gathered<'_>) -> Option<Verdict> {
        None
    }
    /// Forgets a client that is gone.
    fn forget(&self, _client: u64) {}
}

/// A held push, with a copy of its body. The policy must release or refuse it; a dropped one is refused with
/// an error to its sender.
pub struct Held {
    slice: Arc<Slice>,
    identity: Identity,
    action: Action,
    base: Option<Base>,
    lr: Option<f64>,
    scale: Option<f32>,
    largest: Option<f64>,
    correction: Option<Correction>,
    codec: CodecId,
    count: u64,
    indices: Option<Vec<u8>>,
    body: Vec<u8>,
    note: Box<str>,
    done: Option<Completion>,
    _charge: Charge,
}

impl Held {
    /// Bytes that a held push takes: its body and rows, this struct, and its outcome in case the client's
    /// window is full of pending ones.
    pub(crate) fn memory_for(push: &Push<'_>) -> u64 {
        let indices = push.indices.map_or(0, |indices| indices.bytes().len());
        (push.body.len() + push.note.len() + indices + size_of::<Self>() + 2 * size_of::<(u64, Outcome)>())
            as u64
    }

    pub(crate) fn new(slice: Arc<Slice>, push: &Push<'_>, done: Completion, charge: Charge) -> Self {
        Self {
            slice,
            identity: push.identity,
            action: push.action,
            base: push.base,
            lr: push.lr,
            scale: push.scale,
            largest: push.largest,
            correction: push.correction,
            codec: push.codec,
            count: push.count,
            indices: push.indices.map(|indices| indices.bytes().to_vec()),
            body: push.body.to_vec(),
            note: push.note.into(),
            done: Some(done),
            _charge: charge,
        }
    }

    /// The slice that the push is for.
    pub fn slice(&self) -> SliceId {
        self.slice.id()
    }

    /// The identity of the push.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Applies the push now, unless it was fenced meanwhile.
    pub fn release(mut self) {
        let push = Push {
            action: self.action,
            base: self.base,
            lr: self.lr,
            scale: self.scale,
            correction: self.correction,
            indices: self.indices.as_deref().map(Indices::new),
            largest: self.largest,
            note: &self.note,
            ..Push::gradient(self.slice.id(), self.identity, self.count, self.codec, &self.body)
        };
        let result = self.slice.apply_held(&push);
        self.complete(result);
    }

    /// Refuses the push, which then counts as never seen.
    pub fn refuse(mut self, error: Error) {
        self.refuse_with(error);
    }

    fn refuse_with(&mut self, error: Error) {
        for waiting in self.slice.withdraw(self.identity) {
            waiting(Err(error.clone()));
        }
        self.complete(Err(error));
    }

    fn complete(&mut self, result: Result<Applied>) {
        if let Some(done) = self.done.take() {
            done(result);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.done.is_some() {
            self.refuse_with(Error::new(
                crate::base::error::Kind::Unavailable,
                "the push was held and then dropped",
            ));
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("slice", &self.slice())
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}
