//! One record per applied change, handed to a sink (`exact`: in the order of the slice's versions): what a log, a standby or an
//! audit needs to repeat it bit for bit.

use crate::codec::CodecId;
use crate::frame::{Action, Base, Identity};
use crate::rows::Indices;
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
}

/// Takes records; called under the slice's lock (`exact`) or right after the change (`hogwild`).
pub trait Sink: Send + Sync + fmt::Debug {
    /// Takes one record.
    fn record(&self, record: &Record<'_>);

    /// An `exact` slice has promised never to apply this push; called under its lock.
    fn fenced(&self, _slice: SliceId, _identity: Identity) {}
}
