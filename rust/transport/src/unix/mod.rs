//! The Unix sockets beside each port, for clients of the same user on the same machine.
//!
//! Each server has an abstract socket (Linux) named after its incarnation; it leaves no file behind, and a
//! client that has met the server over the network finds it by that name. A server may have a second socket
//! with a path (`unix:///path`). Both ends ask the system for the user at the other end.

mod socket_file;

pub use socket_file::{SocketFile, check as check_path};

use socket_file::Name;
use std::io::{Error, ErrorKind, Result};
use std::path::Path;
use std::task::{Context, Poll, ready};
use tokio::net::{UnixListener, UnixStream};

/// Prefix of the names that clients look for.
pub const SOCKET_PREFIX: &str = "fastps";

/// A server's socket.
#[derive(Debug)]
pub struct Local {
    /// Removed before the listener closes.
    _file: Option<Name>,
    listener: UnixListener,
}

impl Local {
    /// Listens on the abstract socket of a server with this incarnation.
    pub fn open(prefix: &str, server: u64) -> Result<Self> {
        Ok(Self { _file: None, listener: UnixListener::bind(name(prefix, server))? })
    }

    /// Listens on a socket with a path.
    pub fn at(file: SocketFile) -> Result<Self> {
        Ok(Self { _file: Some(file.name), listener: UnixListener::from_std(file.listener)? })
    }

    /// The next connection of this user; closes those of others.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<Result<UnixStream>> {
        loop {
            let (stream, _) = ready!(self.listener.poll_accept(cx))?;
            match is_ours(&stream) {
                Ok(()) => return Poll::Ready(Ok(stream)),
                Err(error) => tracing::debug!(%error, "a connection to the Unix socket is closed"),
            }
        }
    }
}

/// Connects to the socket of this name or path, if its server runs for this user.
pub async fn connect(path: impl AsRef<Path>) -> Result<UnixStream> {
    let stream = UnixStream::connect(path).await?;
    is_ours(&stream)?;
    Ok(stream)
}

/// The socket of a server that said hello. Except on Linux this is no valid path.
pub fn of(server: u64) -> String {
    name(SOCKET_PREFIX, server)
}

fn name(prefix: &str, server: u64) -> String {
    format!("\0{prefix}-{server:016x}")
}

/// The path in `unix:///path`.
pub fn path(address: &str) -> Option<&Path> {
    address.strip_prefix("unix://").map(Path::new)
}

/// The authority of requests to an address.
pub fn authority(address: &str) -> &str {
    if path(address).is_some() { "localhost" } else { address }
}

fn is_ours(stream: &UnixStream) -> Result<()> {
    let (user, other) = (rustix::process::getuid().as_raw(), stream.peer_cred()?.uid());
    if user == other {
        return Ok(());
    }
    Err(Error::new(ErrorKind::PermissionDenied, format!("the peer is user {other}, not {user}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;

    #[tokio::test]
    async fn a_socket_is_found_by_its_server_and_goes_with_it() {
        let server = 0x7e57 << 32 | u64::from(std::process::id());
        assert!(connect(of(server)).await.is_err());
        let local = Local::open(SOCKET_PREFIX, server).unwrap();
        assert!(Local::open(SOCKET_PREFIX, server).is_err());
        let (client, accepted) = tokio::join!(connect(of(server)), poll_fn(|cx| local.poll_accept(cx)));
        assert!(client.is_ok() && accepted.is_ok());
        assert!(connect(of(server + 1)).await.is_err());
        drop(local);
        assert!(connect(of(server)).await.is_err());
    }
}
