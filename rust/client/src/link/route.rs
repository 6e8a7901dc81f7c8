//! The route to one server: TCP, or on this machine its Unix socket or shared memory. A server named by its
//! socket's path is reached only there.

use crate::address::is_same;
use crate::options::Transport;
use crate::state::runtime::lock;
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;
use fastps_transport::Socket;
use fastps_transport::bearer::Bearer;
use fastps_transport::open_files;
use fastps_transport::tls::ClientTls;
use fastps_transport::unix;
use fastps_transport::wire::LocalStream;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

/// The route to one server.
#[derive(Debug)]
pub(crate) struct ServerRoute {
    pub(crate) address: String,
    asked: Transport,
    /// Set if the server was reached by the address that it reports, without a proxy.
    direct: AtomicBool,
    /// Over TCP, with TLS.
    tls: Option<ClientTls>,
    /// How long a wait at a ring spins.
    spin: Duration,
    /// The transport in use, and the reason.
    present: Mutex<String>,
    /// Why this process cannot map the server's memory.
    unmapped: OnceLock<String>,
}

impl ServerRoute {
    pub(crate) fn new(address: String, asked: Transport, tls: Option<ClientTls>, spin: Duration) -> Self {
        let (direct, present) = (AtomicBool::new(false), Mutex::new("not connected yet".to_owned()));
        Self { address, asked, direct, tls, spin, present, unmapped: OnceLock::new() }
    }

    /// The route to a server at another address.
    pub(crate) fn at(&self, address: String) -> Self {
        Self::new(address, self.asked, self.tls.clone(), self.spin)
    }

    /// TLS, unless the server is reached through its Unix socket.
    pub(crate) fn tls(&self) -> Option<&ClientTls> {
        self.tls.as_ref().filter(|_| unix::path(&self.address).is_none())
    }

    /// Notes whether the server reports this address as its own.
    pub(crate) fn note(&self, hello: &pb::HelloResponse) {
        let own = hello.cluster.get(hello.shard as usize);
        self.direct.store(own.is_some_and(|own| is_same(own, &self.address)), Ordering::Relaxed);
    }

    /// The transport in use, and the reason.
    pub(crate) fn present(&self) -> String {
        lock(&self.present).clone()
    }

    /// Asks for no more shared memory, since this process cannot map what the server lends.
    pub(crate) fn stay_a_socket(&self, why: &Error) {
        let _ = self.unmapped.set(why.message.clone());
    }

    /// Connects to the server of this incarnation, and shows a token where calls cannot.
    pub(crate) async fn connect(&self, server: u64, bearer: &Bearer) -> Result<Socket> {
        let address = &*self.address;
        let named = unix::path(address);
        let local = named.map_or_else(|| unix::of(server).into(), Path::to_owned);
        let (socket, present) = match self.asked {
            Transport::Tcp => self.tcp(address, "asked for").await?,
            Transport::Auto if named.is_none() && !self.direct.load(Ordering::Relaxed) => {
                self.tcp(address, "the server's own address is another one").await?
            }
            Transport::Auto => match self.shared(&local, bearer).await {
                Ok(Ok(socket)) => (socket, SHM.to_owned()),
                Ok(Err((socket, why))) => (socket, format!("unix: {why}")),
                Err(error) if named.is_some() => return Err(absent(error, address)),
                Err(error) => {
                    self.tcp(address, &format!("no Unix socket of the server is here ({error})")).await?
                }
            },
            Transport::Unix => {
                let socket = unix::connect(&local).await.map_err(|error| absent(error, address))?;
                (socket.into(), "unix: asked for".to_owned())
            }
            Transport::Shm => match self.shared(&local, bearer).await {
                Ok(Ok(socket)) => (socket, SHM.to_owned()),
                Ok(Err((_, why))) => {
                    return Err(Error::new(Kind::Connection, why).expected("shared memory", address));
                }
                Err(error) => return Err(absent(error, address)),
            },
        };
        *lock(&self.present) = present;
        Ok(socket)
    }

    async fn tcp(&self, address: &str, why: &str) -> Result<(Socket, String)> {
        let socket = Socket::connect(address, self.tls()).await.map_err(failed)?;
        let how = if self.tls().is_some() { "tcp with TLS" } else { "tcp" };
        Ok((socket, format!("{how}: {why}")))
    }

    /// Shared memory with the server at this socket; the inner error has its socket and the reason.
    async fn shared(
        &self,
        socket: &Path,
        bearer: &Bearer,
    ) -> io::Result<std::result::Result<Socket, (Socket, String)>> {
        let mut local = LocalStream::from(unix::connect(socket).await?);
        if let Some(why) = self.unmapped.get() {
            return Ok(Err((Socket::Local(local), why.clone())));
        }
        match local.ask(bearer.present().as_ref(), self.spin).await {
            Ok(Ok(())) => Ok(Ok(Socket::Local(local))),
            Ok(Err(why)) => Ok(Err((Socket::Local(local), why))),
            // The state of that connection's two ends is unknown.
            Err(error) => {
                Ok(Err((unix::connect(socket).await?.into(), format!("no shared memory: {error}"))))
            }
        }
    }
}

const SHM: &str = "shm: the server is on this machine";

fn failed(error: io::Error) -> Error {
    let failed = || Error::new(Kind::Connection, format!("cannot connect: {error}"));
    open_files::exhausted(&error).unwrap_or_else(failed)
}

fn absent(error: io::Error, address: &str) -> Error {
    match failed(error) {
        error if error.kind == Kind::Capacity => error,
        error => error.expected("the server's Unix socket, of this user on this machine", address),
    }
}
