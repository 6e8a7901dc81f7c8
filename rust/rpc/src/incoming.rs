//! Accepted connections, each with what belongs to a connection: who is at the other end, and how many slices it may
//! keep pinned.

use crate::node::{Node, Principal};
use crate::turn_away::turn_away;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::{Charge, Purpose};
use futures_util::Stream;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tonic::transport::server::Connected;

/// Most connections of a shard.
const MAX_CONNECTIONS: u64 = 4096;
/// Bytes that a client may send before they are read, on one stream and on all of a connection. A stalled stream
/// leaves room for the others.
pub(crate) const STREAM_WINDOW: u32 = 2 << 20;
pub(crate) const CONNECTION_WINDOW: u32 = 2 * STREAM_WINDOW;
/// What a connection takes: its window, and what HTTP/2 keeps of it and of its short calls.
const CONNECTION_BYTES: u64 = CONNECTION_WINDOW as u64 + (256 << 10);
/// Slices that one connection may keep pinned: answers that are not encoded yet.
const PINS: usize = 2;
/// Connections that are being told that there is no room for them.
const TURNED_AWAY: usize = 64;

/// What the handlers know of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) principal: Principal,
    pub(crate) pins: Arc<Semaphore>,
}

impl Peer {
    pub(crate) fn new() -> Self {
        Self { principal: Principal::ANYBODY, pins: Arc::new(Semaphore::new(PINS)) }
    }

    /// The peer of a request.
    pub(crate) fn of<T>(request: &tonic::Request<T>) -> Self {
        // Without connection info the caller is nobody in particular, with pins of its own.
        request.extensions().get::<Self>().cloned().unwrap_or_else(|| Self {
            principal: Principal { role: fastps_proto::v1::Role::Unspecified, client: None },
            ..Self::new()
        })
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    io: TcpStream,
    peer: Peer,
    node: Arc<Node>,
    _memory: Charge,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.node.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

/// Takes the memory of one more connection.
fn room(node: &Node) -> Result<Charge> {
    let room = if node.connections.load(Ordering::Relaxed) < MAX_CONNECTIONS {
        node.shard.meter().take(Purpose::Connections, CONNECTION_BYTES)
    } else {
        Err(Error::new(Kind::Capacity, "the shard has too many connections")
            .expected(format!("at most {MAX_CONNECTIONS}"), "one more")
            .retry_after_ms(1000))
    };
    room.map_err(|error| error.shard(node.index()))
}

/// The connections of a listener, for ever: a failed accept (too many files, a peer that is gone) is waited out, and
/// those for which there is no room are told so.
pub(crate) fn accept(listener: TcpListener, node: Arc<Node>) -> impl Stream<Item = io::Result<Connection>> {
    let leaving = Arc::new(Semaphore::new(TURNED_AWAY));
    futures_util::stream::unfold((listener, node, leaving), |(listener, node, leaving)| async move {
        loop {
            match listener.accept().await {
                Ok((io, _)) => match room(&node) {
                    Ok(memory) => {
                        let _ = io.set_nodelay(true);
                        node.connections.fetch_add(1, Ordering::Relaxed);
                        let connection =
                            Connection { io, peer: Peer::new(), node: node.clone(), _memory: memory };
                        return Some((Ok(connection), (listener, node, leaving)));
                    }
                    Err(error) => {
                        node.connections_refused.fetch_add(1, Ordering::Relaxed);
                        if let Ok(permit) = leaving.clone().try_acquire_owned() {
                            tokio::spawn(async move {
                                turn_away(io, &error).await;
                                drop(permit);
                            });
                        }
                    }
                },
                Err(error) => {
                    tracing::warn!(shard = node.index(), %error, "accepting a connection failed");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    })
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

// `is_write_vectored` must be forwarded, or h2 copies every payload behind its header.
impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
