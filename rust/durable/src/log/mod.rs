//! The log of one shard. Callers append frames to a queue; one thread writes all queued frames at once and
//! notifies durability waiters. No other thread blocks on the disk.
//!
//! When a write or a sync fails, the segment is abandoned. The log then has a gap, and nothing counts as
//! durable until a snapshot closes it.

mod direct_io;
mod queue;
pub(crate) mod read;
mod read_ahead;
pub(crate) mod scan;
pub(crate) mod segment;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod writer;

use crate::catalog::{Catalog, Event};
use crate::frame;
pub(crate) use crate::log::queue::STAMP_INTERVAL;
use crate::log::queue::{Callback, IDLE_WRITE_BYTES, PendingFrames, Phase, Position, Queue, Stamps};
use crate::log::segment::Segment;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// The queue of the log, shared by the callers and the writing thread.
pub(crate) struct Log {
    queue: Mutex<Queue>,
    /// Wakes the writing thread.
    work: Condvar,
    /// Signals that something became durable or never will.
    done: Condvar,
    /// The position at which `alarmed` is called, once.
    alarm: AtomicU64,
    alarmed: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Log {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
            alarm: AtomicU64::new(Position::MAX),
            alarmed: OnceLock::new(),
        })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the queue of a shard with this memory limit; with `stamps` it notes when frames come. Returns the function that the writing thread runs.
    pub(crate) fn open(
        self: &Arc<Self>,
        catalog: Catalog,
        segment: Segment,
        memory_limit: u64,
        stamps: bool,
    ) -> impl FnOnce() + Send + 'static {
        let mut queue = self.queue();
        (queue.phase, queue.catalog, queue.most) = (Phase::Open, catalog, Queue::most_for(memory_limit));
        queue.stamps = if stamps { Stamps::Due } else { Stamps::Off };
        if segment.durable() > 0 {
            queue.synced = (segment.number, segment.durable());
        }
        drop(queue);
        let log = self.clone();
        move || log.run(segment)
    }

    pub(crate) fn catalog(&self) -> Catalog {
        self.queue().catalog.clone()
    }

    /// Bytes of the slices in the catalog.
    pub(crate) fn catalog_bytes(&self) -> u64 {
        self.queue().catalog.bytes()
    }

    /// Queues the frames that `write` appends. Without a usable segment they are dropped, which leaves a gap.
    pub(crate) fn append(&self, write: impl FnOnce(&mut Vec<u8>) -> bool) {
        let mut queue = self.queue();
        let wake = queue.append(write);
        let position = queue.queued;
        drop(queue);
        if wake {
            self.work.notify_one();
        }
        self.check_alarm(position);
    }

    /// Calls `alarmed` once the log reaches `position`; before that has been called, the position may be
    /// changed.
    pub(crate) fn alarm_at(&self, position: Position) {
        self.alarm.store(position, Ordering::Release);
        self.check_alarm(self.position());
    }

    /// Sets what alarms call: it must not block.
    pub(crate) fn on_alarm(&self, alarmed: impl Fn() + Send + Sync + 'static) {
        let _ = self.alarmed.set(Box::new(alarmed));
    }

    fn check_alarm(&self, position: Position) {
        if position >= self.alarm.load(Ordering::Acquire)
            && self.alarm.swap(Position::MAX, Ordering::AcqRel) != Position::MAX
            && let Some(alarmed) = self.alarmed.get()
        {
            alarmed();
        }
    }

    /// Applies an event to the catalog and queues it.
    pub(crate) fn note(&self, event: &Event) -> Position {
        let mut queue = self.queue();
        queue.catalog.apply(event);
        let wake = queue.append(|to| frame::event(to, event));
        let position = queue.queued;
        drop(queue);
        if wake {
            self.work.notify_one();
        }
        self.check_alarm(position);
        position
    }

    /// The caller is idle for now, so the writing thread can run without taking its core.
    pub(crate) fn rest(&self) {
        let mut queue = self.queue();
        if queue.pending.bytes >= IDLE_WRITE_BYTES && !queue.idle_write {
            queue.idle_write = true;
            drop(queue);
            self.work.notify_one();
        }
    }

    /// The position after everything queued so far.
    pub(crate) fn position(&self) -> Position {
        self.queue().queued
    }

    /// Fails while new records cannot become durable.
    pub(crate) fn check(&self) -> Result<()> {
        let queue = self.queue();
        let healing = || {
            queue.gap.then(|| {
                Error::new(Kind::Unavailable, "the log has a gap until the next snapshot is complete")
            })
        };
        match queue.broken.clone().or_else(healing) {
            None => Ok(()),
            Some(why) => Err(Error::new(
                Kind::Unavailable,
                format!("the log cannot be written, so new changes cannot become durable: {}", why.message),
            )
            .retry_after_ms(1000)),
        }
    }

    /// Why the log broke since the last call, even if a snapshot that was being written has repaired it.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.queue().failure.take()
    }

    /// Calls `then` once everything before `position` is durable: immediately, or on the writing thread, in
    /// order.
    pub(crate) fn when_durable(&self, position: Position, then: Callback) {
        let mut queue = self.queue();
        if queue.durable >= position || fault("fsync_skipped") {
            drop(queue);
            return then();
        }
        queue.durability_waiters.push_back((position, then));
        drop(queue);
        self.work.notify_one();
    }

    /// Blocks until everything before `position` is durable. Fails if the log breaks first.
    pub(crate) fn sync(&self, position: Position) -> Result<()> {
        let (sender, receiver) = std::sync::mpsc::channel();
        let then = move || {
            let _ = sender.send(());
        };
        self.when_durable(position, Box::new(then));
        let mut queue = self.queue();
        loop {
            if receiver.try_recv().is_ok() {
                return Ok(());
            }
            if let Some(error) = &queue.broken {
                return Err(error.clone());
            }
            if queue.gap || queue.is_closing() {
                return Err(Error::new(Kind::Unavailable, "the log has a gap, or is closed"));
            }
            queue = self.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Bytes that were queued but are not durable; some may be written.
    pub(crate) fn pending_bytes(&self) -> u64 {
        let queue = self.queue();
        queue.queued.saturating_sub(queue.durable)
    }

    /// Number of syncs so far.
    pub(crate) fn syncs(&self) -> u64 {
        self.queue().syncs
    }

    /// The last synced segment, and how many of its bytes are durable.
    pub(crate) fn synced(&self) -> (u64, u64) {
        self.queue().synced
    }

    /// The same, and the position of the log there.
    pub(crate) fn synced_position(&self) -> (Position, (u64, u64)) {
        let queue = self.queue();
        (queue.written, queue.synced)
    }

    /// Returns whether callers should wait for [`Log::when_room`].
    pub(crate) fn is_full(&self) -> bool {
        self.queue().is_full()
    }

    /// Calls `then` once the queue has room.
    pub(crate) fn when_room(&self, then: Callback) {
        let mut queue = self.queue();
        if !queue.is_full() {
            drop(queue);
            return then();
        }
        queue.space_waiters.push(then);
    }

    /// Continues the log in another segment, which records whether it follows a gap. Returns the catalog at
    /// that point. Fails if there is a gap that the segment does not record.
    pub(crate) fn switch(&self, segment: Segment, after_gap: bool) -> Result<Arc<Catalog>> {
        let mut queue = self.queue();
        if !after_gap && let Some(why) = &queue.broken {
            return Err(why.clone());
        }
        if queue.broken.take().is_some() {
            // Pending frames were queued after the gap began.
            queue.pending = PendingFrames::default();
            queue.gap = true;
        }
        queue.next = Some((queue.pending.chunks.len(), segment));
        queue.stamps.renew();
        // Durability waiters must also wait for the switch: the previous segment is not complete before it.
        queue.queued += 1;
        let catalog = Arc::new(queue.catalog.clone());
        drop(queue);
        self.work.notify_one();
        Ok(catalog)
    }

    /// The segment cannot be used: nothing becomes durable until a snapshot closes the gap.
    pub(crate) fn give_up(&self, why: &Error) {
        let mut queue = self.queue();
        queue.mark_broken(why.clone());
        drop(queue);
        self.done.notify_all();
    }

    /// Called when a snapshot that follows every gap is durable.
    pub(crate) fn close_gap(&self) {
        let mut queue = self.queue();
        // The writing thread must see the gap when it leaves the unusable segment: it would end it otherwise.
        while queue.next.is_some() && queue.broken.is_none() && !queue.is_closing() {
            queue = self.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        if queue.broken.is_none() && std::mem::take(&mut queue.gap) {
            let durable = queue.written;
            self.notify_durable(queue, durable);
            self.work.notify_one();
        }
    }

    /// Writes the pending frames and ends the thread.
    pub(crate) fn close(&self) {
        let mut queue = self.queue();
        queue.phase = Phase::Closing;
        drop(queue);
        self.work.notify_one();
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = self.queue();
        f.debug_struct("Log")
            .field("queued", &queue.queued)
            .field("durable", &queue.durable)
            .finish_non_exhaustive()
    }
}
