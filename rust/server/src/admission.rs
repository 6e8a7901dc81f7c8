//! Connections on their way in. Two policies say how many there may be and which one gives way to a new one:
//! `connection::pending` until a connection has begun, `auth::peer::unauthenticated` until its caller is known.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

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

/// The connections of one stage, in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct AdmissionTable<T> {
    last: u64,
    pub(crate) entries: Vec<AdmissionEntry<T>>,
}

#[derive(Debug)]
pub(crate) struct AdmissionEntry<T> {
    number: u64,
    pub(crate) source: IpAddr,
    pub(crate) since: Instant,
    pub(crate) state: T,
}

impl<T> AdmissionTable<T> {
    /// Adds a connection. Returns its number.
    pub(crate) fn enter(&mut self, source: IpAddr, since: Instant, state: T) -> u64 {
        self.last += 1;
        self.entries.push(AdmissionEntry { number: self.last, source, since, state });
        self.last
    }

    /// The entry with this number, until it has left.
    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut AdmissionEntry<T>> {
        self.find(number).map(|index| &mut self.entries[index])
    }

    /// Removes the entry with this number; `None`: it gave way.
    pub(crate) fn leave(&mut self, number: u64) -> Option<AdmissionEntry<T>> {
        self.find(number).map(|index| self.entries.remove(index))
    }

    fn find(&self, number: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&number, |entry| entry.number).ok()
    }
}
