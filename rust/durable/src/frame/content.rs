//! The contents of a frame, and the numbers that encode them.

use crate::catalog::Event;
use crate::files::output::Extent;
use crate::frame::origin::{Author, Origin};
use fastps_core::frame::Identity;
use fastps_core::record::Record;
use fastps_core::slice::Standing;
use fastps_core::tensor::SliceId;

pub(super) const KIND_SEGMENT: u8 = 1;
pub(super) const KIND_PUSH: u8 = 2;
pub(super) const KIND_FENCE: u8 = 3;
pub(super) const KIND_EVENT: u8 = 4;
pub(super) const KIND_DURABLE: u8 = 5;
pub(super) const KIND_END: u8 = 6;
pub(super) const KIND_SLICE: u8 = 7;

pub(super) const FLAG_ROWS: u8 = 1;
pub(super) const FLAG_BASE: u8 = 2;
pub(super) const FLAG_OWN: u8 = 4;
pub(super) const FLAG_ONCE: u8 = 8;
pub(super) const FLAG_HOGWILD: u8 = 16;
pub(super) const FLAG_SHARED: u8 = 32;
pub(super) const KNOWN_FLAGS: u8 = 63;

/// Encodes an unknown staleness.
pub(super) const UNKNOWN_STALENESS: u64 = u64::MAX;

/// The content of a frame.
#[derive(Debug)]
pub(crate) enum Content<'a> {
    /// The first frame of a log segment.
    Segment {
        format: u32,
        number: u64,
        after_gap: bool,
        origin: Origin,
        author: Author,
    },
    Push(Record<'a>),
    Fence(SliceId, Identity),
    Event(Event),
    /// All bytes before this offset were durable when this frame was written.
    Durable(u64),
    /// The last frame of a segment: the log continues in the segment of this number.
    End(u64),
    Slice(SliceEntry),
}

/// A slice in a snapshot: the extents of its arrays, and the rest of its state.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SliceEntry {
    pub(crate) slice: u64,
    pub(crate) values: Extent,
    pub(crate) state: Extent,
    pub(crate) standing: Standing,
}
