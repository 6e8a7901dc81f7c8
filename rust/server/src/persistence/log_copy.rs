//! How far the log of a shard is copied: shared by those who copy, those who report it, and those who wait for
//! it.

use fastps_durable::owner::{LogPosition, Piece, Progress};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Most moments that are remembered. While the bucket is away, no more are added.
const MAX_MOMENTS: usize = 4096;

/// Called once.
type Callback = Box<dyn FnOnce() + Send>;

/// The copy of a shard's log.
#[derive(Debug)]
pub(crate) struct LogCopy {
    state: Mutex<State>,
    /// Somebody waits for a copy of what is synced.
    wanted: Notify,
    failed: AtomicU64,
    /// Set while the last attempt succeeded.
    succeeds: AtomicBool,
}

struct State {
    progress: Progress,
    /// What is synced and not copied yet, the oldest first.
    synced: VecDeque<Moment>,
    /// The position of the log before which everything is copied. `None`: not even what an earlier process of this
    /// server has logged is.
    copied: Option<u64>,
    /// Those who wait for positions.
    waiters: Vec<(u64, Callback)>,
}

/// When the log was seen to be synced up to a place.
#[derive(Clone, Copy, Debug)]
struct Moment {
    position: u64,
    place: LogPosition,
    since: Instant,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("progress", &self.progress)
            .field("copied", &self.copied)
            .finish_non_exhaustive()
    }
}

impl State {
    /// Notes what is copied by now. Returns the callbacks of those who have waited for it.
    fn advance(&mut self) -> Vec<Callback> {
        let copied = self.progress.copied();
        while let Some(moment) = self.synced.pop_front_if(|moment| moment.place <= copied) {
            self.copied = self.copied.max(Some(moment.position));
        }
        let is_due = |waiter: &mut (u64, Callback)| Some(waiter.0) <= self.copied;
        self.waiters.extract_if(.., is_due).map(|(_, then)| then).collect()
    }
}

impl LogCopy {
    pub(crate) fn new() -> Self {
        let state = State {
            progress: Progress::new(LogPosition::default()),
            synced: VecDeque::new(),
            copied: None,
            waiters: Vec::new(),
        };
        Self {
            state: Mutex::new(state),
            wanted: Notify::new(),
            failed: AtomicU64::new(0),
            succeeds: AtomicBool::new(true),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins: the log is copied up to here.
    pub(crate) fn begin(&self, copied: LogPosition) {
        self.state().progress = Progress::new(copied);
    }

    /// The log is synced up to this position now, which is at this place of its files.
    pub(crate) fn note_synced(&self, position: u64, place: LogPosition) {
        let mut state = self.state();
        let last = state.synced.back().map(|last| last.place);
        let newest = last.unwrap_or_else(|| state.progress.copied());
        if place > newest && state.synced.len() < MAX_MOMENTS {
            state.synced.push_back(Moment { position, place, since: Instant::now() });
        } else if place <= newest {
            // Not every position has bytes.
            match state.synced.back_mut() {
                Some(last) => last.position = last.position.max(position),
                None => state.copied = state.copied.max(Some(position)),
            }
        }
        let due = state.advance();
        drop(state);
        for then in due {
            then();
        }
    }

    /// The bucket has this piece. Returns how far the log is copied.
    pub(crate) fn add(&self, piece: Piece) -> LogPosition {
        self.advance(|progress| progress.add(piece))
    }

    /// The bucket has a snapshot from which the log is replayed from here on. Returns how far the log is copied.
    pub(crate) fn add_snapshot(&self, log: LogPosition) -> LogPosition {
        self.advance(|progress| progress.add_snapshot(log))
    }

    fn advance(&self, advance: impl FnOnce(&mut Progress)) -> LogPosition {
        let mut state = self.state();
        advance(&mut state.progress);
        let (copied, due) = (state.progress.copied(), state.advance());
        drop(state);
        for then in due {
            then();
        }
        copied
    }

    /// Calls `then` once everything before `position`, which is synced, is copied: at once, or on the thread that
    /// copies, which does not wait for the age of a piece then.
    pub(crate) fn when_copied(&self, position: u64, then: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        if Some(position) <= state.copied {
            drop(state);
            return then();
        }
        state.waiters.push((position, Box::new(then)));
        drop(state);
        self.wanted.notify_one();
    }

    /// Returns whether somebody waits for what is synced and not copied.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.state().waiters.is_empty()
    }

    /// Waits until somebody waits for a copy.
    pub(crate) async fn wanted(&self) {
        self.wanted.notified().await;
    }

    /// Counts an attempt. Returns whether its outcome differs from that of the one before.
    pub(crate) fn count(&self, succeeds: bool) -> bool {
        if !succeeds {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        self.succeeds.swap(succeeds, Ordering::Relaxed) != succeeds
    }

    /// Returns whether the last attempt succeeded.
    pub(crate) fn succeeds(&self) -> bool {
        self.succeeds.load(Ordering::Relaxed)
    }

    /// Number of failed attempts.
    pub(crate) fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// How long the oldest change that is not copied has been synced.
    pub(crate) fn behind(&self) -> Duration {
        self.state().synced.front().map_or(Duration::ZERO, |oldest| oldest.since.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn at(segment: u64, offset: u64) -> LogPosition {
        LogPosition { segment, offset }
    }

    fn piece(begin: LogPosition, end: LogPosition) -> Piece {
        Piece { term: 1, begin, end }
    }

    #[test]
    fn it_is_as_far_behind_as_its_oldest_change_is_old() {
        let copy = LogCopy::new();
        copy.begin(at(1, 0));
        assert_eq!(copy.behind(), Duration::ZERO);
        copy.note_synced(0, at(1, 0));
        assert_eq!(copy.behind(), Duration::ZERO, "nothing has changed");
        copy.note_synced(10, at(1, 10));
        std::thread::sleep(Duration::from_millis(20));
        copy.note_synced(20, at(2, 10));
        assert!(copy.behind() >= Duration::from_millis(20));
        assert_eq!(copy.add(piece(at(1, 0), at(1, 10))), at(1, 10));
        assert!(copy.behind() > Duration::ZERO);
        assert_eq!(copy.add_snapshot(at(2, 0)), at(2, 0));
        assert_eq!(copy.add(piece(at(2, 0), at(2, 10))), at(2, 10));
        assert_eq!(copy.behind(), Duration::ZERO);
        for offset in 0..2 * MAX_MOMENTS as u64 {
            copy.note_synced(20 + offset, at(3, offset));
        }
        assert_eq!(copy.state().synced.len(), MAX_MOMENTS);
    }

    #[test]
    fn a_waiter_is_called_when_all_before_its_position_is_copied() {
        let (copy, called) = (LogCopy::new(), Arc::new(Mutex::new(Vec::new())));
        let wait = |position| {
            let called = called.clone();
            copy.when_copied(position, move || called.lock().unwrap().push(position));
        };
        let called = || std::mem::take(&mut *called.lock().unwrap());
        copy.begin(at(3, 50));
        // What an earlier process has logged after its last piece.
        wait(0);
        copy.note_synced(0, at(4, 20));
        assert!(copy.is_awaited() && called().is_empty());
        copy.add(piece(at(3, 50), at(4, 0)));
        assert!(called().is_empty());
        copy.note_synced(9, at(4, 29));
        wait(9);
        wait(5);
        copy.add(piece(at(4, 0), at(4, 20)));
        assert_eq!(called(), [0]);
        // Pieces arrive in any order.
        copy.note_synced(30, at(4, 50));
        copy.add(piece(at(4, 29), at(4, 50)));
        assert!(called().is_empty());
        copy.add(piece(at(4, 20), at(4, 29)));
        assert_eq!(called(), [9, 5]);
        wait(30);
        assert_eq!(called(), [30], "it is copied already");
        // A position without bytes.
        wait(31);
        assert!(called().is_empty());
        copy.note_synced(31, at(4, 50));
        assert_eq!(called(), [31]);
        // More moments than are remembered.
        for offset in 1..=2 * MAX_MOMENTS as u64 {
            copy.note_synced(31 + offset, at(4, 50 + offset));
        }
        let newest = 2 * MAX_MOMENTS as u64;
        wait(31 + newest);
        copy.add(piece(at(4, 50), at(4, 50 + newest)));
        assert!(called().is_empty());
        copy.note_synced(31 + newest, at(4, 50 + newest));
        assert_eq!(called(), [31 + newest]);
        assert!(!copy.is_awaited());
    }

    #[test]
    fn the_first_failure_and_the_first_success_after_it_are_news() {
        let copy = LogCopy::new();
        assert_eq!(
            [true, false, false, true, true].map(|succeeds| copy.count(succeeds)),
            [false, true, false, true, false]
        );
        assert_eq!(copy.failed(), 2);
    }
}
