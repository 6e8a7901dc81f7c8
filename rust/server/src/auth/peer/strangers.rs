//! Connections whose callers have not shown who they are, where the server asks for that. They are few in
//! all, so that they cannot use up the places and the memory of known callers, and end soon. For a new one
//! the oldest of the address with the most of them gives way.

use super::ending::Ending;
use fastps_core::error::{Error, Kind};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a connection may be without a call of a known caller.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Divisor of the shard's memory that bounds the memory of strangers, at `STRANGER_BYTES` each.
const MEMORY_PART: u64 = 16;
const STRANGER_BYTES: u64 = 512 << 10;
/// Bounds of their number.
const FEWEST: u64 = 16;
const MOST: u64 = 512;
/// Unix sockets count as one address.
pub(crate) const LOCAL_SOURCE: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// The network that counts as one address: a host commonly has a whole IPv6 network of 64 bits. `None`: a
/// Unix socket.
pub(crate) fn source(address: Option<IpAddr>) -> IpAddr {
    match address.map(|address| address.to_canonical()) {
        Some(IpAddr::V6(address)) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        Some(address @ IpAddr::V4(_)) => address,
        None => LOCAL_SOURCE,
    }
}

/// The strangers of one shard.
#[derive(Debug)]
pub(crate) struct Strangers {
    most: usize,
    /// In the order of their arrival.
    table: Mutex<Vec<StrangerEntry>>,
    last: AtomicU64,
    ended: AtomicU64,
}

#[derive(Debug)]
struct StrangerEntry {
    number: u64,
    source: IpAddr,
    since: Instant,
    ending: Arc<Ending>,
}

/// The place of one connection among the strangers, until its caller is known.
#[derive(Debug)]
pub(crate) struct Stranger {
    strangers: Arc<Strangers>,
    number: u64,
    known: AtomicBool,
}

impl Strangers {
    /// A table for a shard with this memory.
    pub(crate) fn new(memory_limit: u64) -> Arc<Self> {
        let most = (memory_limit / MEMORY_PART / STRANGER_BYTES).clamp(FEWEST, MOST) as usize;
        let (last, ended) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { most, table: Mutex::default(), last, ended })
    }

    fn table(&self) -> MutexGuard<'_, Vec<StrangerEntry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a connection from this address a place.
    pub(crate) fn enter(
        self: &Arc<Self>,
        address: Option<IpAddr>,
        ending: &Arc<Ending>,
        now: Instant,
    ) -> Stranger {
        let mut table = self.table();
        if table.len() >= self.most {
            let oldest = next_to_leave(&table);
            let entry = table.remove(oldest);
            let why = "the connection gives way to a new one: none of its calls has shown who calls";
            let error = Error::new(Kind::Capacity, why);
            self.end(&entry, error.expected(format!("at most {} such connections", self.most), "one more"));
        }
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        table.push(StrangerEntry { number, source: source(address), since: now, ending: ending.clone() });
        Stranger { strangers: self.clone(), number, known: AtomicBool::new(false) }
    }

    /// Ends those that have been strangers for too long.
    pub(crate) fn sweep(&self, now: Instant) {
        let mut table = self.table();
        let late = table.partition_point(|entry| now.saturating_duration_since(entry.since) > TIMEOUT);
        for entry in table.drain(..late) {
            let why = "none of the connection's calls has shown who calls";
            let error = Error::new(Kind::Deadline, why);
            let expected = format!("a call with a token within {} s", TIMEOUT.as_secs());
            self.end(&entry, error.expected(expected, "none"));
        }
    }

    fn end(&self, entry: &StrangerEntry, error: Error) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        entry.ending.end(error);
    }

    /// Number of connections that were ended.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }
}

/// The oldest entry of the address with the most.
fn next_to_leave(table: &[StrangerEntry]) -> usize {
    let mut counts: HashMap<IpAddr, usize> = HashMap::new();
    for entry in table {
        *counts.entry(entry.source).or_default() += 1;
    }
    let most = counts.values().max().copied().unwrap_or_default();
    table.iter().position(|entry| counts[&entry.source] == most).unwrap_or_default()
}

impl Stranger {
    /// Frees the place: the caller is known.
    pub(crate) fn leave(&self) {
        if self.known.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut table = self.strangers.table();
        if let Ok(index) = table.binary_search_by_key(&self.number, |entry| entry.number) {
            table.remove(index);
        }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const ONE: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
    const OTHER: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)));

    fn enter(strangers: &Arc<Strangers>, from: Option<IpAddr>, now: Instant) -> (Arc<Ending>, Stranger) {
        let ending = Arc::new(Ending::default());
        let stranger = strangers.enter(from, &ending, now);
        (ending, stranger)
    }

    #[test]
    fn the_oldest_of_the_largest_crowd_gives_way() {
        let (strangers, now) = (Strangers::new(0), Instant::now());
        let alone = enter(&strangers, OTHER, now);
        let crowd: Vec<_> = (0..40).map(|_| enter(&strangers, ONE, now)).collect();
        let ended = crowd.iter().filter(|(ending, _)| ending.reason().is_some()).count();
        assert_eq!((ended, strangers.ended()), (25, 25));
        assert!(crowd[..25].iter().all(|(ending, _)| ending.reason().unwrap().kind == Kind::Capacity));
        assert!(alone.0.reason().is_none());
        assert_eq!(strangers.table().len(), 16);
        drop(crowd);
        assert_eq!(strangers.table().len(), 1);
    }

    #[test]
    fn a_stranger_ends_soon_and_a_known_caller_stays() {
        let (strangers, start) = (Strangers::new(0), Instant::now());
        let (known, late) = (enter(&strangers, ONE, start), enter(&strangers, ONE, start));
        let young = enter(&strangers, ONE, start + TIMEOUT);
        (0..2).for_each(|_| known.1.leave());
        strangers.sweep(start + TIMEOUT);
        assert_eq!(strangers.ended(), 0);
        strangers.sweep(start + TIMEOUT + Duration::from_millis(1));
        assert_eq!(late.0.reason().unwrap().kind, Kind::Deadline);
        assert!(known.0.reason().is_none() && young.0.reason().is_none());
        assert_eq!(strangers.table().len(), 1);
    }

    #[test]
    fn their_number_follows_the_memory_of_the_shard() {
        assert_eq!([0, 1 << 30, 1 << 40].map(|limit| Strangers::new(limit).most), [16, 128, 512]);
    }
}
