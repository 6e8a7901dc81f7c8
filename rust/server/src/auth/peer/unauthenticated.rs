//! Connections whose callers have not shown who they are, where the server asks for that. They are few in
//! all, so that they cannot use up the places and the memory of known callers, and end soon. For a new one
//! the oldest of the address with the most of them gives way.

use super::ending::Ending;
use crate::admission::{AdmissionEntry, AdmissionTable, source};
use fastps_core::error::{Error, Kind};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a connection may be without a call of a known caller.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Divisor of the shard's memory that bounds the memory of these connections, at this much each.
const MEMORY_PART: u64 = 16;
const CONNECTION_BYTES: u64 = 512 << 10;
/// Bounds of their number.
const FEWEST: u64 = 16;
const MOST: u64 = 512;

/// The connections of one shard whose callers are unknown.
#[derive(Debug)]
pub(crate) struct Unauthenticated {
    most: usize,
    table: Mutex<AdmissionTable<Arc<Ending>>>,
    ended: AtomicU64,
}

type UnauthenticatedEntry = AdmissionEntry<Arc<Ending>>;

/// The place of one connection, until its caller is known.
#[derive(Debug)]
pub(crate) struct UnauthenticatedPlace {
    connections: Arc<Unauthenticated>,
    number: u64,
    known: AtomicBool,
}

impl Unauthenticated {
    /// A table for a shard with this memory.
    pub(crate) fn new(memory_limit: u64) -> Arc<Self> {
        let most = (memory_limit / MEMORY_PART / CONNECTION_BYTES).clamp(FEWEST, MOST) as usize;
        Arc::new(Self { most, table: Mutex::default(), ended: AtomicU64::new(0) })
    }

    fn table(&self) -> MutexGuard<'_, AdmissionTable<Arc<Ending>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a connection from this address a place.
    pub(crate) fn enter(
        self: &Arc<Self>,
        address: Option<IpAddr>,
        ending: &Arc<Ending>,
        now: Instant,
    ) -> UnauthenticatedPlace {
        let mut table = self.table();
        if table.entries.len() >= self.most {
            let oldest = next_to_leave(&table.entries);
            let entry = table.entries.remove(oldest);
            let why = "the connection gives way to a new one: none of its calls has shown who calls";
            let error = Error::new(Kind::Capacity, why);
            self.end(&entry, error.expected(format!("at most {} such connections", self.most), "one more"));
        }
        let number = table.enter(source(address), now, ending.clone());
        UnauthenticatedPlace { connections: self.clone(), number, known: AtomicBool::new(false) }
    }

    /// Ends those whose callers have been unknown for too long.
    pub(crate) fn sweep(&self, now: Instant) {
        let mut table = self.table();
        let is_late = |entry: &UnauthenticatedEntry| now.saturating_duration_since(entry.since) > TIMEOUT;
        while table.entries.first().is_some_and(is_late) {
            let entry = table.entries.remove(0);
            let why = "none of the connection's calls has shown who calls";
            let error = Error::new(Kind::Deadline, why);
            let expected = format!("a call with a token within {} s", TIMEOUT.as_secs());
            self.end(&entry, error.expected(expected, "none"));
        }
    }

    fn end(&self, entry: &UnauthenticatedEntry, error: Error) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        entry.state.end(error);
    }

    /// Number of connections that were ended.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }
}

/// The oldest entry of the address with the most.
fn next_to_leave(table: &[UnauthenticatedEntry]) -> usize {
    let mut counts: HashMap<IpAddr, usize> = HashMap::new();
    for entry in table {
        *counts.entry(entry.source).or_default() += 1;
    }
    let most = counts.values().max().copied().unwrap_or_default();
    table.iter().position(|entry| counts[&entry.source] == most).unwrap_or_default()
}

impl UnauthenticatedPlace {
    /// Frees the place: the caller is known.
    pub(crate) fn leave(&self) {
        if self.known.swap(true, Ordering::Relaxed) {
            return;
        }
        self.connections.table().leave(self.number);
    }
}

impl Drop for UnauthenticatedPlace {
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

    fn enter(
        table: &Arc<Unauthenticated>,
        from: Option<IpAddr>,
        now: Instant,
    ) -> (Arc<Ending>, UnauthenticatedPlace) {
        let ending = Arc::new(Ending::default());
        let place = table.enter(from, &ending, now);
        (ending, place)
    }

    #[test]
    fn the_oldest_of_the_largest_crowd_gives_way() {
        let (connections, now) = (Unauthenticated::new(0), Instant::now());
        let alone = enter(&connections, OTHER, now);
        let crowd: Vec<_> = (0..40).map(|_| enter(&connections, ONE, now)).collect();
        let ended = crowd.iter().filter(|(ending, _)| ending.reason().is_some()).count();
        assert_eq!((ended, connections.ended()), (25, 25));
        assert!(crowd[..25].iter().all(|(ending, _)| ending.reason().unwrap().kind == Kind::Capacity));
        assert!(alone.0.reason().is_none());
        assert_eq!(connections.table().entries.len(), 16);
        drop(crowd);
        assert_eq!(connections.table().entries.len(), 1);
    }

    #[test]
    fn an_unknown_caller_ends_soon_and_a_known_one_stays() {
        let (connections, start) = (Unauthenticated::new(0), Instant::now());
        let (known, late) = (enter(&connections, ONE, start), enter(&connections, ONE, start));
        let young = enter(&connections, ONE, start + TIMEOUT);
        (0..2).for_each(|_| known.1.leave());
        connections.sweep(start + TIMEOUT);
        assert_eq!(connections.ended(), 0);
        connections.sweep(start + TIMEOUT + Duration::from_millis(1));
        assert_eq!(late.0.reason().unwrap().kind, Kind::Deadline);
        assert!(known.0.reason().is_none() && young.0.reason().is_none());
        assert_eq!(connections.table().entries.len(), 1);
    }

    #[test]
    fn their_number_follows_the_memory_of_the_shard() {
        assert_eq!([0, 1 << 30, 1 << 40].map(|limit| Unauthenticated::new(limit).most), [16, 128, 512]);
    }
}
