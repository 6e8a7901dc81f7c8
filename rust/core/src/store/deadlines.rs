//! The deadlines of pushes that a policy holds: one thread per store, started by its first held push, keeps
//! all of them.
//!
//! The core reads no clock, so the thread counts ticks: while pushes are held, it sleeps for one tick at a
//! time. A tick is a small share of the shortest timeout so far, so a deadline is never early and at most a
//! few ticks late. The thread is not needed to end a push with all its answers: a caller that waits does
//! that, or the call that brought the last answer, once it has released its locks.
//!
//! The same ticks end the graces of versions, for which held pushes wait.

use crate::base::sync::{Arc, AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, lock};
use crate::shard::Shard;
use std::fmt;
use std::sync::{Condvar, Weak};
use std::time::Duration;

/// Ticks in the shortest timeout.
const TICKS: u32 = 64;
const SHORTEST_TICK: Duration = Duration::from_millis(1);
const LONGEST_TICK: Duration = Duration::from_millis(250);

/// A held push, which any thread may end.
pub(super) trait HeldPush: Send + Sync {
    /// Returns whether all answers have arrived.
    fn is_complete(&self) -> bool;
    /// Returns whether it was ended.
    fn is_ended(&self) -> bool;
    /// Ends it with the present answers, unless another thread does so already.
    fn end(&self);
}

/// The held pushes of a store. Dropping this ends the thread once no push is held.
#[derive(Default)]
pub(super) struct Deadlines(Arc<HeldPushes>);

/// State that a store shares with its thread and its held pushes.
#[derive(Default)]
pub(super) struct HeldPushes {
    /// Pushes with all their answers.
    complete: Mutex<Vec<Arc<dyn HeldPush>>>,
    /// Their number, so that calls need no lock to find none.
    count: AtomicU64,
    timer: Mutex<Timer>,
    changed: Condvar,
    shard: Weak<Shard>,
    /// Set once the caller passes the time, which then ends the graces.
    timed: AtomicBool,
}

#[derive(Default)]
struct Timer {
    /// Held pushes, each with the time that is left.
    held: Vec<(Duration, Arc<dyn HeldPush>)>,
    tick: Option<Duration>,
    /// The ticks so far.
    passed: Duration,
    running: bool,
    closed: bool,
}

impl Deadlines {
    /// Those of a store with this shard.
    pub(super) fn of(shard: &Arc<Shard>) -> Self {
        Self(Arc::new(HeldPushes { shard: Arc::downgrade(shard), ..HeldPushes::default() }))
    }

    /// Ends graces by the caller's clock from now on.
    pub(super) fn note_timed(&self) {
        self.0.timed.store(true, Ordering::Relaxed);
    }

    /// The list of pushes, in which a push notes that it is complete.
    pub(super) fn pushes(&self) -> &Arc<HeldPushes> {
        &self.0
    }

    /// Ends `push` after `timeout`, unless something else does before. False: no thread could be started, so
    /// the caller must wait.
    pub(super) fn keep(&self, push: Arc<dyn HeldPush>, timeout: Duration) -> bool {
        let mut timer = lock(&self.0.timer);
        if !timer.running {
            let own = self.0.clone();
            let thread = std::thread::Builder::new().name("fastps-deadlines".to_owned());
            timer.running = thread.spawn(move || own.run()).is_ok();
            if !timer.running {
                return false;
            }
        }
        let tick = (timeout / TICKS).clamp(SHORTEST_TICK, LONGEST_TICK);
        let wakes = timer.held.is_empty() || timer.tick.is_none_or(|shortest| tick < shortest);
        timer.tick = Some(timer.tick.map_or(tick, |shortest| shortest.min(tick)));
        timer.held.push((timeout, push));
        drop(timer);
        if wakes {
            self.0.changed.notify_all();
        }
        true
    }

    /// Ends the pushes that are complete when the result is dropped, which comes after all locks.
    #[inline(always)]
    pub(super) fn end_complete_at_last(&self) -> AtLast<'_> {
        AtLast(&self.0)
    }
}

impl fmt::Debug for Deadlines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deadlines").field("held", &lock(&self.0.timer).held.len()).finish()
    }
}

/// See [`Deadlines::end_complete_at_last`].
pub(super) struct AtLast<'a>(&'a HeldPushes);

impl Drop for AtLast<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.0.count.load(Ordering::Acquire) > 0 {
            self.0.end_complete();
        }
    }
}

impl Drop for Deadlines {
    fn drop(&mut self) {
        lock(&self.0.timer).closed = true;
        self.0.changed.notify_all();
    }
}

impl HeldPushes {
    /// Notes that a push has all its answers; the caller may hold locks.
    pub(super) fn note_complete(&self, push: Arc<dyn HeldPush>) {
        let mut complete = lock(&self.complete);
        complete.push(push);
        self.count.store(complete.len() as u64, Ordering::Release);
    }

    #[cold]
    fn end_complete(&self) {
        let complete = {
            let mut complete = lock(&self.complete);
            self.count.store(0, Ordering::Release);
            std::mem::take(&mut *complete)
        };
        for push in complete {
            push.end();
        }
    }

    /// The thread: ends pushes at their deadlines, until the store is dropped and no push is held.
    fn run(&self) {
        let mut timer = lock(&self.timer);
        loop {
            let Some(tick) = timer.tick.filter(|_| !timer.held.is_empty()) else {
                if timer.closed {
                    return;
                }
                timer = self.sleep(timer, None).0;
                continue;
            };
            let (woken, whole) = self.sleep(timer, Some(tick));
            timer = woken;
            if !whole {
                continue; // how much of the tick is over is not known
            }
            for (left, _) in &mut timer.held {
                *left = left.saturating_sub(tick);
            }
            timer.passed += tick;
            let passed = timer.passed.as_millis() as u64;
            drop(timer);
            if let Some(shard) = self.shard.upgrade().filter(|_| !self.timed.load(Ordering::Relaxed)) {
                shard.end_graces(passed);
            }
            timer = lock(&self.timer);
            timer.held.retain(|(_, push)| !push.is_ended());
            let due = |(left, push): &mut (Duration, Arc<dyn HeldPush>)| left.is_zero() || push.is_complete();
            let due: Vec<_> = timer.held.extract_if(.., due).collect();
            if due.is_empty() {
                continue;
            }
            drop(timer);
            for (_, push) in &due {
                push.end();
            }
            drop(due);
            timer = lock(&self.timer);
        }
    }

    /// Sleeps for a tick, or until something changes; returns whether the whole tick is over.
    fn sleep<'a>(
        &'a self,
        timer: MutexGuard<'a, Timer>,
        tick: Option<Duration>,
    ) -> (MutexGuard<'a, Timer>, bool) {
        let whole = match tick {
            Some(tick) => self.changed.wait_timeout(timer, tick).is_ok_and(|(_, ended)| ended.timed_out()),
            None => self.changed.wait(timer).is_err(),
        };
        // Lock again, because ThreadSanitizer does not see the lock that the wait returns.
        (lock(&self.timer), whole)
    }
}
