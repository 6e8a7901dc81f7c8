//! How far the log of a shard is copied: shared by those who copy and those who report it.

use fastps_durable::owner::{LogPosition, Piece, Progress};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most moments that are remembered. While the bucket is away, no more are added.
const MAX_MOMENTS: usize = 4096;

/// The copy of a shard's log.
#[derive(Debug)]
pub(crate) struct LogCopy {
    state: Mutex<State>,
    failed: AtomicU64,
    /// Set while the last attempt succeeded.
    succeeds: AtomicBool,
}

#[derive(Debug)]
struct State {
    progress: Progress,
    /// Places that are not copied yet, and when the log was seen to be synced up to there.
    synced: VecDeque<(LogPosition, Instant)>,
}

impl LogCopy {
    pub(crate) fn new() -> Self {
        let state = State { progress: Progress::new(LogPosition::default()), synced: VecDeque::new() };
        Self { state: Mutex::new(state), failed: AtomicU64::new(0), succeeds: AtomicBool::new(true) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins: the log is copied up to here.
    pub(crate) fn begin(&self, copied: LogPosition) {
        self.state().progress = Progress::new(copied);
    }

    /// The log is synced up to here now.
    pub(crate) fn note_synced(&self, place: LogPosition) {
        let State { progress, synced } = &mut *self.state();
        let last = synced.back().map_or(progress.copied(), |(last, _)| *last);
        if place > last && synced.len() < MAX_MOMENTS {
            synced.push_back((place, Instant::now()));
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
        let State { progress, synced } = &mut *self.state();
        advance(progress);
        let copied = progress.copied();
        while synced.pop_front_if(|(place, _)| *place <= copied).is_some() {}
        copied
    }

    /// Counts an attempt. Returns whether its outcome differs from that of the one before.
    pub(crate) fn count(&self, succeeds: bool) -> bool {
        if !succeeds {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        self.succeeds.swap(succeeds, Ordering::Relaxed) != succeeds
    }

    /// Number of failed attempts.
    pub(crate) fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// How long the oldest change that is not copied has been synced.
    pub(crate) fn behind(&self) -> Duration {
        self.state().synced.front().map_or(Duration::ZERO, |(_, since)| since.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(segment: u64, offset: u64) -> LogPosition {
        LogPosition { segment, offset }
    }

    #[test]
    fn it_is_as_far_behind_as_its_oldest_change_is_old() {
        let copy = LogCopy::new();
        copy.begin(at(1, 0));
        assert_eq!(copy.behind(), Duration::ZERO);
        copy.note_synced(at(1, 0));
        assert_eq!(copy.behind(), Duration::ZERO, "nothing has changed");
        copy.note_synced(at(1, 10));
        std::thread::sleep(Duration::from_millis(20));
        copy.note_synced(at(2, 10));
        assert!(copy.behind() >= Duration::from_millis(20));
        assert_eq!(copy.add(Piece { term: 1, begin: at(1, 0), end: at(1, 10) }), at(1, 10));
        assert!(copy.behind() > Duration::ZERO);
        assert_eq!(copy.add_snapshot(at(2, 0)), at(2, 0));
        assert_eq!(copy.add(Piece { term: 1, begin: at(2, 0), end: at(2, 10) }), at(2, 10));
        assert_eq!(copy.behind(), Duration::ZERO);
        for offset in 0..2 * MAX_MOMENTS as u64 {
            copy.note_synced(at(3, offset));
        }
        assert_eq!(copy.state().synced.len(), MAX_MOMENTS);
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
