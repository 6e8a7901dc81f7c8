//! One record per applied change, handed to a sink (`exact`: in the order of the slice's versions): what a
//! log, a standby or an audit needs to repeat it bit for bit.

use crate::kernel::codec::CodecId;
use crate::kernel::rows::Indices;
use crate::slice::frame::{Action, Base, Identity};
use crate::tensor::{Apply, SliceId};
use std::fmt;

/// A change that was just applied. The body is the one that came.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// The slice.
    pub slice: SliceId,
    /// How its pushes meet: only `exact` ones can be repeated.
    pub apply: Apply,
    /// Its version after the change.
    pub version: u64,
    /// Whose change.
    pub identity: Identity,
    /// What it was based on.
    pub base: Option<Base>,
    /// The slice need not remember it.
    pub once: bool,
    /// What it did.
    pub action: Action,
    /// The rows that a sparse gradient was for.
    pub indices: Option<Indices<'a>>,
    /// How the body is coded.
    pub codec: CodecId,
    /// The body.
    pub body: &'a [u8],
    /// The learning rate that took effect.
    pub lr: f64,
    /// The factor that took effect.
    pub scale: f32,
    /// The momentum that took effect.
    pub momentum: f64,
    /// Whose gradients the body is the sum of, where it is one: `identity` is the last that came.
    pub shared_by: Identities<'a>,
}

/// Identities as they lie in a log: client and sequence, 8 bytes each, little-endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identities<'a>(&'a [u8]);

impl<'a> Identities<'a> {
    /// Of one identity.
    pub const BYTES: usize = 16;

    /// `None`: these bytes are no list.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        bytes.len().is_multiple_of(Self::BYTES).then_some(Self(bytes))
    }

    /// Appends one to the bytes of a list.
    pub fn put(to: &mut Vec<u8>, identity: Identity) {
        to.extend_from_slice(&identity.client.to_le_bytes());
        to.extend_from_slice(&identity.sequence.to_le_bytes());
    }

    /// The bytes.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// In their order.
    pub fn iter(self) -> impl Iterator<Item = Identity> + 'a {
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        self.0
            .chunks_exact(Self::BYTES)
            .map(move |one| Identity { client: number(&one[..8]), sequence: number(&one[8..]) })
    }
}

/// Takes records; called under the slice's lock (`exact`) or right after the change (`hogwild`).
pub trait Sink: Send + Sync + fmt::Debug {
    /// Takes one record.
    fn record(&self, record: &Record<'_>);

    /// An `exact` slice has promised never to apply this push; called under its lock.
    fn fenced(&self, _slice: SliceId, _identity: Identity) {}
}
