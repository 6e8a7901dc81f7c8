//! A reusable barrier for a fixed number of threads. A waiting thread spins briefly before it sleeps, and a
//! thread that leaves, by panic too, ends the wait of all others. The work queue of the estimators uses it.

use crate::base::fault::fault;
use crate::base::sync::{AtomicU64, Mutex, Ordering, Thread, current, lock, park, spin_loop};

/// Spins before a thread sleeps: about 50 us, where a wake-up takes 25 us. One is enough under a model
/// checker.
const LOOKS_BEFORE_SLEEP: u32 = if cfg!(loom) { 1 } else { 2000 };
/// The value of `meetings` once a seat is dropped: there are no more meetings.
const OVER: u64 = u64::MAX;

/// A meeting point of a fixed number of threads.
#[derive(Debug)]
pub struct Barrier {
    threads: u64,
    looks: u32,
    /// Threads that wait for the next meeting.
    arrived: AtomicU64,
    /// Meetings so far, or `OVER`.
    meetings: AtomicU64,
    asleep: Mutex<Vec<Thread>>,
}

/// A thread's seat at a barrier. Dropping one ends all meetings.
#[derive(Debug)]
pub struct BarrierSeat<'a>(&'a Barrier);

impl Barrier {
    /// A barrier for this number of threads; each takes one seat.
    pub fn new(threads: usize) -> Self {
        Self {
            threads: threads as u64,
            looks: if has_a_core_each(threads) { LOOKS_BEFORE_SLEEP } else { 0 },
            arrived: AtomicU64::new(0),
            meetings: AtomicU64::new(0),
            asleep: Mutex::new(Vec::new()),
        }
    }

    /// A seat for the calling thread.
    pub fn seat(&self) -> BarrierSeat<'_> {
        BarrierSeat(self)
    }

    fn wait_past(&self, meeting: u64) {
        let past = || self.meetings.load(Ordering::Acquire) != meeting;
        for _ in 0..self.looks {
            if past() {
                return;
            }
            spin_loop();
        }
        loop {
            let mut asleep = lock(&self.asleep);
            // A thread that changes `meetings` takes this lock afterwards, so it either finds this thread in
            // the list or its change is visible here. The check repeats after each wake-up, because a thread
            // that wakes the waiters of the previous meeting late may remove this thread from the list.
            if past() {
                return;
            }
            asleep.push(current());
            drop(asleep);
            park();
        }
    }

    fn wake(&self) {
        let asleep = std::mem::take(&mut *lock(&self.asleep));
        if !fault("wake_up_lost") {
            asleep.iter().for_each(Thread::unpark);
        }
    }
}

impl BarrierSeat<'_> {
    /// Waits until all threads have arrived; what each did before is visible to all afterwards. False if a
    /// thread has left.
    pub fn meet(&self) -> bool {
        let barrier = self.0;
        // The next meeting cannot take place without this thread, so a relaxed load reads its number.
        let meeting = barrier.meetings.load(Ordering::Relaxed);
        if meeting == OVER {
            return false;
        }
        let all = barrier.arrived.fetch_add(1, Ordering::AcqRel) + 1 == barrier.threads;
        if !all && !fault("barrier_open") {
            barrier.wait_past(meeting);
        } else if all {
            barrier.arrived.store(0, Ordering::Relaxed);
            let next = meeting + 1;
            let met = barrier.meetings.compare_exchange(meeting, next, Ordering::Release, Ordering::Relaxed);
            if met.is_ok() {
                barrier.wake();
            }
        }
        barrier.meetings.load(Ordering::Acquire) != OVER
    }
}

impl Drop for BarrierSeat<'_> {
    fn drop(&mut self) {
        // A model that has failed takes no more steps.
        if cfg!(loom) && std::thread::panicking() {
            return;
        }
        self.0.meetings.store(OVER, Ordering::Release);
        self.0.wake();
    }
}

/// Returns whether every thread has a core. Without one, a spinning thread would keep the others from
/// arriving.
fn has_a_core_each(threads: usize) -> bool {
    threads > 1 && std::thread::available_parallelism().is_ok_and(|cores| threads <= cores.get())
}
