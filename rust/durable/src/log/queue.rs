//! What waits to be written.

use crate::catalog::Catalog;
use crate::log::segment::Segment;
use fastps_core::error::{Error, Kind};
use std::collections::VecDeque;

/// Bytes that are not written from which on who can should wait. So much can be pushed while the disk is busy with others.
pub(super) const FULL: usize = 48 << 20;
/// They wait in pieces, whose memory is free again as soon as each is written; one that has so much is begun no more.
pub(super) const PIECE: usize = 3 << 20;
/// Pieces whose memory is kept, since new memory costs time.
pub(super) const SPARE: usize = 2;

/// With enough waiting the thread begins when those who log rest, and with much at any time.
pub(super) const ENOUGH: usize = 2 << 20;
pub(super) const MUCH: usize = 4 << 20;

/// A point of the log: bytes ever queued.
pub(crate) type Position = u64;

/// Called once.
pub(crate) type Then = Box<dyn FnOnce() + Send>;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nothing is logged yet: a shard is recovered.
    #[default]
    Before,
    Open,
    /// Nothing more is.
    Closing,
}

/// Frames that wait to be written.
#[derive(Default)]
pub(super) struct Waiting {
    pub(super) pieces: VecDeque<Vec<u8>>,
    pub(super) bytes: usize,
}

#[derive(Default)]
pub(super) struct Queue {
    pub(super) phase: Phase,
    pub(super) waiting: Waiting,
    /// Bytes that the thread has taken and not written.
    pub(super) taken: usize,
    pub(super) spare: Vec<Vec<u8>>,
    /// The thread has found nothing to do for a while, and must be woken.
    pub(super) asleep: bool,
    /// What waits is enough, and who logs rests.
    pub(super) ripe: bool,
    /// From this piece of `waiting` on, the segment to be used.
    pub(super) next: Option<(usize, Segment)>,
    pub(super) queued: Position,
    pub(super) durable: Position,
    pub(super) written: Position,
    /// The segment that was synced last, and how much of it is durable.
    pub(super) synced: (u64, u64),
    pub(super) syncs: u64,
    pub(super) until_durable: VecDeque<(Position, Then)>,
    pub(super) until_room: Vec<Then>,
    /// Why the present segment cannot be used any more.
    pub(super) broken: Option<Error>,
    /// Records are missing that no snapshot makes up for yet.
    pub(super) hole: bool,
    pub(super) catalog: Catalog,
}

impl Waiting {
    /// Where frames are appended: to a new piece where those from `begins` on have none yet, or the last one is long.
    fn last(&mut self, begins: usize, new: impl FnOnce() -> Vec<u8>) -> &mut Vec<u8> {
        match self.pieces.pop_back_if(|piece| piece.len() < PIECE) {
            Some(piece) if self.pieces.len() >= begins => self.pieces.push_back(piece),
            full => self.pieces.extend(full.into_iter().chain([new()])),
        }
        let last = self.pieces.len() - 1;
        &mut self.pieces[last]
    }
}

impl Queue {
    pub(super) fn is_closing(&self) -> bool {
        self.phase == Phase::Closing
    }

    /// Whether what waits is written at once.
    pub(super) fn is_urgent(&self) -> bool {
        let waited_for =
            self.is_closing() || !self.until_durable.is_empty() || self.ripe || self.waiting.bytes >= MUCH;
        self.next.is_some() || waited_for && self.waiting.bytes > 0
    }

    pub(super) fn is_full(&self) -> bool {
        self.waiting.bytes + self.taken >= FULL
    }

    /// All that waits, for the thread to write.
    pub(super) fn take(&mut self) -> Group {
        let waiting = std::mem::take(&mut self.waiting);
        (self.ripe, self.taken) = (false, waiting.bytes);
        Group {
            pieces: waiting.pieces,
            end: self.queued,
            next: self.next.take(),
            broken: self.broken.is_some(),
            hole: self.hole,
            hurry: Hurry::of(self),
        }
    }

    /// The present segment cannot be used any more.
    pub(super) fn break_off(&mut self, why: Error) {
        self.broken = Some(why);
        self.waiting = Waiting::default();
    }

    /// Tells whether the thread must be woken.
    pub(super) fn append(&mut self, write: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        if self.phase != Phase::Open {
            return false;
        }
        let before = self.waiting.bytes;
        // A segment begins with a piece.
        let begins = self.next.as_ref().map_or(0, |(at, _)| *at);
        let piece = self.waiting.last(begins, || self.spare.pop().unwrap_or_default());
        let length = piece.len();
        let fits = write(piece);
        let appended = piece.len() - length;
        self.waiting.bytes += appended;
        // Whoever logs is at work again, and rests again soon.
        self.ripe = false;
        self.queued += appended.max(1) as u64;
        if !fits {
            self.broken = Some(Error::new(Kind::Capacity, "a change is too long for the log"));
        }
        if self.broken.is_some() {
            self.waiting = Waiting::default();
        }
        let much = before < MUCH && self.waiting.bytes >= MUCH;
        std::mem::take(&mut self.asleep) || much
    }
}

/// What is written at once.
pub(super) struct Group {
    pub(super) pieces: VecDeque<Vec<u8>>,
    /// Where the log is behind it.
    pub(super) end: Position,
    pub(super) next: Option<(usize, Segment)>,
    pub(super) broken: bool,
    pub(super) hole: bool,
    pub(super) hurry: Option<Hurry>,
}

/// Why what is written is to be durable at once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Hurry {
    WaitedFor,
    Closing,
}

impl Hurry {
    fn of(queue: &Queue) -> Option<Self> {
        if queue.is_closing() {
            return Some(Self::Closing);
        }
        (!queue.until_durable.is_empty()).then_some(Self::WaitedFor)
    }
}
