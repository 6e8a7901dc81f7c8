//! Limits the connections that have not begun yet, in total and per address, since their memory is not
//! counted. At the limit the oldest silent connection, or else the longest idle one, is evicted for a new
//! one. Until one may be evicted the new one waits, in a queue of its address if that has used its share.

use crate::auth::peer::strangers::{LOCAL_SOURCE, source};
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Most connections that have not begun, in total and from one address. As many more may wait for a slot.
const MAX_OPENINGS: usize = 512;
const MAX_OPENINGS_PER_ADDRESS: usize = 256;
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
pub(crate) struct Openings {
    table: Mutex<OpeningTable>,
    /// Signals that a connection has left.
    left: Notify,
}

#[derive(Debug, Default)]
struct OpeningTable {
    last: u64,
    /// In the order of their arrival.
    entries: Vec<OpeningEntry>,
    /// The addresses of those that wait for a slot of their address's share.
    queued: Vec<IpAddr>,
    /// Set while an address below its share is waiting; it gets the next slot.
    first_waits: bool,
}

#[derive(Debug)]
struct OpeningEntry {
    number: u64,
    source: IpAddr,
    /// Time of its arrival, or of its last bytes.
    since: Instant,
    silent: bool,
    leave: Arc<Notify>,
}

/// Reason for a missing slot.
enum Full {
    /// The address has used its share.
    Share,
    /// The table is full. Holds the time at which an entry can be evicted.
    All(Instant),
}

/// Outcome of an admission.
#[derive(Debug)]
pub(crate) enum Entrance {
    /// A slot.
    Open(OpeningSlot),
    /// A slot as soon as its address has one.
    Queue(Queued),
}

/// A connection that waits for a slot of its address's share.
#[derive(Debug)]
pub(crate) struct Queued {
    openings: Arc<Openings>,
    source: IpAddr,
}

/// The slot of one connection until it has begun.
#[derive(Debug)]
pub(crate) struct OpeningSlot {
    openings: Arc<Openings>,
    number: u64,
    leave: Arc<Notify>,
}

impl Openings {
    fn table(&self) -> MutexGuard<'_, OpeningTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection from this address (`None`: a Unix socket). Waits only while all addresses together
    /// have too many. `None` if too many of this address wait already.
    pub(crate) async fn enter(self: &Arc<Self>, address: Option<IpAddr>) -> Option<Entrance> {
        let source = source(address);
        loop {
            let until = match self.look(source) {
                Ok(entrance) => return entrance,
                Err(until) => until,
            };
            drop(tokio::time::timeout_at(until.into(), self.left.notified()).await);
        }
    }

    /// Tries to admit a connection; `Err` holds the time to retry.
    fn look(self: &Arc<Self>, source: IpAddr) -> Result<Option<Entrance>, Instant> {
        let mut table = self.table();
        let entered = self.try_enter(&mut table, source);
        if source != LOCAL_SOURCE {
            table.first_waits = matches!(entered, Err(Full::All(_)));
        }
        match entered {
            Ok(slot) => Ok(Some(Entrance::Open(slot))),
            Err(Full::Share) => Ok(self.queue(&mut table, source)),
            Err(Full::All(until)) => Err(until),
        }
    }

    fn queue(self: &Arc<Self>, table: &mut OpeningTable, source: IpAddr) -> Option<Entrance> {
        let same = table.queued.iter().filter(|queued| **queued == source).count();
        if same >= MAX_OPENINGS_PER_ADDRESS || table.queued.len() >= MAX_OPENINGS {
            return None;
        }
        table.queued.push(source);
        Some(Entrance::Queue(Queued { openings: self.clone(), source }))
    }

    fn try_enter(self: &Arc<Self>, table: &mut OpeningTable, source: IpAddr) -> Result<OpeningSlot, Full> {
        let same = table.entries.iter().filter(|entry| entry.source == source).count();
        let remote = table.entries.iter().filter(|entry| entry.source != LOCAL_SOURCE).count();
        if same >= MAX_OPENINGS_PER_ADDRESS {
            table.make_way(|entry| entry.source == source).map_err(|_| Full::Share)?;
        } else if source != LOCAL_SOURCE && remote >= MAX_OPENINGS {
            table.make_way(|entry| entry.source != LOCAL_SOURCE).map_err(Full::All)?;
        }
        table.last += 1;
        let (number, leave) = (table.last, Arc::new(Notify::new()));
        table.entries.push(OpeningEntry {
            number,
            source,
            since: Instant::now(),
            silent: true,
            leave: leave.clone(),
        });
        Ok(OpeningSlot { openings: self.clone(), number, leave })
    }
}

impl OpeningTable {
    fn find(&self, number: u64) -> Result<usize, usize> {
        self.entries.binary_search_by_key(&number, |entry| entry.number)
    }

    /// Evicts one of these; `Err` holds the time at which one can be evicted.
    fn make_way(&mut self, concerned: impl Fn(&OpeningEntry) -> bool) -> Result<(), Instant> {
        let (victim, from) = self.next_to_leave(concerned);
        if from > Instant::now() {
            return Err(from);
        }
        self.entries.remove(victim).leave.notify_one();
        Ok(())
    }

    /// The next of these to evict, and the time: the oldest silent one, or else the one idle longest.
    fn next_to_leave(&self, concerned: impl Fn(&OpeningEntry) -> bool) -> (usize, Instant) {
        let first = |silent: bool, after: Duration| {
            let these = self.entries.iter().enumerate();
            let these = these.filter(|(_, entry)| concerned(entry) && (entry.silent || !silent));
            these.map(|(index, entry)| (index, entry.since + after)).min_by_key(|next| next.1)
        };
        let (now, both) = (Instant::now(), [first(true, SILENT_AFTER), first(false, IDLE_AFTER)]);
        let mut due = both.into_iter().flatten().filter(|(_, from)| *from <= now);
        due.next().or_else(|| both.into_iter().flatten().min_by_key(|next| next.1)).unwrap_or((0, now))
    }
}

impl Entrance {
    /// Waits for the slot; `None` after a timeout.
    pub(crate) async fn slot(self) -> Option<OpeningSlot> {
        match self {
            Self::Open(slot) => Some(slot),
            Self::Queue(queued) => tokio::time::timeout(QUEUE_TIMEOUT, queued.slot()).await.ok(),
        }
    }
}

impl Queued {
    async fn slot(self) -> OpeningSlot {
        loop {
            if let Some(slot) = self.try_slot() {
                return slot;
            }
            tokio::time::sleep(QUEUE_CHECK_INTERVAL).await;
        }
    }

    fn try_slot(&self) -> Option<OpeningSlot> {
        let mut table = self.openings.table();
        if table.first_waits && self.source != LOCAL_SOURCE {
            return None;
        }
        self.openings.try_enter(&mut table, self.source).ok()
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        let mut table = self.openings.table();
        if let Some(index) = table.queued.iter().position(|queued| *queued == self.source) {
            table.queued.swap_remove(index);
        }
    }
}

impl OpeningSlot {
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
        self.update(|entry| (entry.since, entry.silent) = (Instant::now(), false));
    }

    /// Runs the start of the connection. Each wake-up means that the peer has sent something.
    pub(crate) async fn watch<T>(&self, opening: impl Future<Output = T>) -> T {
        let mut opening = pin!(opening);
        poll_fn(|cx| {
            self.update(|entry| {
                if !entry.silent {
                    entry.since = Instant::now();
                }
            });
            opening.as_mut().poll(cx)
        })
        .await
    }

    fn update(&self, change: impl FnOnce(&mut OpeningEntry)) {
        let mut table = self.openings.table();
        if let Ok(index) = table.find(self.number) {
            change(&mut table.entries[index]);
        }
    }

    /// Returns when the connection is evicted.
    pub(crate) async fn gives_way(&self) {
        self.leave.notified().await;
    }
}

impl Drop for OpeningSlot {
    fn drop(&mut self) {
        let mut table = self.openings.table();
        if let Ok(index) = table.find(self.number) {
            table.entries.remove(index);
            self.openings.left.notify_one();
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

    async fn enter(openings: &Arc<Openings>, from: Option<IpAddr>) -> OpeningSlot {
        openings.enter(from).await.unwrap().slot().await.unwrap()
    }

    async fn fill(
        openings: &Arc<Openings>,
        from: Option<IpAddr>,
        n: usize,
        silent: bool,
    ) -> Vec<OpeningSlot> {
        let mut slots = Vec::new();
        for _ in 0..n {
            let slot = enter(openings, from).await;
            if !silent {
                slot.has_spoken();
            }
            slots.push(slot);
        }
        slots
    }

    /// Ages the entries from this one on.
    fn age(openings: &Openings, from: usize, by: Duration) {
        openings.table().entries[from..].iter_mut().for_each(|entry| entry.since -= by);
    }

    async fn must_leave(slot: &OpeningSlot) -> bool {
        tokio::time::timeout(Duration::ZERO, slot.gives_way()).await.is_ok()
    }

    #[tokio::test]
    async fn the_oldest_silent_one_gives_way() {
        let openings = Arc::new(Openings::default());
        let spoken = fill(&openings, ONE, 3, false).await;
        let silent = fill(&openings, ONE, MAX_OPENINGS_PER_ADDRESS - 3, true).await;
        age(&openings, 0, SILENT_AFTER);
        let _new = enter(&openings, ONE).await;
        assert!(must_leave(&silent[0]).await && !must_leave(&silent[1]).await);
        for slot in &spoken {
            assert!(!must_leave(slot).await);
        }
        drop(silent);
        assert_eq!(openings.table().entries.len(), 4);
    }

    #[tokio::test]
    async fn an_address_has_a_share_and_takes_nothing_from_the_others() {
        let openings = Arc::new(Openings::default());
        let one = fill(&openings, ONE, MAX_OPENINGS_PER_ADDRESS, true).await;
        let others = fill(&openings, OTHER, MAX_OPENINGS_PER_ADDRESS, true).await;
        // Its own are younger, and it waits for one of them although others are due.
        age(&openings, MAX_OPENINGS_PER_ADDRESS, SILENT_AFTER);
        let _new = enter(&openings, ONE).await;
        assert!(must_leave(&one[0]).await && !must_leave(&others[0]).await);
        // All slots are taken: the oldest silent one goes, whose ever it is.
        let _new = enter(&openings, THIRD).await;
        assert!(must_leave(&others[0]).await && !must_leave(&one[1]).await);
    }

    #[tokio::test]
    async fn the_one_that_has_been_idle_longest_gives_way_where_none_is_silent() {
        let openings = Arc::new(Openings::default());
        let spoken = fill(&openings, ONE, MAX_OPENINGS_PER_ADDRESS, false).await;
        age(&openings, 0, 2 * IDLE_AFTER);
        spoken[1..].iter().for_each(OpeningSlot::has_spoken);
        let _new = enter(&openings, ONE).await;
        assert!(must_leave(&spoken[0]).await && !must_leave(&spoken[1]).await);
        // The others are old as well, and have just sent something.
        assert!(matches!(openings.enter(ONE).await, Some(Entrance::Queue(_))));
    }

    #[tokio::test]
    async fn what_comes_while_a_connection_begins_is_noticed() {
        let openings = Arc::new(Openings::default());
        let slots = fill(&openings, ONE, 2, false).await;
        let mut begins = Box::pin(slots[0].watch(std::future::pending::<()>()));
        age(&openings, 0, IDLE_AFTER);
        assert!(tokio::time::timeout(Duration::ZERO, &mut begins).await.is_err());
        let table = openings.table();
        assert!(
            table.entries[0].since.elapsed() < IDLE_AFTER && table.entries[1].since.elapsed() >= IDLE_AFTER
        );
    }

    #[tokio::test]
    async fn an_address_that_has_its_share_keeps_no_other_one_waiting() {
        let openings = Arc::new(Openings::default());
        for from in [ONE, None] {
            let _young = fill(&openings, from, MAX_OPENINGS_PER_ADDRESS, false).await;
            let mut queued = Vec::new();
            for _ in 0..MAX_OPENINGS_PER_ADDRESS {
                let entrance = openings.enter(from).now_or_never().unwrap();
                assert!(matches!(entrance, Some(Entrance::Queue(_))));
                queued.push(entrance);
            }
            assert!(openings.enter(from).now_or_never().unwrap().is_none(), "too many wait");
            let other = openings.enter(OTHER).now_or_never().unwrap();
            assert!(matches!(other, Some(Entrance::Open(_))));
        }
        assert!(openings.table().queued.is_empty());
    }

    #[tokio::test]
    async fn a_new_one_waits_for_a_place_that_becomes_free() {
        let openings = Arc::new(Openings::default());
        let mut young = fill(&openings, ONE, MAX_OPENINGS_PER_ADDRESS, false).await;
        let mut entering = Box::pin(openings.enter(ONE).await.unwrap().slot());
        assert!((&mut entering).now_or_never().is_none());
        drop(young.pop());
        let _new = entering.await.unwrap();
        for slot in &young {
            assert!(!must_leave(slot).await);
        }
    }

    #[tokio::test]
    async fn where_all_are_too_many_an_address_with_a_share_left_is_first() {
        let openings = Arc::new(Openings::default());
        let mut one = fill(&openings, ONE, MAX_OPENINGS_PER_ADDRESS, false).await;
        let _others = fill(&openings, OTHER, MAX_OPENINGS_PER_ADDRESS, false).await;
        let mut queued = Box::pin(openings.enter(ONE).await.unwrap().slot());
        assert!((&mut queued).now_or_never().is_none());
        let mut first = Box::pin(openings.enter(THIRD));
        assert!((&mut first).now_or_never().is_none());
        // Unix sockets have a separate share.
        let _local = enter(&openings, None).await;
        drop(one.pop());
        assert!(tokio::time::timeout(2 * QUEUE_CHECK_INTERVAL, &mut queued).await.is_err());
        assert!(matches!(first.await, Some(Entrance::Open(_))));
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
