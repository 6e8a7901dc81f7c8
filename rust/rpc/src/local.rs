//! The Unix socket beside each port, for clients of the same user on the same machine.
//!
//! Its name is the server's incarnation, so a client to which a server has said hello over the network can look whether
//! that very server has a socket here. The name is an abstract one (Linux): no file, so however its server ends, nothing is
//! left behind. Anybody on the machine may knock, so both ends ask the system who the other is.

use std::io::{Error, ErrorKind, Result};
use tokio::net::{UnixListener, UnixStream};

/// Begins the names that clients look for.
pub(crate) const PREFIX: &str = "fastps";

/// A server's socket.
#[derive(Debug)]
pub(crate) struct Local(UnixListener);

impl Local {
    pub(crate) fn open(prefix: &str, server: u64) -> Result<Self> {
        UnixListener::bind(name(prefix, server)).map(Self)
    }

    /// The next connection of this user; those of others are closed.
    pub(crate) async fn accept(&self) -> Result<UnixStream> {
        loop {
            let (stream, _) = self.0.accept().await?;
            match is_ours(&stream) {
                Ok(()) => return Ok(stream),
                Err(error) => tracing::debug!(%error, "a connection to the Unix socket is closed"),
            }
        }
    }
}

/// Connects to the server of this incarnation, if it runs here, for this user.
pub(crate) async fn connect(server: u64) -> Result<UnixStream> {
    let stream = UnixStream::connect(name(PREFIX, server)).await?;
    is_ours(&stream)?;
    Ok(stream)
}

/// Elsewhere than on Linux this is no valid path.
fn name(prefix: &str, server: u64) -> String {
    format!("\0{prefix}-{server:016x}")
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

    #[tokio::test]
    async fn a_socket_is_found_by_its_server_and_goes_with_it() {
        let server = 0x7e57 << 32 | u64::from(std::process::id());
        assert!(connect(server).await.is_err());
        let local = Local::open(PREFIX, server).unwrap();
        assert!(Local::open(PREFIX, server).is_err());
        let (client, accepted) = tokio::join!(connect(server), local.accept());
        assert!(client.is_ok() && accepted.is_ok());
        assert!(connect(server + 1).await.is_err());
        drop(local);
        assert!(connect(server).await.is_err());
    }
}
