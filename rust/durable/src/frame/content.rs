//! What a frame says.

use crate::catalog::Event;
use crate::files::output::Place;
use crate::frame::origin::{Author, Origin};
use fastps_core::frame::Identity;
use fastps_core::record::Record;
use fastps_core::slice::Standing;
use fastps_core::tensor::SliceId;

pub(super) const SEGMENT: u8 = 1;
pub(super) const PUSH: u8 = 2;
pub(super) const FENCE: u8 = 3;
pub(super) const EVENT: u8 = 4;
pub(super) const DURABLE: u8 = 5;
pub(super) const END: u8 = 6;
pub(super) const SLICE: u8 = 7;

pub(super) const HAS_ROWS: u8 = 1;
pub(super) const HAS_BASE: u8 = 2;
pub(super) const HAS_OWN: u8 = 4;
pub(super) const ONCE: u8 = 8;
pub(super) const HOGWILD: u8 = 16;
pub(super) const SHARED: u8 = 32;
pub(super) const KNOWN_FLAGS: u8 = 63;

/// In an outcome: staleness that is not known.
pub(super) const UNKNOWN: u64 = u64::MAX;

/// What a frame says.
#[derive(Debug)]
pub(crate) enum Content<'a> {
    /// Begins a segment of the log.
    Segment {
        format: u32,
        number: u64,
        after_hole: bool,
        origin: Origin,
        author: Author,
    },
    Push(Record<'a>),
    Fence(SliceId, Identity),
    Event(Event),
    /// All before this offset was durable when this frame was written.
    Durable(u64),
    /// Ends a segment whose continuation is the one of this number.
    End(u64),
    Slice(Piece),
}

/// A slice in a snapshot: where its arrays lie, and all else that it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    pub(crate) slice: u64,
    pub(crate) values: Place,
    pub(crate) state: Place,
    pub(crate) standing: Standing,
}
