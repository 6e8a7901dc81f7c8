//! The thread that writes what waits.

use crate::log::Log;
use crate::log::queue::{Group, Hurry, PIECE, Position, Queue, SPARE};
use crate::log::segment::{SHORT, Segment};
use fastps_core::error::Result;
use fastps_core::fault::fault;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long what nobody waits for may wait to be written together with what comes behind it: each time that the
/// thread begins, it takes a core from somebody.
const LINGER: Duration = Duration::from_millis(5);

/// How long something may be written and not durable if nobody asks, and how much: what takes longer to sync than the queue
/// to fill would keep pushes waiting.
const LAZY: Duration = Duration::from_secs(1);
const MOST_LAZY: u64 = 8 << 20;

fn linger() -> Duration {
    // With this fault a killed process is to lose what a power cut would.
    if fault("fsync_skipped") { LAZY } else { LINGER }
}

impl Log {
    /// What the thread does.
    pub(super) fn write(&self, segment: Segment) {
        let mut writer = Writer { segment, unsynced: 0, synced: Instant::now(), syncs: 0 };
        while let Some(mut queue) = self.wait(&mut writer) {
            let group = queue.take();
            drop(queue);
            let end = group.end;
            let result = writer.write(group, |piece| self.written(piece));
            if result.is_ok() && !writer.segment.tells_slowly() && self.queue().waiting.bytes == 0 {
                // Otherwise what comes next says it, or this thread when nothing comes.
                writer.segment.tell();
            }
            self.note_written(&writer, end, result);
            self.make_room();
        }
        writer.segment.tell();
        writer.segment.trim();
    }

    /// What became of a group that ends there.
    fn note_written(&self, writer: &Writer, end: Position, result: Result<()>) {
        let mut queue = self.queue();
        (queue.syncs, queue.taken) = (writer.syncs, 0);
        match result {
            Err(error) => {
                queue.break_off(error);
                self.done.notify_all();
            }
            Ok(()) if writer.unsynced == 0 && queue.broken.is_none() => {
                queue.written = end;
                queue.synced = (writer.segment.number, writer.segment.durable());
                if !queue.hole {
                    self.tell(queue, end);
                }
            }
            Ok(()) => {}
        }
    }

    /// The memory of a piece that is written is free again.
    pub(super) fn written(&self, mut piece: Vec<u8>) {
        let mut queue = self.queue();
        queue.taken = queue.taken.saturating_sub(piece.len());
        if queue.spare.len() < SPARE && piece.capacity() <= 2 * PIECE {
            piece.clear();
            queue.spare.push(piece);
        }
        drop(queue);
        self.make_room();
    }

    /// Calls those who wait for room, if there is some.
    fn make_room(&self) {
        let mut queue = self.queue();
        let waiting = if queue.is_full() { Vec::new() } else { std::mem::take(&mut queue.until_room) };
        drop(queue);
        for then in waiting {
            then();
        }
    }

    /// Waits until there is something to write or to sync; `None`: all is done, for good. Where nothing comes for a while, memory is
    /// given back.
    fn wait(&self, writer: &mut Writer) -> Option<MutexGuard<'_, Queue>> {
        let (begin, mut queue) = (Instant::now(), self.queue());
        loop {
            let asked = writer.unsynced > 0 && !queue.hole && !queue.until_durable.is_empty();
            if queue.is_urgent() || asked {
                return Some(queue);
            }
            if queue.is_closing() {
                return (writer.unsynced > 0).then_some(queue);
            }
            let lingers = linger().saturating_sub(begin.elapsed());
            if lingers.is_zero() && queue.waiting.bytes > 0 {
                return Some(queue);
            }
            let since = if writer.unsynced > 0 { writer.synced.elapsed() } else { Duration::ZERO };
            let left = LAZY.saturating_sub(since);
            if left.is_zero() {
                return Some(queue);
            }
            if lingers.is_zero() && writer.segment.has_news() {
                drop(queue);
                writer.segment.tell();
                queue = self.queue();
                continue;
            }
            queue.asleep = lingers.is_zero();
            let pause = if queue.asleep { left } else { left.min(lingers) };
            let waited = self.work.wait_timeout(queue, pause).unwrap_or_else(PoisonError::into_inner);
            queue = waited.0;
            let slept = std::mem::take(&mut queue.asleep);
            if slept && waited.1.timed_out() && writer.unsynced == 0 && queue.waiting.bytes == 0 {
                queue.spare = Vec::new();
                writer.segment.rest();
            }
        }
    }

    /// All before `durable` is.
    pub(super) fn tell(&self, mut queue: MutexGuard<'_, Queue>, durable: Position) {
        queue.durable = queue.durable.max(durable);
        let durable = queue.durable;
        let due = queue.until_durable.iter().take_while(|(position, _)| *position <= durable).count();
        let due: Vec<_> = queue.until_durable.drain(..due).collect();
        drop(queue);
        for (_, then) in due {
            then();
        }
        // Whoever waits looks under the lock, so that it cannot miss this.
        let _queue = self.queue();
        self.done.notify_all();
    }
}

/// The files, as the thread has them.
struct Writer {
    segment: Segment,
    /// Bytes that are written and not durable.
    unsynced: u64,
    synced: Instant,
    syncs: u64,
}

impl Writer {
    /// `written` gets each piece that needs its memory no more.
    fn write(&mut self, mut group: Group, mut written: impl FnMut(Vec<u8>)) -> Result<()> {
        if let Some((at, next)) = group.next {
            // A file that failed gets no end: the log does not go on from there.
            self.unsynced = 0;
            let number = next.number;
            let mut before = std::mem::replace(&mut self.segment, next);
            if !group.broken {
                for mut piece in group.pieces.drain(..at) {
                    if !group.hole {
                        before.append(&mut piece)?;
                    }
                    written(piece);
                }
                if !group.hole {
                    before.end(&mut [], number)?;
                }
            }
        }
        if group.broken {
            self.unsynced = 0;
            return Ok(());
        }
        // What fails is given up: it is not synced later, as if it were good.
        let unsynced = std::mem::take(&mut self.unsynced);
        let length: usize = group.pieces.iter().map(Vec::len).sum();
        for mut piece in group.pieces {
            if !piece.is_empty() {
                self.segment.append(&mut piece)?;
            }
            written(piece);
        }
        let unsynced = unsynced + length as u64;
        let late = unsynced >= MOST_LAZY || self.synced.elapsed() >= LAZY;
        if unsynced > 0 && (group.hurry.is_some() || late) {
            if group.hurry == Some(Hurry::WaitedFor) && length <= SHORT {
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
