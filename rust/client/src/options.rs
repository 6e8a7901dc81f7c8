//! How a client connects.

use crate::resolver::Resolver;
pub use fastps_transport::convert::Ack;
use fastps_transport::tls::TlsFiles;
use fastps_transport::wire::DEFAULT_SPIN;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How to connect.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Limit on the time to connect.
    pub timeout: Duration,
    /// Name for people: shown in the servers' statistics.
    pub name: String,
    /// Send a CRC-32C with every payload; `None` = without TLS, to servers that are not on loopback.
    pub checksums: Option<bool>,
    /// How frames reach the servers.
    pub transport: Transport,
    /// Busy-poll time of a call before it sleeps (adaptive; zero disables it).
    pub spin: Duration,
    /// TLS, if `ca` is given: the client trusts servers that it signed.
    pub tls: TlsFiles,
    /// The name that servers' certificates must have; `None` = the host of the server's address.
    pub tls_server_name: Option<String>,
    /// The file of the token to show, which is read again for each new connection. Without TLS it is shown
    /// only to servers on loopback and on Unix sockets.
    pub token_file: Option<PathBuf>,
    /// Guarantee of a receipt; [`Ack::Logged`] needs servers that keep a log, [`Ack::Copied`] such that copy it.
    pub ack: Ack,
    /// The run whose tensors, groups and portions the client uses; `None`: those of no run, and those of
    /// every run by their full names.
    pub run: Option<String>,
    /// Finds the servers, at first and when a connection is lost, in place of fixed addresses.
    pub resolver: Option<Arc<dyn Resolver>>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        let name = format!("pid {}", std::process::id());
        Self {
            timeout: Duration::from_secs(30),
            name,
            checksums: None,
            transport: Transport::Auto,
            spin: DEFAULT_SPIN,
            tls: TlsFiles::default(),
            tls_server_name: None,
            token_file: None,
            ack: Ack::Applied,
            run: None,
            resolver: None,
        }
    }
}

/// How frames reach a server; control calls go to its address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Through shared memory, or else its Unix socket, if it is on this machine and reached by the address
    /// that it reports; else over TCP.
    #[default]
    Auto,
    /// Over TCP.
    Tcp,
    /// Through its Unix socket.
    Unix,
    /// Through shared memory.
    Shm,
}
