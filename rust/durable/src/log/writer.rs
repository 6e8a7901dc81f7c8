//! The thread that writes and syncs queued frames and notifies waiters.

use crate::log::Log;
use crate::log::queue::{Batch, CHUNK_BYTES, MAX_SPARE_CHUNKS, Position, Queue, SyncReason};
use crate::log::segment::{MAX_SHORT_APPEND_BYTES, Segment};
use fastps_core::error::Result;
use fastps_core::fault::fault;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum time that frames wait for more frames when no one waits for durability: each wake-up of the thread
/// takes a core from other work.
const MAX_WRITE_DELAY: Duration = Duration::from_millis(5);

/// Maximum time and number of bytes that written frames stay unsynced when no one waits for durability. A
/// sync that takes longer than the queue needs to fill would block pushes.
const MAX_SYNC_DELAY: Duration = Duration::from_secs(1);
const MAX_UNSYNCED_BYTES: u64 = 8 << 20;

fn max_write_delay() -> Duration {
    // With this fault, a killed process must lose what a power cut would.
    if fault("fsync_skipped") { MAX_SYNC_DELAY } else { MAX_WRITE_DELAY }
}

impl Log {
    /// The body of the writing thread.
    pub(super) fn run(&self, segment: Segment) {
        let mut writer = Writer { segment, usable: true, unsynced: 0, synced: Instant::now(), syncs: 0 };
        while let Some(mut queue) = self.wait(&mut writer) {
            let batch = queue.take();
            drop(queue);
            if batch.next.is_some() {
                self.done.notify_all();
            }
            let end = batch.end;
            let result = writer.write(batch, |chunk| self.recycle(chunk));
            if result.is_ok() && !writer.segment.last_append_was_direct() && self.queue().pending.bytes == 0 {
                // Otherwise the next append records the sync, or this thread does when idle.
                writer.mark();
            }
            self.finish_batch(&writer, end, result);
            self.notify_space();
        }
        writer.mark();
        writer.segment.trim();
    }

    /// Records the result of a batch that ends at `end`.
    fn finish_batch(&self, writer: &Writer, end: Position, result: Result<()>) {
        let mut queue = self.queue();
        (queue.syncs, queue.in_flight) = (writer.syncs, 0);
        match result {
            Err(error) => {
                queue.mark_broken(error);
                self.done.notify_all();
            }
            Ok(()) if writer.unsynced == 0 && queue.broken.is_none() => {
                queue.written = end;
                queue.synced = (writer.segment.number, writer.segment.durable());
                if !queue.gap {
                    self.notify_durable(queue, end);
                }
            }
            Ok(()) => {}
        }
    }

    /// Frees or keeps the memory of a written chunk.
    pub(super) fn recycle(&self, mut chunk: Vec<u8>) {
        let mut queue = self.queue();
        queue.in_flight = queue.in_flight.saturating_sub(chunk.len());
        if queue.spare.len() < MAX_SPARE_CHUNKS && chunk.capacity() <= 2 * CHUNK_BYTES {
            chunk.clear();
            queue.spare.push(chunk);
        }
        drop(queue);
        self.notify_space();
    }

    /// Calls the waiters for space if the queue has some.
    fn notify_space(&self) {
        let mut queue = self.queue();
        let waiters = if queue.is_full() { Vec::new() } else { std::mem::take(&mut queue.space_waiters) };
        drop(queue);
        for then in waiters {
            then();
        }
    }

    /// Waits for something to write or sync. `None`: the log is closed and everything is written. Frees
    /// memory when idle.
    fn wait(&self, writer: &mut Writer) -> Option<MutexGuard<'_, Queue>> {
        let (begin, mut queue) = (Instant::now(), self.queue());
        loop {
            let asked = writer.unsynced > 0 && !queue.gap && !queue.durability_waiters.is_empty();
            if queue.is_urgent() || asked {
                return Some(queue);
            }
            if queue.is_closing() {
                return (writer.unsynced > 0).then_some(queue);
            }
            let delay_left = max_write_delay().saturating_sub(begin.elapsed());
            if delay_left.is_zero() && queue.pending.bytes > 0 {
                return Some(queue);
            }
            let since = if writer.unsynced > 0 { writer.synced.elapsed() } else { Duration::ZERO };
            let left = MAX_SYNC_DELAY.saturating_sub(since);
            if left.is_zero() {
                return Some(queue);
            }
            if delay_left.is_zero() && writer.usable && writer.segment.has_unmarked_sync() {
                drop(queue);
                writer.mark();
                queue = self.queue();
                continue;
            }
            queue.asleep = delay_left.is_zero();
            let pause = if queue.asleep { left } else { left.min(delay_left) };
            let waited = self.work.wait_timeout(queue, pause).unwrap_or_else(PoisonError::into_inner);
            queue = waited.0;
            let slept = std::mem::take(&mut queue.asleep);
            if slept && waited.1.timed_out() && writer.unsynced == 0 && queue.pending.bytes == 0 {
                queue.spare = Vec::new();
                writer.segment.free_buffers();
            }
        }
    }

    /// Everything before `durable` is durable: calls the waiters.
    pub(super) fn notify_durable(&self, mut queue: MutexGuard<'_, Queue>, durable: Position) {
        queue.durable = queue.durable.max(durable);
        let durable = queue.durable;
        let due = queue.durability_waiters.iter().take_while(|(position, _)| *position <= durable).count();
        let due: Vec<_> = queue.durability_waiters.drain(..due).collect();
        drop(queue);
        for (_, then) in due {
            then();
        }
        // Threads in `sync` check under the lock, so they cannot miss the notification.
        let _queue = self.queue();
        self.done.notify_all();
    }
}

/// The state of the writing thread.
struct Writer {
    segment: Segment,
    /// Set if the segment continues the log, or records that it follows a gap. Otherwise nothing is written
    /// to it: a start would find records after a segment without an end.
    usable: bool,
    /// Bytes written but not synced.
    unsynced: u64,
    synced: Instant,
    syncs: u64,
}

impl Writer {
    /// Records the last sync in the segment.
    fn mark(&mut self) {
        if self.usable {
            self.segment.write_durable_mark();
        }
    }

    /// Writes a batch. `written` receives each chunk once its content is written.
    fn write(&mut self, batch: Batch, written: impl FnMut(Vec<u8>)) -> Result<()> {
        let (switches, broken) = (batch.next.is_some(), batch.broken);
        let result = self.try_write(batch, written);
        self.usable = result.is_ok() && !broken && (self.usable || switches);
        result
    }

    fn try_write(&mut self, mut batch: Batch, mut written: impl FnMut(Vec<u8>)) -> Result<()> {
        if let Some((at, next)) = batch.next {
            // A broken segment gets no end frame: the log does not continue from it.
            self.unsynced = 0;
            let number = next.number;
            let mut before = std::mem::replace(&mut self.segment, next);
            if !batch.broken {
                for mut chunk in batch.chunks.drain(..at) {
                    if !batch.gap {
                        before.append(&mut chunk)?;
                    }
                    written(chunk);
                }
                if !batch.gap {
                    before.end(&mut [], number)?;
                }
            }
        }
        if batch.broken {
            self.unsynced = 0;
            return Ok(());
        }
        // A failed write is abandoned: a later sync must not report it as durable.
        let unsynced = std::mem::take(&mut self.unsynced);
        let length: usize = batch.chunks.iter().map(Vec::len).sum();
        for mut chunk in batch.chunks {
            if !chunk.is_empty() {
                self.segment.append(&mut chunk)?;
            }
            written(chunk);
        }
        let unsynced = unsynced + length as u64;
        let late = unsynced >= MAX_UNSYNCED_BYTES || self.synced.elapsed() >= MAX_SYNC_DELAY;
        if unsynced > 0 && (batch.sync_reason.is_some() || late) {
            if batch.sync_reason == Some(SyncReason::Awaited) && length <= MAX_SHORT_APPEND_BYTES {
                self.segment.fill_ahead(length);
            }
            self.segment.sync()?;
            self.synced = Instant::now();
            self.syncs += 1;
        } else {
            self.unsynced = unsynced;
        }
        Ok(())
    }
}
