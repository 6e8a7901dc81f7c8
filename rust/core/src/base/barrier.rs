//! Where threads wait for each other, again and again. Who waits looks for a moment before it sleeps; who
//! leaves, in a panic too, ends the waiting of all.

use crate::base::fault::fault;
use crate::base::sync::{AtomicU64, Mutex, Ordering, Thread, current, lock, park, spin_loop};

/// Looks before a thread sleeps: some 50 us, where a wake-up takes 25 us. A model checker needs no more than
/// one.
const LOOKS_BEFORE_SLEEP: u32 = if cfg!(loom) { 1 } else { 2000 };
/// In place of a count of meetings.
const OVER: u64 = u64::MAX;

/// A meeting point of so many threads.
#[derive(Debug)]
pub struct Barrier {
    threads: u64,
    looks: u32,
    /// Those that wait for the next meeting.
    arrived: AtomicU64,
    /// Meetings so far, or `OVER`.
    meetings: AtomicU64,
    asleep: Mutex<Vec<Thread>>,
}

/// A thread's place at a barrier. When it is dropped, there are no more meetings.
#[derive(Debug)]
pub struct Seat<'a>(&'a Barrier);

impl Barrier {
    /// Each of these threads takes a seat.
    pub fn new(threads: usize) -> Self {
        Self {
            threads: threads as u64,
            looks: if has_a_core_each(threads) { LOOKS_BEFORE_SLEEP } else { 0 },
            arrived: AtomicU64::new(0),
            meetings: AtomicU64::new(0),
            asleep: Mutex::new(Vec::new()),
        }
    }

    /// A place for the thread that asks.
    pub fn seat(&self) -> Seat<'_> {
        Seat(self)
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
            // Whoever changes the count takes this lock afterwards, and finds this thread, or was seen here.
            // Not once for all: who wakes for the meeting before may be late and take this thread away.
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

impl Seat<'_> {
    /// Waits until all have come. What each did before is seen by all afterwards. False if one has left.
    pub fn meet(&self) -> bool {
        let barrier = self.0;
        // Of no other meeting than this thread's next one: it does not begin without this thread.
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

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        // A model that has failed takes no more steps.
        if cfg!(loom) && std::thread::panicking() {
            return;
        }
        self.0.meetings.store(OVER, Ordering::Release);
        self.0.wake();
    }
}

/// Otherwise who waits would keep others from coming.
fn has_a_core_each(threads: usize) -> bool {
    threads > 1 && std::thread::available_parallelism().is_ok_and(|cores| threads <= cores.get())
}
