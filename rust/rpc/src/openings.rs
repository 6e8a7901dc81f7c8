//! Connections that have not begun yet. Nothing is counted for them, so their number is limited, in all and per address. Where
//! there are too many, the oldest one that has sent nothing gives way to a new one.

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
/// One that has sent something and takes longer than this may have to give way, too.
const SLOW: Duration = Duration::from_secs(1);

/// The connections of one shard that have not begun.
#[derive(Debug, Default)]
pub(crate) struct Openings(Mutex<Table>);

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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection from this address (`None`: from this machine, by a Unix socket); `None`: there is none.
    pub(crate) async fn enter(self: &Arc<Self>, address: Option<IpAddr>) -> Option<Place> {
        if let Some(place) = self.try_enter(address, false) {
            return Some(place);
        }
        // Connections that were accepted with this one get their chance to show that they are not silent.
        tokio::task::yield_now().await;
        self.try_enter(address, true)
    }

    fn try_enter(self: &Arc<Self>, address: Option<IpAddr>, push_out: bool) -> Option<Place> {
        let (source, mut table) = (source(address), self.table());
        let same = table.entries.iter().filter(|entry| entry.source == source).count();
        if same >= SHARE || table.entries.len() >= MOST {
            let of = (same >= SHARE).then_some(source);
            let victim = push_out.then(|| table.victim(of)).flatten()?;
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
        Some(Place { openings: self.clone(), number, leave })
    }
}

impl Table {
    fn find(&self, number: u64) -> Result<usize, usize> {
        self.entries.binary_search_by_key(&number, |entry| entry.number)
    }

    /// Who gives way, among those from one source or among all: the oldest silent one, or else the oldest slow one.
    fn victim(&self, source: Option<IpAddr>) -> Option<usize> {
        let mut entries = self.entries.iter().enumerate();
        let concerned = |entry: &Entry| source.is_none_or(|source| entry.source == source);
        let silent = entries.clone().find(|(_, entry)| concerned(entry) && entry.silent);
        let slow = || entries.find(|(_, entry)| concerned(entry) && entry.since.elapsed() >= SLOW);
        silent.or_else(slow).map(|(index, _)| index)
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
    const OTHERS: [Option<IpAddr>; 3] =
        [None, Some(IpAddr::V6(Ipv6Addr::LOCALHOST)), Some(IpAddr::V4(Ipv4Addr::LOCALHOST))];

    async fn fill(openings: &Arc<Openings>, from: Option<IpAddr>, n: usize, silent: bool) -> Vec<Place> {
        let mut places = Vec::new();
        for _ in 0..n {
            let place = openings.enter(from).await.unwrap();
            if !silent {
                place.has_spoken();
            }
            places.push(place);
        }
        places
    }

    async fn must_leave(place: &Place) -> bool {
        tokio::time::timeout(Duration::ZERO, place.gives_way()).await.is_ok()
    }

    #[tokio::test]
    async fn the_oldest_silent_one_gives_way() {
        let openings = Arc::new(Openings::default());
        let spoken = fill(&openings, ONE, 3, false).await;
        let silent = fill(&openings, ONE, SHARE - 3, true).await;
        let _new = openings.enter(ONE).await.unwrap();
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
        let _one = fill(&openings, ONE, SHARE, false).await;
        assert!(openings.enter(ONE).await.is_none(), "all of them are at work");
        let other = fill(&openings, OTHERS[0], 1, true).await;
        let _more = fill(&openings, OTHERS[1], SHARE - 1, true).await;
        // All places are taken: the oldest silent one goes, whose ever it is.
        let _new = openings.enter(OTHERS[2]).await.unwrap();
        assert!(must_leave(&other[0]).await);
    }

    #[tokio::test]
    async fn slow_ones_give_way_where_none_is_silent() {
        let openings = Arc::new(Openings::default());
        let slow = fill(&openings, None, SHARE, false).await;
        openings.table().entries[1].since -= SLOW;
        let _new = openings.enter(None).await.unwrap();
        assert!(must_leave(&slow[1]).await && !must_leave(&slow[0]).await);
        assert!(openings.enter(None).await.is_some(), "it is silent, and older");
    }

    #[test]
    fn a_network_of_64_bits_counts_as_one_address() {
        let same = |a: &str, b: &str| source(a.parse().ok()) == source(b.parse().ok());
        assert!(same("2001:db8::1", "2001:db8::ffff:1"));
        assert!(!same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(same("::ffff:10.0.0.1", "10.0.0.1") && !same("10.0.0.1", "10.0.0.2"));
    }
}
