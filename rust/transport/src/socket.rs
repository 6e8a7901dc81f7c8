//! A connected socket of any kind: TCP, TCP with TLS, a Unix socket, or shared memory.

use crate::tls::{self, ClientTls, Secure};
use crate::unix;
use crate::wire::{Borrower, Lender, LocalStream, Rings};
use rustls::pki_types::CertificateDer;
use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// A connected stream socket.
#[derive(Debug)]
pub enum Socket {
    /// TCP without encryption.
    Tcp(TcpStream),
    /// TCP with TLS.
    Tls(Box<Secure>),
    /// A Unix socket, or shared memory.
    Local(LocalStream),
}

/// The medium that carries a connection's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// TCP without encryption.
    Tcp,
    /// TCP with TLS.
    Tls,
    /// A Unix socket.
    Unix,
    /// Shared memory.
    SharedMemory,
}

impl Medium {
    /// All media.
    pub const ALL: [Self; 4] = [Self::Tcp, Self::Tls, Self::Unix, Self::SharedMemory];

    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Tls => "tls",
            Self::Unix => "unix",
            Self::SharedMemory => "shared_memory",
        }
    }
}

impl From<TcpStream> for Socket {
    fn from(tcp: TcpStream) -> Self {
        // Callers write whole messages: send them without delay.
        let _ = tcp.set_nodelay(true);
        Self::Tcp(tcp)
    }
}

impl From<UnixStream> for Socket {
    fn from(unix: UnixStream) -> Self {
        Self::Local(unix.into())
    }
}

impl Socket {
    /// Connects to an address (`host:port`), with TLS if requested.
    pub async fn connect(address: &str, tls: Option<&ClientTls>) -> io::Result<Self> {
        let tcp = TcpStream::connect(address).await?;
        match tls {
            None => Ok(tcp.into()),
            Some(tls) => {
                let _ = tcp.set_nodelay(true);
                tls.handshake(address, tcp).await.map(Self::from)
            }
        }
    }

    /// Connects to `unix:///path`, or to `host:port`.
    pub async fn reach(address: &str, tls: Option<&ClientTls>) -> io::Result<Self> {
        match unix::path(address) {
            Some(path) => unix::connect(path).await.map(Self::from),
            None => Self::connect(address, tls).await,
        }
    }

    /// Gives a client that has asked for it shared memory, or the reason why there is none.
    pub async fn share(
        &mut self,
        permitted: Result<Rings, String>,
        spin: Duration,
        lends: bool,
    ) -> io::Result<()> {
        match self {
            Self::Local(local) => local.share(permitted, spin, lends).await,
            Self::Tcp(_) | Self::Tls(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Lets the rings of shared memory grow, if they should for a message of this end with so many bytes, or for
    /// one of the client. `charge` takes memory for that, or gives none; then the next large message asks again.
    pub fn grow<T>(&mut self, bytes: usize, charge: impl FnOnce() -> Option<T>) -> Option<T> {
        let Self::Local(local) = self else { return None };
        if !local.wants_larger(bytes) {
            return None;
        }
        let charged = charge().filter(|_| local.grow().is_ok());
        if charged.is_none() {
            local.stay_small();
        }
        charged
    }

    /// The certificate that the other end has shown, its issuers behind it.
    pub fn peer_certificates(&self) -> Option<&[CertificateDer<'static>]> {
        let Self::Tls(secure) = self else { return None };
        secure.get_ref().1.peer_certificates()
    }

    /// The address of the other end; `None` through a Unix socket.
    pub fn peer_address(&self) -> Option<IpAddr> {
        let tcp = match self {
            Self::Tcp(tcp) => tcp,
            Self::Tls(secure) => secure.get_ref().0.get_ref(),
            Self::Local(_) => return None,
        };
        tcp.peer_addr().ok().map(|address| address.ip())
    }

    /// Lends values to the client at the other end, if it can map their memory.
    pub fn lender(&self) -> Option<Arc<Lender>> {
        if let Self::Local(local) = self { local.lender() } else { None }
    }

    /// Takes values that the server at the other end lends.
    pub fn borrower(&self) -> Option<Arc<Borrower>> {
        if let Self::Local(local) = self { local.borrower() } else { None }
    }

    /// The medium, unless the two ends agree on shared memory later.
    pub fn medium(&self) -> Medium {
        match self {
            Self::Tcp(_) => Medium::Tcp,
            Self::Tls(_) => Medium::Tls,
            Self::Local(_) => Medium::Unix,
        }
    }

    /// Disables spinning on this socket.
    pub fn never_spin(&mut self) {
        if let Self::Local(local) = self {
            local.never_spin();
        }
    }
}

impl From<Secure> for Socket {
    fn from(tls: Secure) -> Self {
        Self::Tls(Box::new(tls))
    }
}

macro_rules! either {
    ($this:expr, $io:ident => $work:expr) => {
        match $this {
            Socket::Tcp($io) => $work,
            Socket::Tls($io) => $work,
            Socket::Local($io) => $work,
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), io => Pin::new(io).poll_read(cx, buf)).map_err(tls::client_error)
    }
}

// `is_write_vectored` must be forwarded, or h2 copies every payload behind its header.
impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        either!(self.get_mut(), io => Pin::new(io).poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), io => Pin::new(io).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), io => Pin::new(io).poll_shutdown(cx))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self.get_mut(), io => Pin::new(io).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}
