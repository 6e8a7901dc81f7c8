//! Records of applied changes. A slice passes each to its [`Sink`], an `exact` slice in version order; a
//! record has what a log, a standby or an audit needs to replay the change bit for bit.

use crate::kernel::codec::CodecId;
use crate::kernel::rows::Indices;
use crate::slice::frame::{Action, Base, Identity};
use crate::tensor::program::{Command, Program};
use crate::tensor::{Apply, SliceId, Space, SpaceId};
use std::fmt;

/// A change that was just applied, with the body as it arrived.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// The slice.
    pub slice: SliceId,
    /// How the slice applies pushes: gradients can only be replayed on an `exact` slice.
    pub apply: Apply,
    /// The slice's version after the change.
    pub version: u64,
    /// The identity of the push.
    pub identity: Identity,
    /// The version that it was based on.
    pub base: Option<Base>,
    /// Set if the slice need not remember the push.
    pub once: bool,
    /// As in [`Push`](crate::frame::Push).
    pub acknowledged: u64,
    /// Effect of the push.
    pub action: Action,
    /// The rows of a sparse gradient.
    pub indices: Option<Indices<'a>>,
    /// The encoding of the body.
    pub codec: CodecId,
    /// The body.
    pub body: &'a [u8],
    /// The learning rate that took effect.
    pub lr: f64,
    /// The factor that took effect.
    pub scale: f32,
    /// The momentum that took effect; 0 if the optimizer has none.
    pub momentum: f64,
    /// The `beta1` that took effect in place of Adam's own.
    pub beta1: Option<f64>,
    /// If the body is the sum of several workers' gradients, the identities of these; `identity` is that of
    /// the last to arrive.
    pub shared_by: Identities<'a>,
    /// What the gradient came from, in its sender's words; may be empty. A sum of several has none.
    pub note: &'a str,
}

/// Identities as a log stores them: client and sequence number, 8 bytes each, little-endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identities<'a>(&'a [u8]);

impl<'a> Identities<'a> {
    /// Bytes of one identity.
    pub const BYTES: usize = 16;

    /// Returns `None` unless the bytes are a whole number of identities.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        bytes.len().is_multiple_of(Self::BYTES).then_some(Self(bytes))
    }

    /// Appends an identity to the bytes of a list.
    pub fn put(to: &mut Vec<u8>, identity: Identity) {
        to.extend_from_slice(&identity.client.to_le_bytes());
        to.extend_from_slice(&identity.sequence.to_le_bytes());
    }

    /// The bytes.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// Returns whether the list is empty.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The identities in order.
    pub fn iter(self) -> impl Iterator<Item = Identity> + 'a {
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        self.0
            .chunks_exact(Self::BYTES)
            .map(move |one| Identity { client: number(&one[..8]), sequence: number(&one[8..]) })
    }
}

/// A program that a slice has just run on the vectors of a space.
#[derive(Clone, Copy, Debug)]
pub struct ProgramRecord<'a> {
    /// The slice.
    pub slice: SliceId,
    /// The slice's version after the program, which is a new one only if the program changed the tensor.
    pub version: u64,
    /// Space, term and number.
    pub command: Command,
    /// The program.
    pub program: &'a Program,
    /// The sum that the program ended: a slice that repeats the program does not have its portions.
    pub sum: Option<SumRecord<'a>>,
}

/// The result of a sum of portions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumRecord<'a> {
    /// The values, as the plain codec of the slice's type encodes them.
    pub values: &'a [u8],
    /// The largest magnitude among the portions.
    pub largest: f64,
}

/// Receives records. An `exact` slice calls it under its lock, a `hogwild` slice right after the change.
pub trait Sink: Send + Sync + fmt::Debug {
    /// Takes one record.
    fn record(&self, record: &Record<'_>);

    /// Notes that an `exact` slice has promised never to apply this push; called under the slice's lock.
    fn fenced(&self, _slice: SliceId, _identity: Identity) {}

    /// Takes the record of a program; called under the slice's lock.
    fn program(&self, _record: &ProgramRecord<'_>) {}

    /// Notes that a slice has opened a space, whose vectors are 0; called under the slice's lock.
    fn space_opened(&self, _slice: SliceId, _space: &Space) {}

    /// Notes that a slice has closed a space; called under the slice's lock.
    fn space_closed(&self, _slice: SliceId, _space: SpaceId) {}
}
