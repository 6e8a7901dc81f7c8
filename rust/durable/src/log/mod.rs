//! The log of one shard: changes are queued, and a thread writes all that waits at once. Who wants to know that something
//! is durable is told by that thread; nobody else waits for the disk.
//!
//! When a write or a sync fails, the file is given up for good. The log then has a hole, which a snapshot
//! closes: until then nothing counts as durable.

mod direct_io;
mod read_ahead;
pub(crate) mod segment;

use crate::catalog::{Catalog, Event};
use crate::frame;
use crate::log::segment::{SHORT, Segment};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that are not written from which on who can should wait. So much can be pushed while the disk is busy with others.
const FULL: usize = 48 << 20;
/// They wait in pieces, whose memory is free again as soon as each is written; one that has so much is begun no more.
const PIECE: usize = 3 << 20;
/// Pieces whose memory is kept, since new memory costs time.
const SPARE: usize = 2;
/// How long what nobody waits for may wait to be written together with what comes behind it, and how much: each time that the
/// thread begins, it takes a core from somebody. With enough it begins when those who log rest, and with much at any time.
const LINGER: Duration = Duration::from_millis(5);
const ENOUGH: usize = 2 << 20;
const MUCH: usize = 4 << 20;
/// How long something may be written and not durable if nobody asks, and how much: what takes longer to sync than the queue
/// to fill would keep pushes waiting.
const LAZY: Duration = Duration::from_secs(1);
const MOST_LAZY: u64 = 8 << 20;

fn linger() -> Duration {
    // With this fault a killed process is to lose what a power cut would.
    if fault("fsync_skipped") { LAZY } else { LINGER }
}

/// A point of the log: bytes ever queued.
pub(crate) type Position = u64;

/// Called once.
pub(crate) type Then = Box<dyn FnOnce() + Send>;

/// The queue before a log.
pub(crate) struct Log {
    queue: Mutex<Queue>,
    /// There is something to do for the thread.
    work: Condvar,
    /// Something is durable, or never will be.
    done: Condvar,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// Nothing is logged yet: a shard is recovered.
    #[default]
    Before,
    Open,
    /// Nothing more is.
    Closing,
}

/// Frames that wait to be written.
#[derive(Default)]
struct Waiting {
    pieces: VecDeque<Vec<u8>>,
    bytes: usize,
}

#[derive(Default)]
struct Queue {
    phase: Phase,
    waiting: Waiting,
    /// Bytes that the thread has taken and not written.
    taken: usize,
    spare: Vec<Vec<u8>>,
    /// The thread has found nothing to do for a while, and must be woken.
    asleep: bool,
    /// What waits is enough, and who logs rests.
    ripe: bool,
    /// From this piece of `waiting` on, the segment to be used.
    next: Option<(usize, Segment)>,
    queued: Position,
    durable: Position,
    written: Position,
    /// The segment that was synced last, and how much of it is durable.
    synced: (u64, u64),
    syncs: u64,
    until_durable: VecDeque<(Position, Then)>,
    until_room: Vec<Then>,
    /// Why the present segment cannot be used any more.
    broken: Option<Error>,
    /// Records are missing that no snapshot makes up for yet.
    hole: bool,
    catalog: Catalog,
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

    /// What the thread does.
    fn write(&self, segment: Segment) {
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
    fn written(&self, mut piece: Vec<u8>) {
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
    fn tell(&self, mut queue: MutexGuard<'_, Queue>, durable: Position) {
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
    fn is_closing(&self) -> bool {
        self.phase == Phase::Closing
    }

    /// Whether what waits is written at once.
    fn is_urgent(&self) -> bool {
        let waited_for =
            self.is_closing() || !self.until_durable.is_empty() || self.ripe || self.waiting.bytes >= MUCH;
        self.next.is_some() || waited_for && self.waiting.bytes > 0
    }

    fn is_full(&self) -> bool {
        self.waiting.bytes + self.taken >= FULL
    }

    /// All that waits, for the thread to write.
    fn take(&mut self) -> Group {
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
    fn break_off(&mut self, why: Error) {
        self.broken = Some(why);
        self.waiting = Waiting::default();
    }

    /// Tells whether the thread must be woken.
    fn append(&mut self, write: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
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
struct Group {
    pieces: VecDeque<Vec<u8>>,
    /// Where the log is behind it.
    end: Position,
    next: Option<(usize, Segment)>,
    broken: bool,
    hole: bool,
    hurry: Option<Hurry>,
}

/// Why what is written is to be durable at once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hurry {
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

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = self.queue();
        f.debug_struct("Log")
            .field("queued", &queue.queued)
            .field("durable", &queue.durable)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::files::directory::Directory;
    use crate::frame::{Author, Origin};
    use std::sync::mpsc::{Receiver, channel};

    const PATIENT: Duration = Duration::from_secs(30);

    fn told(log: &Log) -> Receiver<()> {
        let (tell, told) = channel();
        log.append(|to| {
            frame::durable(to, 0);
            true
        });
        let then = move || {
            let _ = tell.send(());
        };
        log.when_durable(log.position(), Box::new(then));
        told
    }

    #[test]
    fn what_nobody_waits_for_is_written_when_those_who_log_rest_or_when_there_is_much() {
        let log = Log::new();
        // Nobody runs the thread.
        let _ = log.open(Catalog::default(), Segment::at("/dev/null"));
        let append = |bytes: usize| {
            log.queue().append(|to| {
                to.resize(to.len() + bytes, 0);
                true
            })
        };
        assert!(!append(ENOUGH - 1));
        log.rest();
        assert!(!log.queue().is_urgent());
        assert!(!append(1) && !log.queue().is_urgent());
        log.rest();
        assert!(log.queue().is_urgent());
        // The moment is over.
        assert!(!append(MUCH - ENOUGH - 1) && !log.queue().is_urgent());
        assert!(append(1) && log.queue().is_urgent());
        // It was woken already.
        assert!(!append(MUCH));
    }

    #[test]
    fn frames_wait_in_pieces_and_who_waits_for_room_gets_it_as_these_are_written() {
        let log = Log::new();
        // Nobody runs the thread.
        let _ = log.open(Catalog::default(), Segment::at("/dev/null"));
        let append = |bytes: usize| {
            log.append(|to| {
                to.resize(to.len() + bytes, 7);
                true
            });
        };
        let lengths = |pieces: &VecDeque<Vec<u8>>| pieces.iter().map(Vec::len).collect::<Vec<_>>();
        append(PIECE - 1);
        append(5);
        append(1);
        // Behind a switch others begin, once.
        log.switch(Segment::at("/dev/null"), false).unwrap();
        append(2);
        append(3);
        let group = log.queue().take();
        assert_eq!(lengths(&group.pieces), [PIECE + 4, 1, 5]);
        assert_eq!(group.next.unwrap().0, 2);
        assert_eq!(log.queue().taken, PIECE + 10);
        group.pieces.into_iter().for_each(|piece| log.written(piece));
        let queue = log.queue();
        assert_eq!((queue.taken, queue.waiting.bytes, queue.spare.len()), (0, 0, SPARE));
        drop(queue);

        let (tell, told) = channel();
        let fill = FULL.div_ceil(PIECE);
        for k in 0..fill {
            assert!(!log.is_full(), "{k}");
            append(PIECE);
        }
        log.when_room(Box::new(move || tell.send(()).unwrap()));
        let group = log.queue().take();
        assert!(log.is_full(), "what is taken is not written");
        assert_eq!(lengths(&group.pieces), vec![PIECE; fill]);
        let mut pieces = group.pieces.into_iter();
        while log.is_full() {
            assert!(told.try_recv().is_err());
            log.written(pieces.next().unwrap());
        }
        told.try_recv().unwrap();
        assert!(pieces.len() > 0);
    }

    #[test]
    fn a_full_disk_is_told_and_a_snapshot_makes_up_for_it() {
        let path = std::env::temp_dir().join(format!("fastps-log-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let directory = Directory::open(&path).unwrap();
        let log = Log::new();
        let thread = std::thread::spawn(log.open(Catalog::default(), Segment::at("/dev/full")));
        let first = told(&log);
        assert!(log.sync(log.position()).is_err());
        let error = log.check().unwrap_err();
        assert!(error.kind == Kind::Unavailable && error.message.contains("/dev/full"), "{error}");
        // What is not durable is not said to be, now or by the next that is.
        let second = told(&log);
        let origin = Origin { id: 1, shard: 0, shards: 1 };
        assert!(
            log.switch(Segment::create(&directory, 1, false, origin, Author::default()).unwrap(), false)
                .is_err()
        );
        log.switch(Segment::create(&directory, 2, true, origin, Author::default()).unwrap(), true).unwrap();
        assert!(log.check().is_err());
        let third = told(&log);
        assert!(third.recv_timeout(Duration::from_millis(50)).is_err());
        log.heal();
        log.check().unwrap();
        for told in [first, second, third, told(&log)] {
            told.recv_timeout(PATIENT).unwrap();
        }
        log.switch(Segment::create(&directory, 3, false, origin, Author::default()).unwrap(), false).unwrap();
        told(&log).recv_timeout(PATIENT).unwrap();
        log.close();
        thread.join().unwrap();
        let bytes = std::fs::read(directory.segment(2)).unwrap();
        assert!(bytes.windows(4).filter(|four| *four == frame::MARK).count() >= 4);
        std::fs::remove_dir_all(&path).unwrap();
    }
}
