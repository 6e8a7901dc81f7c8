//! Connections that have not begun yet. Nothing is counted for them, so their number is limited, in all and per address. Where
//! there are too many, the oldest one that has sent nothing gives way to a new one. Until one may be asked to, the new one waits, so
//! many honest clients that come at once are all served.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Most connections that have not begun, and most of them from one address.
const MOST: usize = 512;
const SHARE: usize = 256;
/// How long a connection may take to send its first byte.
const FIRST_BYTE: Duration = Duration::from_secs(1);
/// A connection that has been silent for so long may have to give way: what it has sent would have been seen by now.
const SILENT: Duration = Duration::from_millis(250);
/// One that has sent something and takes longer than this may have to, too.
const SLOW: Duration = Duration::from_secs(1);

/// The connections of one shard that have not begun.
#[derive(Debug, Default)]
pub(crate) struct Openings {
    table: Mutex<Table>,
    /// A connection has left.
    left: Notify,
}

#[derive(Debug, Default)]
struct Table {
    last: u64,
    /// In the order of their arrival.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    source: IpAddr,
    since: Instant,
    silent: bool,
    leave: Arc<Notify>,
}

/// The place of one connection until it has begun.
#[derive(Debug)]
pub(crate) struct Place {
    openings: Arc<Openings>,
    number: u64,
    leave: Arc<Notify>,
}

impl Openings {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection from this address (`None`: from this machine, by a Unix socket), as soon as there is one.
    pub(crate) async fn enter(self: &Arc<Self>, address: Option<IpAddr>) -> Place {
        let source = source(address);
        loop {
            match self.try_enter(source) {
                Ok(place) => return place,
                Err(until) => drop(tokio::time::timeout_at(until.into(), self.left.notified()).await),
            }
        }
    }

    /// A place, or when another connection will have to give way for it at the latest.
    fn try_enter(self: &Arc<Self>, source: IpAddr) -> Result<Place, Instant> {
        let mut table = self.table();
        let same = table.entries.iter().filter(|entry| entry.source == source).count();
        if same >= SHARE || table.entries.len() >= MOST {
            let (victim, from) = table.next_to_leave((same >= SHARE).then_some(source));
            if from > Instant::now() {
                return Err(from);
            }
            table.entries.remove(victim).leave.notify_one();
        }
        table.last += 1;
        let (number, leave) = (table.last, Arc::new(Notify::new()));
        table.entries.push(Entry {
            number,
            source,
            since: Instant::now(),
            silent: true,
            leave: leave.clone(),
        });
        Ok(Place { openings: self.clone(), number, leave })
    }
}

impl Table {
    fn find(&self, number: u64) -> Result<usize, usize> {
        self.entries.binary_search_by_key(&number, |entry| entry.number)
    }

    /// Who gives way next, among those from one source or among all, and from when on: the oldest silent one, or else the oldest.
    fn next_to_leave(&self, source: Option<IpAddr>) -> (usize, Instant) {
        let concerned = |entry: &Entry| source.is_none_or(|source| entry.source == source);
        let first = |silent: bool, after: Duration| {
            let index = self.entries.iter().position(|entry| concerned(entry) && (entry.silent || !silent));
            index.map(|index| (index, self.entries[index].since + after))
        };
        let (now, both) = (Instant::now(), [first(true, SILENT), first(false, SLOW)]);
        let mut due = both.into_iter().flatten().filter(|(_, from)| *from <= now);
        due.next().or_else(|| both.into_iter().flatten().min_by_key(|next| next.1)).unwrap_or((0, now))
    }
}

impl Place {
    /// The first byte of the connection, not taken from it; `None`: it does not come in time.
    pub(crate) async fn first_byte(&self, tcp: &TcpStream) -> Option<u8> {
        let mut first = [0];
        let read = tokio::time::timeout(FIRST_BYTE, tcp.peek(&mut first)).await;
        let Ok(Ok(1)) = read else { return None };
        self.has_spoken();
        Some(first[0])
    }

    /// The connection is not silent.
    pub(crate) fn has_spoken(&self) {
        let mut table = self.openings.table();
        if let Ok(index) = table.find(self.number) {
            table.entries[index].silent = false;
        }
    }

    /// Returns when the connection must give way to another one.
    pub(crate) async fn gives_way(&self) {
        self.leave.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = self.openings.table();
        if let Ok(index) = table.find(self.number) {
            table.entries.remove(index);
            self.openings.left.notify_one();
        }
    }
}

/// What counts as one address: a host commonly has a whole IPv6 network of 64 bits. Unix sockets are one together.
fn source(address: Option<IpAddr>) -> IpAddr {
    match address.map(|address| address.to_canonical()) {
        Some(IpAddr::V6(address)) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        Some(address @ IpAddr::V4(_)) => address,
        None => Ipv6Addr::UNSPECIFIED.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const ONE: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
    const OTHER: Option<IpAddr> = Some(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)));

    async fn fill(openings: &Arc<Openings>, from: Option<IpAddr>, n: usize, silent: bool) -> Vec<Place> {
        let mut places = Vec::new();
        for _ in 0..n {
            let place = openings.enter(from).await;
            if !silent {
                place.has_spoken();
            }
            places.push(place);
        }
        places
    }

    /// As if those from this one on had come earlier.
    fn age(openings: &Openings, from: usize, by: Duration) {
        openings.table().entries[from..].iter_mut().for_each(|entry| entry.since -= by);
    }

    async fn must_leave(place: &Place) -> bool {
        tokio::time::timeout(Duration::ZERO, place.gives_way()).await.is_ok()
    }

    #[tokio::test]
    async fn the_oldest_silent_one_gives_way() {
        let openings = Arc::new(Openings::default());
        let spoken = fill(&openings, ONE, 3, false).await;
        let silent = fill(&openings, ONE, SHARE - 3, true).await;
        age(&openings, 0, SILENT);
        let _new = openings.enter(ONE).await;
        assert!(must_leave(&silent[0]).await && !must_leave(&silent[1]).await);
        for place in &spoken {
            assert!(!must_leave(place).await);
        }
        drop(silent);
        assert_eq!(openings.table().entries.len(), 4);
    }

    #[tokio::test]
    async fn an_address_has_a_share_and_takes_nothing_from_the_others() {
        let openings = Arc::new(Openings::default());
        let one = fill(&openings, ONE, SHARE, true).await;
        let others = fill(&openings, OTHER, SHARE, true).await;
        // Its own are younger, and it waits for one of them although others are due.
        age(&openings, SHARE, SILENT);
        let _new = openings.enter(ONE).await;
        assert!(must_leave(&one[0]).await && !must_leave(&others[0]).await);
        // All places are taken: the oldest silent one goes, whose ever it is.
        let _new = openings.enter(None).await;
        assert!(must_leave(&one[1]).await && !must_leave(&others[0]).await);
    }

    #[tokio::test]
    async fn slow_ones_give_way_where_none_is_silent() {
        let openings = Arc::new(Openings::default());
        let slow = fill(&openings, None, SHARE, false).await;
        age(&openings, 0, SLOW);
        let _new = openings.enter(None).await;
        assert!(must_leave(&slow[0]).await && !must_leave(&slow[1]).await);
    }

    #[tokio::test]
    async fn a_new_one_waits_for_a_place_that_becomes_free() {
        let openings = Arc::new(Openings::default());
        let mut young = fill(&openings, ONE, SHARE, false).await;
        let mut entering = Box::pin(openings.enter(ONE));
        assert!(tokio::time::timeout(Duration::ZERO, &mut entering).await.is_err());
        drop(young.pop());
        let _new = entering.await;
        for place in &young {
            assert!(!must_leave(place).await);
        }
    }

    #[test]
    fn a_network_of_64_bits_counts_as_one_address() {
        let same = |a: &str, b: &str| source(a.parse().ok()) == source(b.parse().ok());
        assert!(same("2001:db8::1", "2001:db8::ffff:1"));
        assert!(!same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(same("::ffff:10.0.0.1", "10.0.0.1") && !same("10.0.0.1", "10.0.0.2"));
    }
}
