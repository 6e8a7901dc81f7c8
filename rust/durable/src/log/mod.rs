//! The log of one shard: changes are queued, and a thread writes all that waits at once. Who wants to know that something
//! is durable is told by that thread; nobody else waits for the disk.
//!
//! When a write or a sync fails, the file is given up for good. The log then has a hole, which a snapshot
//! closes: until then nothing counts as durable.

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
use crate::log::queue::{ENOUGH, Phase, Position, Queue, Then, Waiting};
use crate::log::segment::Segment;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The queue before a log.
pub(crate) struct Log {
    queue: Mutex<Queue>,
    /// There is something to do for the thread.
    work: Condvar,
    /// Something is durable, or never will be.
    done: Condvar,
}

impl Log {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { queue: Mutex::default(), work: Condvar::new(), done: Condvar::new() })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to log; gives what the writing thread runs.
    pub(crate) fn open(
        self: &Arc<Self>,
        catalog: Catalog,
        segment: Segment,
    ) -> impl FnOnce() + Send + 'static {
        let mut queue = self.queue();
        (queue.phase, queue.catalog) = (Phase::Open, catalog);
        drop(queue);
        let log = self.clone();
        move || log.write(segment)
    }

    pub(crate) fn catalog(&self) -> Catalog {
        self.queue().catalog.clone()
    }

    /// Bytes of the slices in it.
    pub(crate) fn catalog_bytes(&self) -> u64 {
        self.queue().catalog.bytes()
    }

    /// Queues what `write` appends. Without a file to write to it is left out, and leaves a hole.
    pub(crate) fn append(&self, write: impl FnOnce(&mut Vec<u8>) -> bool) {
        if self.queue().append(write) {
            self.work.notify_one();
        }
    }

    /// Changes the catalog, and queues that.
    pub(crate) fn note(&self, event: &Event) -> Position {
        let mut queue = self.queue();
        queue.catalog.apply(event);
        let wake = queue.append(|to| frame::event(to, event));
        let position = queue.queued;
        drop(queue);
        if wake {
            self.work.notify_one();
        }
        position
    }

    /// Who logs has nothing else to do just now, so the thread takes no core from it.
    pub(crate) fn rest(&self) {
        let mut queue = self.queue();
        if queue.waiting.bytes >= ENOUGH && !queue.ripe {
            queue.ripe = true;
            drop(queue);
            self.work.notify_one();
        }
    }

    /// Where the log is: all that was queued so far lies before it.
    pub(crate) fn position(&self) -> Position {
        self.queue().queued
    }

    /// Fails while nothing that comes can be made durable.
    pub(crate) fn check(&self) -> Result<()> {
        let queue = self.queue();
        let healing =
            || queue.hole.then(|| Error::new(Kind::Unavailable, "a snapshot closes a hole in the log"));
        match queue.broken.clone().or_else(healing) {
            None => Ok(()),
            Some(why) => Err(Error::new(
                Kind::Unavailable,
                format!("the log cannot be written, so nothing new can be made durable: {}", why.message),
            )
            .retry_after_ms(1000)),
        }
    }

    /// Calls `then` when all before `position` is durable: now, or from the writing thread, in the order of asking.
    pub(crate) fn when_durable(&self, position: Position, then: Then) {
        let mut queue = self.queue();
        if queue.durable >= position || fault("fsync_skipped") {
            drop(queue);
            return then();
        }
        queue.until_durable.push_back((position, then));
        drop(queue);
        self.work.notify_one();
    }

    /// Waits until all before `position` is durable; fails when the log breaks first.
    pub(crate) fn sync(&self, position: Position) -> Result<()> {
        let (told, heard) = std::sync::mpsc::channel();
        let then = move || {
            let _ = told.send(());
        };
        self.when_durable(position, Box::new(then));
        let mut queue = self.queue();
        loop {
            if heard.try_recv().is_ok() {
                return Ok(());
            }
            if let Some(error) = &queue.broken {
                return Err(error.clone());
            }
            if queue.hole || queue.is_closing() {
                return Err(Error::new(Kind::Unavailable, "the log has a hole, or is closed"));
            }
            queue = self.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Bytes that were queued and are not durable, of which some may be written.
    pub(crate) fn pending(&self) -> u64 {
        let queue = self.queue();
        queue.queued.saturating_sub(queue.durable)
    }

    /// How often the log was made durable.
    pub(crate) fn syncs(&self) -> u64 {
        self.queue().syncs
    }

    /// The segment that was synced last, and how much of it is durable.
    pub(crate) fn synced(&self) -> (u64, u64) {
        self.queue().synced
    }

    /// Whether more should wait for [`Log::when_room`].
    pub(crate) fn is_full(&self) -> bool {
        self.queue().is_full()
    }

    /// Calls `then` when the queue is short again.
    pub(crate) fn when_room(&self, then: Then) {
        let mut queue = self.queue();
        if !queue.is_full() {
            drop(queue);
            return then();
        }
        queue.until_room.push(then);
    }

    /// From here on the log is in another segment, which says whether it comes after a hole; the catalog at this point. Fails
    /// if there is a hole and the segment does not say so.
    pub(crate) fn switch(&self, segment: Segment, after_hole: bool) -> Result<Catalog> {
        let mut queue = self.queue();
        if !after_hole && let Some(why) = &queue.broken {
            return Err(why.clone());
        }
        if queue.broken.take().is_some() {
            // What waits was queued behind the hole, too.
            queue.waiting = Waiting::default();
            queue.hole = true;
        }
        queue.next = Some((queue.waiting.pieces.len(), segment));
        // Who waits for all that was queued waits for this: until then the segment before is not done with.
        queue.queued += 1;
        let catalog = queue.catalog.clone();
        drop(queue);
        self.work.notify_one();
        Ok(catalog)
    }

    /// The files are not this log's any more: nothing that comes can be made durable, until a snapshot makes up for it.
    pub(crate) fn give_up(&self, why: &Error) {
        let mut queue = self.queue();
        queue.break_off(why.clone());
        drop(queue);
        self.done.notify_all();
    }

    /// A snapshot that is behind every hole is durable.
    pub(crate) fn heal(&self) {
        let mut queue = self.queue();
        if queue.broken.is_none() && std::mem::take(&mut queue.hole) {
            let durable = queue.written;
            self.tell(queue, durable);
            self.work.notify_one();
        }
    }

    /// Writes what waits and ends the thread.
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
