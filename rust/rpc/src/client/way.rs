//! How frames reach a server: over TCP, or through the Unix socket of a server on this machine.

use super::runtime::lock;
use crate::local;
use crate::tls::{self, ClientTls};
use crate::wire::Socket;
use fastps_core::error::{Error, Kind, Result};
use std::sync::Mutex;

/// How frames reach a server; control calls go over TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Through its Unix socket where it is on this machine and reached by its own address, else over TCP.
    #[default]
    Auto,
    /// Over TCP.
    Tcp,
    /// Through its Unix socket.
    Unix,
}

/// The way to one server.
#[derive(Debug)]
pub(super) struct Way {
    asked: Transport,
    /// It was reached by its own address, not through somebody in between.
    direct: bool,
    /// Over TCP, with TLS.
    pub(super) tls: Option<ClientTls>,
    /// What is in use, and why.
    present: Mutex<String>,
}

impl Way {
    pub(super) fn new(asked: Transport, direct: bool, tls: Option<ClientTls>) -> Self {
        Self { asked, direct, tls, present: Mutex::new("not connected yet".to_owned()) }
    }

    /// What is in use, and why.
    pub(super) fn present(&self) -> String {
        lock(&self.present).clone()
    }

    /// Connects to the server of this incarnation.
    pub(super) async fn connect(&self, address: &str, server: u64) -> Result<Socket> {
        let failed = |error| Error::new(Kind::Connection, format!("cannot connect: {error}"));
        let why = match self.asked {
            Transport::Tcp => "asked for".to_owned(),
            Transport::Auto if !self.direct => "the server's own address is another one".to_owned(),
            Transport::Auto | Transport::Unix => match local::connect(server).await {
                Ok(socket) => {
                    "unix: the server is on this machine".clone_into(&mut lock(&self.present));
                    return Ok(socket.into());
                }
                Err(error) if self.asked == Transport::Unix => {
                    return Err(failed(error)
                        .expected("the server's Unix socket, of this user on this machine", address));
                }
                Err(error) => format!("no Unix socket of the server is here ({error})"),
            },
        };
        let socket = tls::connect(address, self.tls.as_ref()).await.map_err(failed)?;
        let how = if self.tls.is_some() { "tcp with TLS" } else { "tcp" };
        *lock(&self.present) = format!("{how}: {why}");
        Ok(socket)
    }
}
