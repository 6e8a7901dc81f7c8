//! The TCP sockets of a shard: one for each address of its name, such as 127.0.0.1 and `::1` for localhost,
//! all on one port.

use fastps_core::error::{Error, Kind, Result};
use rustix::io::Errno;
use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use tokio::net::TcpStream;

/// Limit on the search for a port that is free at every address.
const MAX_TRIES: usize = 20;

/// Sockets that listen; there is at least one.
#[derive(Debug)]
pub(crate) struct Listeners(Vec<TcpListener>);

impl Listeners {
    /// Listens at addresses that have the same port; port 0 takes a port that is free at all of them. Skips
    /// an address that this machine lacks, unless it lacks all.
    pub(crate) fn bind(addresses: &[SocketAddr]) -> Result<Self> {
        let mut tries = 0;
        loop {
            tries += 1;
            match Self::bind_once(addresses) {
                Ok(listeners) => return Ok(Self(listeners)),
                Err((address, error)) => {
                    let any_port = addresses.first().is_some_and(|address| address.port() == 0);
                    if error.kind() != io::ErrorKind::AddrInUse || !any_port || tries == MAX_TRIES {
                        return Err(failed(address, &error));
                    }
                }
            }
        }
    }

    fn bind_once(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>, (SocketAddr, io::Error)> {
        let (mut listeners, mut port, mut absent) = (Vec::new(), None, None);
        for address in addresses {
            let mut address = *address;
            address.set_port(port.unwrap_or(address.port()));
            match listen(address) {
                Ok((listener, taken)) => {
                    port = Some(taken);
                    listeners.push(listener);
                }
                Err(error) if is_absent(&error) => absent = Some((address, error)),
                Err(error) => return Err((address, error)),
            }
        }
        match absent {
            Some(absent) if listeners.is_empty() => Err(absent),
            _ => Ok(listeners),
        }
    }

    /// The addresses, with the port that was taken.
    pub(crate) fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        self.0.iter().map(TcpListener::local_addr).collect()
    }

    /// The same sockets, for another acceptor.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        self.0.iter().map(TcpListener::try_clone).collect::<io::Result<_>>().map(Self)
    }

    /// Must be called within a runtime.
    pub(crate) fn into_accepting(self) -> io::Result<Accepting> {
        let listeners = self.0.into_iter().map(tokio::net::TcpListener::from_std);
        Ok(Accepting { listeners: listeners.collect::<io::Result<_>>()?, turn: AtomicUsize::new(0) })
    }
}

fn listen(address: SocketAddr) -> io::Result<(TcpListener, u16)> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// Returns whether this machine lacks the address, such as `::1` without IPv6.
fn is_absent(error: &io::Error) -> bool {
    let no_family = Errno::from_io_error(error) == Some(Errno::AFNOSUPPORT);
    error.kind() == io::ErrorKind::AddrNotAvailable || no_family
}

fn failed(address: SocketAddr, error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::AddrInUse {
        let message = format!("cannot listen on {address}: the port is in use");
        return Error::new(Kind::Config, message).expected("a free port, or 0 for any", address.port());
    }
    Error::new(Kind::Config, format!("cannot listen on {address}: {error}"))
}

/// Sockets that accept connections.
#[derive(Debug)]
pub(crate) struct Accepting {
    listeners: Vec<tokio::net::TcpListener>,
    /// The socket to poll first next time, for fairness.
    turn: AtomicUsize,
}

impl Accepting {
    /// The next connection to any of them.
    pub(crate) async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let count = self.listeners.len();
        poll_fn(|cx| {
            let all = (0..count).map(|k| &self.listeners[first.wrapping_add(k) % count]);
            let accepted = all.map(|listener| listener.poll_accept(cx)).find(Poll::is_ready);
            accepted.unwrap_or(Poll::Pending)
        })
        .await
    }

    /// Returns whether other machines may reach one of them.
    pub(crate) fn is_open(&self) -> bool {
        let is_remote = |address: SocketAddr| !address.ip().is_loopback();
        self.listeners.iter().any(|listener| listener.local_addr().is_ok_and(is_remote))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> [SocketAddr; 2] {
        [([127, 0, 0, 1], port).into(), ([127, 0, 0, 2], port).into()]
    }

    #[test]
    fn all_addresses_get_one_port() {
        let listeners = Listeners::bind(&at(0)).unwrap();
        let addresses = listeners.addresses().unwrap();
        let port = addresses[0].port();
        assert!(port != 0);
        assert_eq!(addresses, at(port));
        let error = Listeners::bind(&at(port)).unwrap_err();
        assert!(error.message.contains("in use") && error.kind == Kind::Config, "{error}");
    }

    #[test]
    fn an_absent_address_is_left_out_unless_it_is_the_only_one() {
        // Of a net that is reserved for documentation.
        let absent = SocketAddr::from(([192, 0, 2, 1], 0));
        let listeners = Listeners::bind(&[absent, at(0)[0]]).unwrap();
        assert_eq!(listeners.addresses().unwrap().len(), 1);
        assert!(Listeners::bind(&[absent]).unwrap_err().message.contains("192.0.2.1"));
    }

    #[tokio::test]
    async fn connections_come_from_every_address() {
        let listeners = Listeners::bind(&at(0)).unwrap();
        let addresses = listeners.addresses().unwrap();
        let accepting = listeners.into_accepting().unwrap();
        for address in addresses {
            let (made, accepted) = tokio::join!(TcpStream::connect(address), accepting.accept());
            assert_eq!(made.unwrap().local_addr().unwrap(), accepted.unwrap().1);
        }
    }
}
