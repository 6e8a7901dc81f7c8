//! Limits the connections that have not begun yet, in total and per address, since their memory is not
//! counted. At the limit the oldest silent connection, or else the longest idle one, is evicted for a new
//! one. Until one may be evicted the new one waits, in a queue of its address if that has used its share.

use crate::admission::{AdmissionEntry, AdmissionTable, LOCAL_SOURCE, source};
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Most connections that have not begun, in total and from one address. As many more may wait for a slot.
const MAX_PENDING: usize = 512;
const MAX_PENDING_PER_ADDRESS: usize = 256;
/// How long a connection may take to send its first byte.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(1);
/// Evict a connection that has sent nothing for this long.
const SILENT_AFTER: Duration = Duration::from_millis(250);
/// Evict a connection that has sent something, then nothing for this long.
const IDLE_AFTER: Duration = Duration::from_secs(1);
/// How long a connection may wait for a slot of its address's share, and how often it looks for one.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(10);
const QUEUE_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The connections of one shard that have not begun.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    table: Mutex<PendingTable>,
    /// Signals that a connection has left.
    left: Notify,
}

#[derive(Debug, Default)]
struct PendingTable {
    connections: AdmissionTable<PendingState>,
    /// The addresses of those that wait for a slot of their address's share.
    queued: Vec<IpAddr>,
    /// Set while an address below its share is waiting; it gets the next slot.
    first_waits: bool,
}

/// An entry's time is that of its arrival, or of its last bytes.
#[derive(Debug, Default)]
struct PendingState {
    silent: bool,
    leave: Arc<Notify>,
}

type PendingEntry = AdmissionEntry<PendingState>;

/// Reason for a missing slot.
enum Full {
    /// The address has used its share.
    Share,
    /// The table is full. Holds the time at which an entry can be evicted.
    All(Instant),
}

/// Outcome of an admission.
#[derive(Debug)]
pub(crate) enum Admitted {
    /// A slot.
    Open(PendingSlot),
    /// A slot as soon as its address has one.
    Queue(Queued),
}

/// A connection that waits for a slot of its address's share.
#[derive(Debug)]
pub(crate) struct Queued {
    pending: Arc<Pending>,
    source: IpAddr,
}

/// The slot of one connection until it has begun.
#[derive(Debug)]
pub(crate) struct PendingSlot {
    pending: Arc<Pending>,
    number: u64,
    leave: Arc<Notify>,
}

impl Pending {
    fn table(&self) -> MutexGuard<'_, PendingTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection from this address (`None`: a Unix socket). Waits only while all addresses together
    /// have too many. `None` if too many of this address wait already.
    pub(crate) async fn enter(self: &Arc<Self>, address: Option<IpAddr>) -> Option<Admitted> {
        let source = source(address);
        loop {
            let until = match self.look(source) {
                Ok(admitted) => return admitted,
                Err(until) => until,
            };
            drop(tokio::time::timeout_at(until.into(), self.left.notified()).await);
        }
    }

    /// Tries to admit a connection; `Err` holds the time to retry.
    fn look(self: &Arc<Self>, source: IpAddr) -> Result<Option<Admitted>, Instant> {
        let mut table = self.table();
        let entered = self.try_enter(&mut table, source);
        if source != LOCAL_SOURCE {
            table.first_waits = matches!(entered, Err(Full::All(_)));
        }
        match entered {
            Ok(slot) => Ok(Some(Admitted::Open(slot))),
            Err(Full::Share) => Ok(self.queue(&mut table, source)),
            Err(Full::All(until)) => Err(until),
        }
    }

    fn queue(self: &Arc<Self>, table: &mut PendingTable, source: IpAddr) -> Option<Admitted> {
        let same = table.queued.iter().filter(|queued| **queued == source).count();
        if same >= MAX_PENDING_PER_ADDRESS || table.queued.len() >= MAX_PENDING {
            return None;
        }
        table.queued.push(source);
        Some(Admitted::Queue(Queued { pending: self.clone(), source }))
    }

    fn try_enter(self: &Arc<Self>, table: &mut PendingTable, source: IpAddr) -> Result<PendingSlot, Full> {
        let entries = &table.connections.entries;
        let same = entries.iter().filter(|entry| entry.source == source).count();
        let remote = entries.iter().filter(|entry| entry.source != LOCAL_SOURCE).count();
        if same >= MAX_PENDING_PER_ADDRESS {
            table.make_way(|entry| entry.source == source).map_err(|_| Full::Share)?;
        } else if source != LOCAL_SOURCE && remote >= MAX_PENDING {
            table.make_way(|entry| entry.source != LOCAL_SOURCE).map_err(Full::All)?;
        }
        let leave = Arc::new(Notify::new());
        let state = PendingState { silent: true, leave: leave.clone() };
        let number = table.connections.enter(source, Instant::now(), state);
        Ok(PendingSlot { pending: self.clone(), number, leave })
    }
}

impl PendingTable {
    /// Evicts one of these; `Err` holds the time at which one can be evicted.
    fn make_way(&mut self, concerned: impl Fn(&PendingEntry) -> bool) -> Result<(), Instant> {
        let (victim, from) = self.next_to_leave(concerned);
        if from > Instant::now() {
            return Err(from);
        }
        self.connections.entries.remove(victim).state.leave.notify_one();
        Ok(())
    }

    /// The next of these to evict, and the time: the oldest silent one, or else the one idle longest.
    fn next_to_leave(&self, concerned: impl Fn(&PendingEntry) -> bool) -> (usize, Instant) {
        let first = |silent: bool, after: Duration| {
            let these = self.connections.entries.iter().enumerate();
            let these = these.filter(|(_, entry)| concerned(entry) && (entry.state.silent || !silent));
            these.map(|(index, entry)| (index, entry.since + after)).min_by_key(|next| next.1)
        };
        let (now, both) = (Instant::now(), [first(true, SILENT_AFTER), first(false, IDLE_AFTER)]);
        let mut due = both.into_iter().flatten().filter(|(_, from)| *from <= now);
        due.next().or_else(|| both.into_iter().flatten().min_by_key(|next| next.1)).unwrap_or((0, now))
    }
}

impl Admitted {
    /// Waits for the slot; `None` after a timeout.
    pub(crate) async fn slot(self) -> Option<PendingSlot> {
        match self {
            Self::Open(slot) => Some(slot),
            Self::Queue(queued) => tokio::time::timeout(QUEUE_TIMEOUT, queued.slot()).await.ok(),
        }
    }
}

impl Queued {
    async fn slot(self) -> PendingSlot {
        loop {
            if let Some(slot) = self.try_slot() {
                return slot;
            }
            tokio::time::sleep(QUEUE_CHECK_INTERVAL).await;
        }
    }

    fn try_slot(&self) -> Option<PendingSlot> {
        let mut table = self.pending.table();
        if table.first_waits && self.source != LOCAL_SOURCE {
            return None;
        }
        self.pending.try_enter(&mut table, self.source).ok()
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        let mut table = self.pending.table();
        if let Some(index) = table.queued.iter().position(|queued| *queued == self.source) {
            table.queued.swap_remove(index);
        }
    }
}

impl PendingSlot {
    /// Peeks at the first byte of the connection; `None` after a timeout.
    pub(crate) async fn first_byte(&self, tcp: &TcpStream) -> Option<u8> {
        let mut first = [0];
        let read = tokio::time::timeout(FIRST_BYTE_TIMEOUT, tcp.peek(&mut first)).await;
        let Ok(Ok(1)) = read else { return None };
        self.has_spoken();
        Some(first[0])
    }

    /// Marks the connection as not silent.
    pub(crate) fn has_spoken(&self) {
        self.update(|entry| (entry.since, entry.state.silent) = (Instant::now(), false));
    }

    /// Runs the start of the connection. Each wake-up means that the peer has sent something.
    pub(crate) async fn watch<T>(&self, opening: impl Future<Output = T>) -> T {
        let mut opening = pin!(opening);
        poll_fn(|cx| {
            self.update(|entry| {
                if !entry.state.silent {
                    entry.since = Instant::now();
                }
            });
            opening.as_mut().poll(cx)
        })
        .await
    }

    fn update(&self, change: impl FnOnce(&mut PendingEntry)) {
        if let Some(entry) = self.pending.table().connections.get_mut(self.number) {
            change(entry);
        }
    }

    /// Returns when the connection is evicted.
    pub(crate) async fn gives_way(&self) {
        self.leave.notified().await;
    }
}

impl Drop for PendingSlot {
    fn drop(&mut self) {
        if self.pending.table().connections.leave(self.number).is_some() {
            self.pending.left.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::net::{Ipv4Addr, Ipv6Addr};

    const ONE: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
    const OTHER: Option<IpAddr> = Some(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)));

    const THIRD: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)));

    async fn enter(pending: &Arc<Pending>, from: Option<IpAddr>) -> PendingSlot {
        pending.enter(from).await.unwrap().slot().await.unwrap()
    }

    async fn fill(pending: &Arc<Pending>, from: Option<IpAddr>, n: usize, silent: bool) -> Vec<PendingSlot> {
        let mut slots = Vec::new();
        for _ in 0..n {
            let slot = enter(pending, from).await;
            if !silent {
                slot.has_spoken();
            }
            slots.push(slot);
        }
        slots
    }

    /// Ages the entries from this one on.
    fn age(pending: &Pending, from: usize, by: Duration) {
        pending.table().connections.entries[from..].iter_mut().for_each(|entry| entry.since -= by);
    }

    async fn must_leave(slot: &PendingSlot) -> bool {
        tokio::time::timeout(Duration::ZERO, slot.gives_way()).await.is_ok()
    }

    #[tokio::test]
    async fn the_oldest_silent_one_gives_way() {
        let pending = Arc::new(Pending::default());
        let spoken = fill(&pending, ONE, 3, false).await;
        let silent = fill(&pending, ONE, MAX_PENDING_PER_ADDRESS - 3, true).await;
        age(&pending, 0, SILENT_AFTER);
        let _new = enter(&pending, ONE).await;
        assert!(must_leave(&silent[0]).await && !must_leave(&silent[1]).await);
        for slot in &spoken {
            assert!(!must_leave(slot).await);
        }
        drop(silent);
        assert_eq!(pending.table().connections.entries.len(), 4);
    }

    #[tokio::test]
    async fn an_address_has_a_share_and_takes_nothing_from_the_others() {
        let pending = Arc::new(Pending::default());
        let one = fill(&pending, ONE, MAX_PENDING_PER_ADDRESS, true).await;
        let others = fill(&pending, OTHER, MAX_PENDING_PER_ADDRESS, true).await;
        // Its own are younger, and it waits for one of them although others are due.
        age(&pending, MAX_PENDING_PER_ADDRESS, SILENT_AFTER);
        let _new = enter(&pending, ONE).await;
        assert!(must_leave(&one[0]).await && !must_leave(&others[0]).await);
        // All slots are taken: the oldest silent one goes, whose ever it is.
        let _new = enter(&pending, THIRD).await;
        assert!(must_leave(&others[0]).await && !must_leave(&one[1]).await);
    }

    #[tokio::test]
    async fn the_one_that_has_been_idle_longest_gives_way_where_none_is_silent() {
        let pending = Arc::new(Pending::default());
        let spoken = fill(&pending, ONE, MAX_PENDING_PER_ADDRESS, false).await;
        age(&pending, 0, 2 * IDLE_AFTER);
        spoken[1..].iter().for_each(PendingSlot::has_spoken);
        let _new = enter(&pending, ONE).await;
        assert!(must_leave(&spoken[0]).await && !must_leave(&spoken[1]).await);
        // The others are old as well, and have just sent something.
        assert!(matches!(pending.enter(ONE).await, Some(Admitted::Queue(_))));
    }

    #[tokio::test]
    async fn what_comes_while_a_connection_begins_is_noticed() {
        let pending = Arc::new(Pending::default());
        let slots = fill(&pending, ONE, 2, false).await;
        let mut begins = Box::pin(slots[0].watch(std::future::pending::<()>()));
        age(&pending, 0, IDLE_AFTER);
        assert!(tokio::time::timeout(Duration::ZERO, &mut begins).await.is_err());
        let table = pending.table();
        let entries = &table.connections.entries;
        assert!(entries[0].since.elapsed() < IDLE_AFTER && entries[1].since.elapsed() >= IDLE_AFTER);
    }

    #[tokio::test]
    async fn an_address_that_has_its_share_keeps_no_other_one_waiting() {
        let pending = Arc::new(Pending::default());
        for from in [ONE, None] {
            let _young = fill(&pending, from, MAX_PENDING_PER_ADDRESS, false).await;
            let mut queued = Vec::new();
            for _ in 0..MAX_PENDING_PER_ADDRESS {
                let admitted = pending.enter(from).now_or_never().unwrap();
                assert!(matches!(admitted, Some(Admitted::Queue(_))));
                queued.push(admitted);
            }
            assert!(pending.enter(from).now_or_never().unwrap().is_none(), "too many wait");
            let other = pending.enter(OTHER).now_or_never().unwrap();
            assert!(matches!(other, Some(Admitted::Open(_))));
        }
        assert!(pending.table().queued.is_empty());
    }

    #[tokio::test]
    async fn a_new_one_waits_for_a_place_that_becomes_free() {
        let pending = Arc::new(Pending::default());
        let mut young = fill(&pending, ONE, MAX_PENDING_PER_ADDRESS, false).await;
        let mut entering = Box::pin(pending.enter(ONE).await.unwrap().slot());
        assert!((&mut entering).now_or_never().is_none());
        drop(young.pop());
        let _new = entering.await.unwrap();
        for slot in &young {
            assert!(!must_leave(slot).await);
        }
    }

    #[tokio::test]
    async fn where_all_are_too_many_an_address_with_a_share_left_is_first() {
        let pending = Arc::new(Pending::default());
        let mut one = fill(&pending, ONE, MAX_PENDING_PER_ADDRESS, false).await;
        let _others = fill(&pending, OTHER, MAX_PENDING_PER_ADDRESS, false).await;
        let mut queued = Box::pin(pending.enter(ONE).await.unwrap().slot());
        assert!((&mut queued).now_or_never().is_none());
        let mut first = Box::pin(pending.enter(THIRD));
        assert!((&mut first).now_or_never().is_none());
        // Unix sockets have a separate share.
        let _local = enter(&pending, None).await;
        drop(one.pop());
        assert!(tokio::time::timeout(2 * QUEUE_CHECK_INTERVAL, &mut queued).await.is_err());
        assert!(matches!(first.await, Some(Admitted::Open(_))));
        drop(one.pop());
        assert!(queued.await.is_some());
    }

    #[test]
    fn a_network_of_64_bits_counts_as_one_address() {
        let same = |a: &str, b: &str| source(a.parse().ok()) == source(b.parse().ok());
        assert!(same("2001:db8::1", "2001:db8::ffff:1"));
        assert!(!same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(same("::ffff:10.0.0.1", "10.0.0.1") && !same("10.0.0.1", "10.0.0.2"));
    }
}
