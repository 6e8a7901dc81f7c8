//! The memory budget of one connection.
//!
//! A peer may send as much as its window grants without being asked. Here those bytes stay in the socket
//! until their memory is charged: an idle connection reads a few small messages, and a working one charges
//! the bytes that have arrived and are unused. The charge grows with the largest need so far, up to the whole
//! window, but beyond one frame only into memory that is not kept for other workers. It is returned when the
//! connection has been quiet for a while and everything received is used and answered.

use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use fastps_core::identity::{ASYNCHRONY_BYTES, IDENTITY_BYTES};
use fastps_core::shard::{Charge, Meter, Purpose};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Largest HTTP/2 frame: it holds a slice with its header.
pub const MAX_FRAME: u32 = 1 << 20;
/// Memory of a connection at rest: its state, its buffers, and the bytes that it may read.
pub const AT_REST_BYTES: u64 = 48 << 10;
/// Memory of a working connection beside the bytes that it receives: for HTTP/2 and for short calls.
pub const WORK_BYTES: u64 = 128 << 10;
/// Memory of an answer that waits to be sent; its values stay in their slice.
pub const OWED_ANSWER_BYTES: usize = 256;
/// Bytes that a connection may read at rest.
const READ_AT_REST_BYTES: usize = 8 << 10;
/// Time without a byte after which everything received counts as used.
const CONSUMED_AFTER: Duration = Duration::from_secs(1);
/// Time with at most `READ_AT_REST_BYTES` read after which a connection rests.
const REST_AFTER: Duration = Duration::from_secs(5);

/// Most memory of a session.
pub const SESSION_BYTES: u64 = 4 << 10;
/// Memory of a worker beside its largest frame and its identities: a session, a working connection, and one
/// for calls.
const WORKER_BYTES: u64 = SESSION_BYTES + 2 * AT_REST_BYTES + WORK_BYTES;

/// The room that a shard keeps for this many workers.
#[derive(Clone, Copy, Debug)]
pub struct WorkerRoom(pub u64);

/// What a registration adds to a shard.
#[derive(Clone, Copy, Debug, Default)]
pub struct MoreSlices {
    /// Their number.
    pub count: u64,
    /// The bytes that they take.
    pub bytes: u64,
}

impl WorkerRoom {
    /// Bytes kept for connections, and for the outcomes of pushes, once there are `more` slices.
    fn parts(self, meter: &Meter, more: MoreSlices) -> [u64; 2] {
        let slices = meter.slices() + more.count;
        [
            self.0.saturating_mul(WORKER_BYTES + largest_frame(meter, more.bytes)),
            slices.saturating_mul(self.bytes_per_slice()),
        ]
    }

    /// Bytes kept in each slice for the outcomes of pushes: of the workers, and of the client that has
    /// registered the tensor.
    pub fn bytes_per_slice(self) -> u64 {
        if self.0 == 0 {
            return 0;
        }
        (self.0 + 1).saturating_mul(IDENTITY_BYTES).saturating_add(ASYNCHRONY_BYTES)
    }

    /// Bytes kept, once there are `more` slices.
    pub fn bytes(self, meter: &Meter, more: MoreSlices) -> u64 {
        self.parts(meter, more).into_iter().fold(0, u64::saturating_add)
    }

    /// Free memory beside the room, once there are `more` slices.
    pub fn free_beside(self, meter: &Meter, more: MoreSlices) -> u64 {
        let used = [Purpose::Connections, Purpose::Outcomes].map(|purpose| meter.used_for(purpose));
        let missing = self.parts(meter, more).into_iter().zip(used);
        let missing = missing.map(|(kept, used)| kept.saturating_sub(used)).fold(0, u64::saturating_add);
        meter.limit().saturating_sub(meter.used()).saturating_sub(missing)
    }
}

/// Bytes of the largest frame, once tensors take `more` bytes.
fn largest_frame(meter: &Meter, more: u64) -> u64 {
    (meter.used_for(Purpose::Slices) + more).min(u64::from(MAX_FRAME))
}

/// The memory of one connection.
#[derive(Debug)]
pub struct MemoryBudget {
    meter: Arc<Meter>,
    room: WorkerRoom,
    at_rest: u64,
    /// Most unused bytes that its peer may have sent.
    window: u64,
    works: AtomicBool,
    /// Bytes charged for messages and answers while working.
    traffic: AtomicU64,
    /// Bytes of unused messages, received or being received.
    waiting: AtomicU64,
    /// Bytes read since all were last known to be used.
    read: AtomicUsize,
    /// Largest read: HTTP/2 keeps a buffer of this size.
    largest: AtomicU64,
    /// Cloned by all holders of bytes of the connection.
    busy: Arc<()>,
    /// Set once the bytes that are used are known, as on a native connection.
    counts_used: AtomicBool,
    /// Set when its client's pushes are acknowledged only once durable.
    waits_for_disk: AtomicBool,
    state: Mutex<BudgetState>,
}

#[derive(Debug)]
struct BudgetState {
    charge: Charge,
    /// Bytes of messages beyond one frame.
    backlog: Charge,
    /// Bytes charged for other messages and answers.
    traffic: u64,
    streams: u64,
    last_read: Instant,
}

/// Keeps its connection from resting.
#[derive(Clone, Debug)]
pub struct Busy {
    _kept: Arc<()>,
}

/// One stream's share of its connection's memory.
#[derive(Debug)]
pub struct StreamBudget {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl MemoryBudget {
    /// Takes the memory of a connection at rest, whose peer may send `window` bytes unasked.
    pub fn take(meter: &Arc<Meter>, room: WorkerRoom, at_rest: u64, window: u64) -> Result<Arc<Self>> {
        let charge = meter.take(Purpose::Connections, at_rest)?;
        let backlog = meter.take(Purpose::Backlog, 0)?;
        Ok(Arc::new(Self {
            meter: meter.clone(),
            room,
            at_rest,
            window,
            works: AtomicBool::new(false),
            traffic: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            read: AtomicUsize::new(0),
            largest: AtomicU64::new(0),
            busy: Arc::new(()),
            counts_used: AtomicBool::new(false),
            waits_for_disk: AtomicBool::new(false),
            state: Mutex::new(BudgetState {
                charge,
                backlog,
                traffic: 0,
                streams: 0,
                last_read: Instant::now(),
            }),
        }))
    }

    fn state(&self) -> MutexGuard<'_, BudgetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A token that keeps the connection from resting until it is dropped.
    pub fn busy(&self) -> Busy {
        Busy { _kept: self.busy.clone() }
    }

    /// Notes that the next answer waits for the disk, which needs the cores: no thread spins for it.
    pub fn wait_for_disk(&self) {
        self.waits_for_disk.store(true, Ordering::Relaxed);
    }

    /// Returns whether the next answer waits for the disk.
    pub fn waits_for_disk(&self) -> bool {
        self.waits_for_disk.load(Ordering::Relaxed)
    }

    fn is_busy(&self) -> bool {
        Arc::strong_count(&self.busy) > 1
    }

    /// Charges memory for a read of at most `wanted` bytes. Returns how many may be read.
    pub fn admit(self: &Arc<Self>, wanted: usize) -> Result<usize> {
        if wanted as u64 > self.largest.load(Ordering::Relaxed) {
            self.largest.store(wanted as u64, Ordering::Relaxed);
        }
        let (messages, answers) = self.traffic_with(wanted as u64);
        if self.works.load(Ordering::Relaxed) {
            if messages + answers > self.traffic.load(Ordering::Relaxed) {
                self.grow(&mut self.state(), messages, answers)?;
            }
            return Ok(wanted);
        }
        let mut state = self.state();
        if !self.is_busy() && state.last_read.elapsed() >= CONSUMED_AFTER {
            self.read.store(0, Ordering::Relaxed);
        }
        let free = READ_AT_REST_BYTES.saturating_sub(self.read.load(Ordering::Relaxed));
        if free > 0 || wanted == 0 {
            return Ok(free.min(wanted));
        }
        self.grow(&mut state, messages, answers)?;
        self.works.store(true, Ordering::Relaxed);
        tokio::spawn(rest_when_quiet(Arc::downgrade(self)));
        Ok(wanted)
    }

    /// Memory for messages and for answers after reading `wanted` more bytes. Bytes of messages are counted
    /// when the header of their frame arrives, so these may be among them.
    fn traffic_with(&self, wanted: u64) -> (u64, u64) {
        let used = if fault("window_charged") { self.window } else { self.waiting.load(Ordering::Relaxed) };
        let messages = used.max(wanted).min(self.window.max(wanted));
        let answers = Arc::strong_count(&self.busy) - 1;
        (messages, (answers * OWED_ANSWER_BYTES) as u64)
    }

    fn grow(&self, state: &mut BudgetState, messages: u64, answers: u64) -> Result<()> {
        let backlog = messages.saturating_sub(largest_frame(&self.meter, 0));
        let traffic = state.traffic.max(messages - backlog + answers);
        state.charge.grow_to(self.at_rest + WORK_BYTES + state.streams + traffic)?;
        state.traffic = traffic;
        let more = backlog.saturating_sub(state.backlog.bytes());
        let free = self.room.free_beside(&self.meter, MoreSlices::default());
        if more > free && self.counts_used.load(Ordering::Relaxed) {
            let why =
                format!("the shard's memory is full: {} workers have room for a frame each", self.room.0);
            let error = Error::new(Kind::Capacity, why).retry_after_ms(1000);
            return Err(error.expected(format!("at most {free} free bytes"), format!("{more} bytes")));
        }
        state.backlog.grow_to(backlog)?;
        self.traffic.fetch_max(messages + answers, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of messages that are not used yet.
    pub fn unused(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Counts `bytes` of messages, or their parts, as arriving.
    pub fn arrives(&self, bytes: u64) {
        self.waiting.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts `bytes` of messages as used.
    pub fn used(&self, bytes: u64) {
        if bytes > 0 {
            let less = |waiting: u64| Some(waiting.saturating_sub(bytes));
            let _ = self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Counts `bytes` as read.
    pub fn passed(&self, bytes: usize) {
        if bytes > 0 {
            self.read.fetch_add(bytes, Ordering::Relaxed);
            if !self.works.load(Ordering::Relaxed) {
                self.state().last_read = Instant::now();
            }
        }
    }

    /// Returns the memory that only work needs, if the connection has been quiet since the last call.
    fn rest(&self) -> bool {
        if self.read.load(Ordering::Relaxed) > READ_AT_REST_BYTES || self.is_busy() {
            self.read.store(0, Ordering::Relaxed);
            return false;
        }
        let mut state = self.state();
        let buffer = self.largest.load(Ordering::Relaxed);
        state.charge.shrink_to(self.at_rest + if buffer > READ_AT_REST_BYTES as u64 { buffer } else { 0 });
        state.backlog.shrink_to(0);
        (state.traffic, state.last_read) = (0, Instant::now());
        self.traffic.store(0, Ordering::Relaxed);
        self.waiting.store(0, Ordering::Relaxed);
        self.works.store(false, Ordering::Relaxed);
        true
    }

    /// Opens a stream. At rest it takes nothing yet, but checks that there would be enough, also for the
    /// largest frame.
    pub fn open_stream(self: &Arc<Self>, bytes: u64, frame: u64) -> Result<StreamBudget> {
        let mut state = self.state();
        let needed = WORK_BYTES + state.streams + bytes;
        if self.works.load(Ordering::Relaxed) {
            let needed = self.at_rest + needed + state.traffic;
            state.charge.grow_to(needed)?;
        } else {
            drop(self.meter.take(Purpose::Connections, needed + frame.min(self.window))?);
        }
        state.streams += bytes;
        Ok(StreamBudget { budget: self.clone(), bytes })
    }

    /// Charge for messages that arrive in parts, on a connection whose bytes are counted when they are used;
    /// empty at first.
    pub fn parts(&self) -> Result<Charge> {
        self.counts_used.store(true, Ordering::Relaxed);
        self.meter.take(Purpose::Backlog, 0)
    }
}

impl Drop for StreamBudget {
    fn drop(&mut self) {
        let budget = &self.budget;
        let mut state = budget.state();
        state.streams -= self.bytes;
        if budget.works.load(Ordering::Relaxed) {
            let needed = budget.at_rest + WORK_BYTES + state.streams + state.traffic;
            state.charge.shrink_to(needed);
        }
    }
}

async fn rest_when_quiet(budget: Weak<MemoryBudget>) {
    loop {
        tokio::time::sleep(REST_AFTER).await;
        if budget.upgrade().is_none_or(|budget| budget.rest()) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_is_charged_for_the_bytes_that_arrive_up_to_its_window() {
        const WINDOW: u64 = 1 << 20;
        let meter = Meter::new(1 << 30);
        let budget = MemoryBudget::take(&meter, WorkerRoom(0), 100, WINDOW).unwrap();
        let charged = || meter.used();
        assert_eq!(charged(), 100);
        budget.passed(READ_AT_REST_BYTES);
        for (arriving, traffic) in [(0, 1000), (5000, 5000), (2 * WINDOW, WINDOW)] {
            budget.arrives(arriving);
            assert_eq!(budget.admit(1000).unwrap(), 1000);
            assert_eq!(charged(), 100 + WORK_BYTES + traffic);
        }
    }

    #[tokio::test]
    async fn a_worker_takes_nothing_that_is_kept_for_another_one() {
        const FRAME: u64 = MAX_FRAME as u64;
        let room = WorkerRoom(2);
        for spare in [0, FRAME, 5 * FRAME] {
            let meter = Meter::new(2 * (WORKER_BYTES + FRAME) + 3 * FRAME + spare);
            let _slices = meter.take(Purpose::Slices, 3 * FRAME).unwrap();
            let workers =
                [(); 2].map(|()| MemoryBudget::take(&meter, room, AT_REST_BYTES, 4 * FRAME).unwrap());
            for worker in &workers {
                let _parts = worker.parts().unwrap();
                worker.passed(READ_AT_REST_BYTES);
                for frames in 1..=4 {
                    worker.arrives(FRAME);
                    let backlog = (frames - 1) * FRAME;
                    let fits = meter.used_for(Purpose::Backlog) + FRAME <= spare || backlog == 0;
                    assert_eq!(worker.admit(1000).is_ok(), fits, "frame {frames}, {spare} bytes to spare");
                    if !fits {
                        // It waits until it has used the frame.
                        worker.used(FRAME);
                        assert!(worker.admit(1000).is_ok());
                    }
                }
            }
            // What it has received fills no room either, so that neither tensors nor rings take the other's.
            assert!(
                room.free_beside(&meter, MoreSlices::default()) <= spare - meter.used_for(Purpose::Backlog)
            );
        }
    }

    #[tokio::test]
    async fn a_connection_that_has_come_to_rest_reads_a_few_bytes_without_a_charge() {
        let meter = Meter::new(1 << 30);
        let budget = MemoryBudget::take(&meter, WorkerRoom(0), 100, 1 << 20).unwrap();
        let charged = || meter.used_for(Purpose::Connections);
        for _ in 0..2 {
            assert_eq!((budget.admit(1000).unwrap(), charged()), (1000, 100));
            budget.passed(READ_AT_REST_BYTES + 1);
            budget.admit(1000).unwrap();
            assert!(charged() > 100);
            assert!(!budget.rest(), "it was not quiet");
            assert!(budget.rest());
            assert_eq!(charged(), 100);
        }
    }
}
