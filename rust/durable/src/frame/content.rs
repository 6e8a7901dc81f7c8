//! The contents of a frame, and the numbers that encode them.

use crate::catalog::Event;
use crate::files::output::Extent;
use crate::frame::origin::{Author, Origin};
use fastps_core::frame::Identity;
use fastps_core::program::{Command, Program};
use fastps_core::record::{Record, SumRecord};
use fastps_core::slice::{Standing, VectorsStanding};
use fastps_core::tensor::{SliceId, Space, SpaceId};
use std::sync::Arc;

pub(super) const KIND_SEGMENT: u8 = 1;
pub(super) const KIND_PUSH: u8 = 2;
pub(super) const KIND_FENCE: u8 = 3;
pub(super) const KIND_EVENT: u8 = 4;
pub(super) const KIND_DURABLE: u8 = 5;
pub(super) const KIND_END: u8 = 6;
pub(super) const KIND_SLICE: u8 = 7;
pub(super) const KIND_PROGRAM: u8 = 8;
pub(super) const KIND_SPACE: u8 = 9;
pub(super) const KIND_VECTORS: u8 = 10;
pub(super) const KIND_ARRAY: u8 = 11;
pub(super) const KIND_TIME: u8 = 14;
pub(super) const KIND_MARK: u8 = 15;

pub(super) const FLAG_ROWS: u8 = 1;
pub(super) const FLAG_BASE: u8 = 2;
pub(super) const FLAG_OWN: u8 = 4;
pub(super) const FLAG_ONCE: u8 = 8;
pub(super) const FLAG_HOGWILD: u8 = 16;
pub(super) const FLAG_SHARED: u8 = 32;
pub(super) const FLAG_BETA1: u8 = 64;
/// A second byte of flags follows, before the body.
pub(super) const FLAG_MORE: u8 = 128;
pub(super) const MORE_NOTE: u8 = 1;
pub(super) const MORE_ACKNOWLEDGED: u8 = 2;

/// The client that no client is.
pub(super) const NOBODY: u64 = 0;

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
    Program(RanProgram<'a>),
    SpaceOpened(SliceId, Arc<Space>),
    SpaceClosed(SliceId, SpaceId),
    Vectors(VectorsEntry),
    /// The values of a vector.
    Array(&'a [u8]),
    /// All frames before this one were written before this time, in milliseconds since 1970.
    Time(u64),
    Mark(Mark<'a>),
}

/// A moment of all shards that a user has named: all frames before this one belong to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark<'a> {
    /// The same on every shard.
    pub(crate) id: u64,
    pub(crate) name: &'a str,
}

/// A program that a slice has run.
#[derive(Clone, Debug)]
pub(crate) struct RanProgram<'a> {
    pub(crate) slice: SliceId,
    pub(crate) version: u64,
    pub(crate) command: Command,
    pub(crate) program: Program,
    pub(crate) sum: Option<SumRecord<'a>>,
}

/// A slice in a snapshot: the extents of its arrays, and the rest of its state.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SliceEntry {
    pub(crate) slice: u64,
    pub(crate) values: Extent,
    pub(crate) state: Extent,
    pub(crate) standing: Standing,
}

/// The space of a slice in a snapshot, after the slice's entry; the arrays of its vectors follow.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VectorsEntry {
    pub(crate) slice: u64,
    pub(crate) space: Arc<Space>,
    pub(crate) standing: VectorsStanding,
}
