//! The queue between the callers of the log and its writing thread. Its frames are in chunks, which are freed
//! once written.

use crate::catalog::Catalog;
use crate::frame;
use crate::log::segment::Segment;
use fastps_core::error::{Error, Kind};
use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Back-pressure threshold: above this many unwritten bytes, streams should stop reading. It covers pauses in
/// which the disk serves others. A shard of little memory has a smaller one: a part of its limit.
pub(super) const MAX_QUEUED_BYTES: usize = 48 << 20;
const MIN_QUEUED_BYTES: usize = 2 * EAGER_WRITE_BYTES;
const QUEUED_PART_OF_LIMIT: u64 = 8;
/// A chunk that holds this many bytes takes no further frames.
pub(super) const CHUNK_BYTES: usize = 3 << 20;
/// Maximum number of written chunks kept for reuse: fresh memory is slow to touch.
pub(super) const MAX_SPARE_CHUNKS: usize = 2;

/// Pending bytes that start a write when the callers are idle, and pending bytes that start one at once.
pub(super) const IDLE_WRITE_BYTES: usize = 2 << 20;
pub(super) const EAGER_WRITE_BYTES: usize = 4 << 20;

/// A position in the log: the number of bytes queued before it.
pub(crate) type Position = u64;

/// Time between two stamps in a log that keeps history: how exactly a moment can be named by its time.
pub(crate) const STAMP_INTERVAL: Duration = Duration::from_millis(100);

/// Called once.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// The shard is being recovered; nothing is logged yet.
    #[default]
    Before,
    Open,
    /// No further records are accepted.
    Closing,
}

/// Frames that wait to be written.
#[derive(Default)]
pub(super) struct PendingFrames {
    pub(super) chunks: VecDeque<Vec<u8>>,
    pub(super) bytes: usize,
}

#[derive(Default)]
pub(super) struct Queue {
    pub(super) phase: Phase,
    /// The threshold of this shard.
    pub(super) most: usize,
    pub(super) pending: PendingFrames,
    /// Bytes that the thread has taken but not written.
    pub(super) in_flight: usize,
    pub(super) spare: Vec<Vec<u8>>,
    /// The writing thread is asleep and must be woken.
    pub(super) asleep: bool,
    /// Enough is pending, and the callers are idle.
    pub(super) idle_write: bool,
    /// The next segment, and the first chunk of `pending` that belongs in it.
    pub(super) next: Option<(usize, Segment)>,
    pub(super) queued: Position,
    pub(super) durable: Position,
    pub(super) written: Position,
    /// The last synced segment, and how many of its bytes are durable.
    pub(super) synced: (u64, u64),
    pub(super) syncs: u64,
    pub(super) durability_waiters: VecDeque<(Position, Callback)>,
    pub(super) space_waiters: Vec<Callback>,
    /// Why the current segment is unusable.
    pub(super) broken: Option<Error>,
    /// Why a segment became unusable since somebody last asked.
    pub(super) failure: Option<Error>,
    /// Records are missing that no snapshot covers yet.
    pub(super) gap: bool,
    pub(super) catalog: Catalog,
    pub(super) stamps: Stamps,
}

/// When frames were queued, for a log that keeps history.
#[derive(Default)]
pub(super) enum Stamps {
    #[default]
    Off,
    Due,
    After(Instant),
}

impl Stamps {
    /// The next frame gets a stamp: a segment says itself when it begins.
    pub(super) fn renew(&mut self) {
        if let Self::After(_) = self {
            *self = Self::Due;
        }
    }

    /// Appends the time, if the last stamp is old.
    fn stamp(&mut self, to: &mut Vec<u8>) {
        let now = Instant::now();
        match self {
            Self::Off => return,
            Self::After(last) if now.duration_since(*last) < STAMP_INTERVAL => return,
            Self::Due | Self::After(_) => *self = Self::After(now),
        }
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        frame::time(to, u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    }
}

impl PendingFrames {
    /// The chunk to append to: a new one if the last is full or belongs to the previous segment, which ends
    /// before `begins`.
    fn last(&mut self, begins: usize, new: impl FnOnce() -> Vec<u8>) -> &mut Vec<u8> {
        match self.chunks.pop_back_if(|chunk| chunk.len() < CHUNK_BYTES) {
            Some(chunk) if self.chunks.len() >= begins => self.chunks.push_back(chunk),
            full => self.chunks.extend(full.into_iter().chain([new()])),
        }
        let last = self.chunks.len() - 1;
        &mut self.chunks[last]
    }
}

impl Queue {
    pub(super) fn is_closing(&self) -> bool {
        self.phase == Phase::Closing
    }

    /// Returns whether pending frames must be written now.
    pub(super) fn is_urgent(&self) -> bool {
        let waited_for = self.is_closing()
            || !self.durability_waiters.is_empty()
            || self.idle_write
            || self.pending.bytes >= EAGER_WRITE_BYTES;
        self.next.is_some() || waited_for && self.pending.bytes > 0
    }

    /// The most bytes that may wait on a shard with this memory limit.
    pub(super) fn most_for(memory_limit: u64) -> usize {
        let part = usize::try_from(memory_limit / QUEUED_PART_OF_LIMIT).unwrap_or(usize::MAX);
        part.clamp(MIN_QUEUED_BYTES, MAX_QUEUED_BYTES)
    }

    pub(super) fn is_full(&self) -> bool {
        let waiting = self.pending.bytes + self.in_flight;
        waiting > 0 && waiting >= self.most
    }

    /// Takes all pending frames for the thread to write.
    pub(super) fn take(&mut self) -> Batch {
        let pending = std::mem::take(&mut self.pending);
        (self.idle_write, self.in_flight) = (false, pending.bytes);
        Batch {
            chunks: pending.chunks,
            end: self.queued,
            next: self.next.take(),
            broken: self.broken.is_some(),
            gap: self.gap,
            sync_reason: SyncReason::of(self),
        }
    }

    /// Marks the current segment as unusable.
    pub(super) fn mark_broken(&mut self, why: Error) {
        self.failure = Some(why.clone());
        self.broken = Some(why);
        self.pending = PendingFrames::default();
    }

    /// Returns whether the writing thread must be woken.
    pub(super) fn append(&mut self, write: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        if self.phase != Phase::Open {
            return false;
        }
        let before = self.pending.bytes;
        // A segment begins with a new chunk.
        let begins = self.next.as_ref().map_or(0, |(at, _)| *at);
        let chunk = self.pending.last(begins, || self.spare.pop().unwrap_or_default());
        let length = chunk.len();
        self.stamps.stamp(chunk);
        let fits = write(chunk);
        let appended = chunk.len() - length;
        self.pending.bytes += appended;
        // The callers are busy, and will report when they are idle again.
        self.idle_write = false;
        self.queued += appended.max(1) as u64;
        if !fits {
            self.broken = Some(Error::new(Kind::Capacity, "a change is too long for the log"));
        }
        if self.broken.is_some() {
            self.pending = PendingFrames::default();
        }
        let much = before < EAGER_WRITE_BYTES && self.pending.bytes >= EAGER_WRITE_BYTES;
        std::mem::take(&mut self.asleep) || much
    }
}

/// The frames written by one pass of the thread.
pub(super) struct Batch {
    pub(super) chunks: VecDeque<Vec<u8>>,
    /// The log position after this batch.
    pub(super) end: Position,
    pub(super) next: Option<(usize, Segment)>,
    pub(super) broken: bool,
    pub(super) gap: bool,
    pub(super) sync_reason: Option<SyncReason>,
}

/// Why a batch must be synced at once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SyncReason {
    Awaited,
    Closing,
}

impl SyncReason {
    fn of(queue: &Queue) -> Option<Self> {
        if queue.is_closing() {
            return Some(Self::Closing);
        }
        (!queue.durability_waiters.is_empty()).then_some(Self::Awaited)
    }
}
