//! The lock of an `exact` slice. A running thread may retake it while the slice is hot in its cache, but no
//! waiting thread is overtaken more than [`MAX_OVERTAKES`] times.
//!
//! Two threads that strictly alternate pay a cache miss per line and a wake-up per push. Measured on one
//! dense vector, a first-come-first-served lock takes up to 3.8 times as long as a single thread; this lock
//! takes 1.0 to 1.2 times. Waiting threads queue in order of arrival. A newcomer may overtake the queue while
//! its front has been overtaken fewer than `MAX_OVERTAKES` times; after that, an unlock hands the lock
//! directly to the front.

use crate::base::fault::fault;
use crate::base::sync::{
    Arc, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, Thread, current, lock, lock_uncontended, park,
    spin_loop,
};
use std::collections::VecDeque;

/// How often a waiting thread may be overtaken. Once under a model checker, which explores all orders.
pub const MAX_OVERTAKES: u64 = if cfg!(loom) { 1 } else { 64 };

/// Spins before a thread queues, and spins in the queue before it sleeps: about 2 us and 50 us, where a
/// wake-up takes 25 us. A waiter that is overtaken restarts its spins: its turn is near, and a lock that is
/// handed to a sleeping thread stays idle until that thread wakes. One spin is enough under a model checker.
const TRIES_BEFORE_QUEUE: u32 = if cfg!(loom) { 1 } else { 100 };
const LOOKS_BEFORE_SLEEP: u32 = if cfg!(loom) { 1 } else { 2000 };
/// Spins between two reads of the lock word. Each read takes the word's cache line from the holder, so reads
/// are rare; they are rarer in the queue, where a thread can spin on its own flag instead.
const LOOKS_PER_ATTEMPT: u32 = 32;
const LOOKS_PER_TRY: u32 = 128;

const LOCKED: u32 = 1;
const WAITING: u32 = 2;

/// A mutual exclusion lock around `T`.
#[derive(Debug, Default)]
pub struct SliceLock<T> {
    /// `LOCKED` and `WAITING` bits; `WAITING` changes only under `queue`.
    word: AtomicU32,
    /// How often newcomers have overtaken the queue; only the lock's holder changes it.
    overtakes: AtomicU64,
    queue: Mutex<VecDeque<QueuedThread>>,
    /// Never contended: only the holder of the word locks it. This costs 4 ns of the 9 ns of an uncontended
    /// lock and unlock, and lets the compiler check what would otherwise be `unsafe`.
    data: Mutex<T>,
}

/// A thread in the queue.
#[derive(Debug)]
struct QueuedThread {
    thread: Thread,
    /// `overtakes` at arrival.
    arrived: u64,
    /// The thread sleeps, or has found the lock taken and is about to sleep.
    asleep: bool,
    /// Set when the lock is handed to this waiter.
    granted: Arc<AtomicU32>,
}

/// Holds the lock until dropped.
#[derive(Debug)]
pub struct SliceGuard<'a, T> {
    lock: &'a SliceLock<T>,
    /// An option, so that `drop` can release the data before the word.
    data: Option<MutexGuard<'a, T>>,
}

impl<T> SliceLock<T> {
    /// An unlocked lock.
    pub fn new(data: T) -> Self {
        Self {
            word: AtomicU32::new(0),
            overtakes: AtomicU64::new(0),
            queue: Mutex::default(),
            data: Mutex::new(data),
        }
    }

    /// Acquires the lock.
    pub fn lock(&self) -> SliceGuard<'_, T> {
        if !self.try_word() {
            self.wait();
        }
        SliceGuard { lock: self, data: Some(lock_uncontended(&self.data)) }
    }

    /// The number of threads in the queue.
    pub fn queued(&self) -> usize {
        lock(&self.queue).len()
    }

    /// Takes the word if it is free, and so overtakes the queue.
    fn try_word(&self) -> bool {
        if fault("lock_open") {
            return true;
        }
        let taken = self.change(0, LOCKED);
        if !taken && self.change(WAITING, WAITING | LOCKED) {
            self.overtakes.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        taken
    }

    fn change(&self, from: u32, to: u32) -> bool {
        self.word.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn is_free(&self) -> bool {
        self.word.load(Ordering::Relaxed) & LOCKED == 0
    }

    fn wait(&self) {
        for look in 0..TRIES_BEFORE_QUEUE {
            if look % LOOKS_PER_ATTEMPT == 0 && self.is_free() && self.try_word() {
                return;
            }
            spin_loop();
        }
        let Some(granted) = self.join_queue() else {
            return;
        };
        let mut overtakes = self.overtakes.load(Ordering::Relaxed);
        let enough = overtakes + MAX_OVERTAKES;
        loop {
            let mut look = 0;
            while look < LOOKS_BEFORE_SLEEP {
                look += 1;
                if granted.load(Ordering::Acquire) != 0 {
                    return;
                }
                if look % LOOKS_PER_TRY == 0 {
                    if self.is_free() && self.leave_queue(&granted, false) {
                        return;
                    }
                    let now = self.overtakes.load(Ordering::Relaxed);
                    if now != overtakes && now < enough {
                        (overtakes, look) = (now, 0);
                    }
                }
                spin_loop();
            }
            if self.leave_queue(&granted, true) {
                return;
            }
            park();
        }
    }

    /// Joins the queue; `None` if the lock became free and this thread took it.
    fn join_queue(&self) -> Option<Arc<AtomicU32>> {
        let mut queue = lock(&self.queue);
        // From here on, the holder's unlock takes the slow path. The lock may have become free just before.
        let before = self.word.fetch_or(WAITING, Ordering::Relaxed);
        if before & LOCKED == 0 && self.try_word() {
            self.update_waiting(&queue);
            return None;
        }
        let granted = Arc::new(AtomicU32::new(0));
        queue.push_back(QueuedThread {
            thread: current(),
            arrived: self.overtakes.load(Ordering::Relaxed),
            asleep: false,
            granted: granted.clone(),
        });
        Some(granted)
    }

    /// Takes the lock if it is free and this thread is at the front. Otherwise marks the waiter as asleep if
    /// `to_sleep` is set.
    fn leave_queue(&self, granted: &Arc<AtomicU32>, to_sleep: bool) -> bool {
        let mut queue = lock(&self.queue);
        let Some(at) = queue.iter().position(|waiter| Arc::ptr_eq(&waiter.granted, granted)) else {
            return true; // The lock was handed over just now.
        };
        if at == 0 && self.change(WAITING, WAITING | LOCKED) {
            queue.pop_front();
            self.update_waiting(&queue);
            return true;
        }
        queue[at].asleep |= to_sleep;
        false
    }

    fn update_waiting(&self, queue: &VecDeque<QueuedThread>) {
        if queue.is_empty() {
            self.word.fetch_and(!WAITING, Ordering::Relaxed);
        }
    }

    fn unlock(&self) {
        if self.word.compare_exchange(LOCKED, 0, Ordering::Release, Ordering::Relaxed).is_ok() {
            return;
        }
        let mut queue = lock(&self.queue);
        let Some(front) = queue.front_mut() else {
            self.word.store(0, Ordering::Release);
            return;
        };
        let asleep = std::mem::take(&mut front.asleep).then(|| front.thread.clone());
        let overtaken = self.overtakes.load(Ordering::Relaxed) - front.arrived;
        if overtaken >= MAX_OVERTAKES && !fault("lock_not_fair") {
            front.granted.store(1, Ordering::Release);
            queue.pop_front();
            self.update_waiting(&queue);
        } else {
            self.word.fetch_and(!LOCKED, Ordering::Release);
        }
        drop(queue);
        if let (Some(thread), false) = (asleep, fault("wake_up_lost")) {
            thread.unpark();
        }
    }
}

impl<T> std::ops::Deref for SliceGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        match &self.data {
            Some(data) => data,
            None => unreachable!("only drop takes the data"),
        }
    }
}

impl<T> std::ops::DerefMut for SliceGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.data {
            Some(data) => data,
            None => unreachable!("only drop takes the data"),
        }
    }
}

impl<T> Drop for SliceGuard<'_, T> {
    fn drop(&mut self) {
        self.data = None;
        self.lock.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_exactly_under_contention() {
        let counter = SliceLock::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50_000).for_each(|_| *counter.lock() += 1));
            }
        });
        assert_eq!(*counter.lock(), 200_000);
    }

    #[test]
    fn nobody_is_overtaken_more_often_than_promised() {
        let order = SliceLock::new(Vec::new());
        let arrived = AtomicU64::new(u64::MAX);
        std::thread::scope(|scope| {
            let guard = order.lock();
            scope.spawn(|| order.lock().push(1_u32));
            let mut yields = 0_u64;
            while order.queued() == 0 {
                yields += 1;
                assert!(yields < 100_000_000, "the other thread does not queue");
                std::thread::yield_now();
            }
            arrived.store(0, Ordering::Relaxed);
            drop(guard);
            for _ in 0..100_000 {
                let mut taken = order.lock();
                if taken.contains(&1) {
                    break;
                }
                taken.push(0);
            }
        });
        let taken = order.lock();
        let overtaken = taken.iter().take_while(|who| **who == 0).count();
        assert!(taken.contains(&1) && overtaken as u64 <= MAX_OVERTAKES, "{overtaken}");
    }
}
