//! An accepted connection, as the loop that serves it reads and writes it.
//!
//! Reads wait until memory for the bytes is charged, and control frames are counted. A connection that must
//! end says why before it is closed. The bytes read to recognize a native client are read again by the loop
//! that serves it.

use crate::auth::peer::{MAX_PINS, Peer};
use crate::auth::principal::Principal;
use crate::cluster::node::{ConnectionCounters, Node};
use crate::connection::allowance::Allowance;
use crate::connection::not_grpc::{is_http1, refuse_http1};
use crate::connection::reject::Farewell;
use crate::connection::trim;
use bytes::{Bytes, BytesMut};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::Charge;
use fastps_proto::v1 as pb;
use fastps_transport::memory_budget::MemoryBudget;
use fastps_transport::wire::{
    ASK, FIRST_SHARED_BYTES, GROWS, LARGER_SHARED_BYTES, Lender, MAX_BORROWED_PAGES, MAX_FRAME,
    NATIVE_SETTING, Rings, SHARED_BYTES,
};
use fastps_transport::{Medium, Socket};
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};
use tokio::time::{Sleep, sleep};
use tonic::transport::server::Connected;

/// Bytes that a client may send before they are read, on one stream and on all of a connection. A stalled
/// stream leaves room for the others.
pub(crate) const STREAM_WINDOW: u32 = 2 << 20;
pub(crate) const CONNECTION_WINDOW: u32 = 2 * STREAM_WINDOW;
/// Longest request for shared memory: a token is shorter.
const MAX_ASK_BYTES: usize = 256;
/// How long a connection waits for memory, without a frame of its own being used meanwhile.
const MEMORY_TIMEOUT: Duration = Duration::from_millis(500);
/// The same while more than one of its frames waits for a shard that is slow.
const BACKLOG_TIMEOUT: Duration = Duration::from_secs(10);
const MEMORY_RETRY: Duration = Duration::from_millis(1);
/// The preface of every HTTP/2 client (RFC 9113, 3.4), before its SETTINGS.
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// An accepted connection.
#[derive(Debug)]
pub(crate) struct Connection {
    io: Take<Socket>,
    /// The first bytes, to be read again.
    opening: Bytes,
    peer: Peer,
    node: Arc<Node>,
    /// Start of its wait for memory, the bytes unused then, and the pause until the next try.
    waiting: Option<(Instant, u64, Pin<Box<Sleep>>)>,
    /// Memory that it shares with its peer: of the first rings, and of those that they have moved to.
    shared: Vec<Charge>,
    /// Number of control frames still allowed.
    allowance: Allowance,
    /// Set once the connection is being ended.
    farewell: Option<Farewell>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.node.counters.open.fetch_sub(1, Ordering::Relaxed);
        trim::closed();
    }
}

impl Connection {
    /// Counts the connection at its shard; `budget` is its memory, and `certificate` what its client's says.
    pub(crate) fn new(
        io: Socket,
        (budget, certificate): (Arc<MemoryBudget>, Option<Arc<Principal>>),
        node: Arc<Node>,
    ) -> Self {
        node.counters.open.fetch_add(1, Ordering::Relaxed);
        let peer = Peer::new(budget, certificate, (io.medium(), io.peer_address()));
        let (io, opening) = (io.take(0), Bytes::new());
        let allowance = Allowance::new(PREFACE.len());
        Self { io, opening, peer, node, waiting: None, shared: Vec::new(), allowance, farewell: None }
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Counts the connection among those whose callers are unknown, if the server asks who calls.
    pub(crate) fn ask_who_calls(&mut self) {
        if self.is_unauthenticated() {
            self.peer.await_authentication(&self.node.security.unauthenticated);
        }
    }

    /// Returns whether the server asks who calls, and only calls can tell.
    fn is_unauthenticated(&self) -> bool {
        self.node.security.access.asks() && self.peer.certificate.is_none()
    }

    /// Lends values to the client, if it can map their memory.
    pub(crate) fn lender(&self) -> Option<Arc<Lender>> {
        self.io.get_ref().lender()
    }

    /// Reads until the kind of client is known.
    pub(crate) async fn is_native(&mut self) -> io::Result<bool> {
        let mut opening = BytesMut::with_capacity(128);
        let mut asked = false;
        let native = loop {
            let shown = opening.strip_prefix(ASK).and_then(|rest| rest.strip_suffix(b"\n"));
            if let Some(shown) = shown.filter(|shown| shown.is_empty() || shown[0] == b' ') {
                let rings = if shown.ends_with(GROWS) { Rings::Growing } else { Rings::Whole };
                let shown = shown.trim_ascii().to_vec();
                if std::mem::replace(&mut asked, true) {
                    break false;
                }
                opening.clear();
                self.share(&shown, rings).await?;
            }
            match is_native(&opening) {
                Some(native) => break native,
                None if self.io.get_mut().read_buf(&mut opening).await? == 0 => break false,
                None => {}
            }
        };
        self.opening = opening.freeze();
        Ok(native)
    }

    /// Answers a peer that asks for a page by HTTP/1. False: it does not.
    pub(crate) async fn refuse_http1(&mut self) -> bool {
        let asks = is_http1(&self.opening);
        if asks {
            refuse_http1(self.io.get_mut(), &self.opening).await;
        }
        asks
    }

    /// Counts the frames received after the first `before` bytes. With too many control frames, ends the
    /// connection and discards the bytes.
    fn poll_count(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
        before: usize,
    ) -> Poll<io::Result<()>> {
        let within = self.allowance.received(&buf.filled()[before..]);
        self.peer.budget.arrives(self.allowance.take_messages());
        if within {
            return Poll::Ready(Ok(()));
        }
        buf.set_filled(before);
        let shard = self.node.index();
        ConnectionCounters::count(&self.node.counters.floods_cut);
        tracing::info!(shard, "a connection sent too many control frames and is cut");
        let error = Error::new(
            Kind::Capacity,
            "too many control frames (PING, SETTINGS, WINDOW_UPDATE, ...) for so little data",
        );
        self.farewell = Some(Farewell::new(&error.shard(shard), self.allowance.is_between_frames()));
        self.poll_farewell(cx)
    }

    fn poll_farewell(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(farewell) = &mut self.farewell {
            ready!(farewell.poll(self.io.get_mut(), cx));
        }
        Poll::Ready(Err(io::Error::other("the connection was ended")))
    }

    /// Returns whether the connection is being ended, which may begin now.
    fn is_over(&mut self, cx: &Context<'_>) -> bool {
        if self.farewell.is_none()
            && let Poll::Ready(reason) = self.peer.ending.poll(cx)
        {
            let shard = self.node.index();
            tracing::info!(shard, %reason, "a connection is ended");
            let reason = self.node.sign(reason.clone());
            self.farewell = Some(Farewell::new(&reason, self.allowance.is_between_frames()));
        }
        self.farewell.is_some()
    }

    /// Ends the connection if what it is about to send may contain answers of the shard's owner, and another
    /// server may own the shard by now. The clock is read here, after all that an answer relies on.
    fn check_owner(&self) {
        if let Some(owner) = self.node.files.owner()
            && self.peer.is_answered()
            && let Err(refusal) = owner.check()
        {
            self.peer.ending.end(refusal);
        }
    }

    /// Counts `written` of these bytes as sent.
    fn count_written(&mut self, bufs: &[io::IoSlice<'_>], mut written: usize) {
        for buf in bufs {
            let n = written.min(buf.len());
            self.allowance.sent(&buf[..n]);
            written -= n;
        }
    }

    /// Number of bytes to read, once there is memory for them.
    fn poll_admit(&mut self, cx: &mut Context<'_>, wanted: usize) -> Poll<io::Result<usize>> {
        loop {
            let error = match self.peer.budget.admit(wanted) {
                Ok(most) => {
                    self.waiting = None;
                    return Poll::Ready(Ok(most));
                }
                Err(error) => error,
            };
            let now = Instant::now();
            let unused = self.peer.budget.unused();
            let (since, left, pause) =
                self.waiting.get_or_insert_with(|| (now, unused, Box::pin(sleep(MEMORY_RETRY))));
            // It waits for its own frames, which are being used.
            if unused < *left {
                (*since, *left) = (now, unused);
            }
            let waits_for_itself = unused > u64::from(MAX_FRAME);
            let timeout = if waits_for_itself { BACKLOG_TIMEOUT } else { MEMORY_TIMEOUT };
            if now.duration_since(*since) >= timeout {
                return Poll::Ready(Err(io::Error::other(error.shard(self.node.index()))));
            }
            ready!(pause.as_mut().poll(cx));
            pause.as_mut().reset((now + MEMORY_RETRY).into());
        }
    }

    /// Gives a client on this machine that shows who it is shared memory, if there is room for it beside other
    /// clients. Only one that may read everything borrows values: a file with values, once passed, shows all
    /// of them and cannot be taken back.
    async fn share(&mut self, shown: &[u8], rings: Rings) -> io::Result<()> {
        let permitted = match self.charge_shared(shown, rings) {
            Ok((shared, pages)) => {
                self.peer.pins.add_permits(pages.saturating_sub(MAX_PINS));
                self.peer.medium = Medium::SharedMemory;
                self.shared.push(shared);
                Ok(pages > 0)
            }
            Err(error) => Err(error.to_string()),
        };
        let lends = permitted.as_ref().is_ok_and(|lends| *lends);
        self.io.get_mut().share(permitted.map(|_| rings), self.node.spin, lends).await
    }

    /// Takes the memory that a client with this token shares. Returns how many values it may borrow at once.
    fn charge_shared(&self, shown: &[u8], rings: Rings) -> Result<(Charge, usize)> {
        let node = &self.node;
        let mut headers = HeaderMap::new();
        if let (false, Ok(shown)) = (shown.is_empty(), HeaderValue::from_bytes(shown)) {
            headers.insert(AUTHORIZATION, shown);
        }
        let known = node.security.access.admit(self.peer.origin(), &headers, pb::Role::Reader)?;
        let lends = node.shard.exposed().is_some() && known.principal.scope.is_everything();
        // Each lent page is charged when it is lent.
        let pages = if lends { MAX_BORROWED_PAGES } else { 0 };
        let bytes = if rings == Rings::Growing { FIRST_SHARED_BYTES } else { SHARED_BYTES };
        Ok((node.reservations.charge_rings(node.shard.meter(), bytes)?, pages))
    }

    /// Lets small rings grow for a message of the client, or for this one with so many bytes, once there is memory
    /// for them. A client that stops may hold both, so both stay charged.
    fn grow(&mut self, bytes: usize) {
        let node = &self.node;
        let charge = || node.reservations.charge_rings(node.shard.meter(), LARGER_SHARED_BYTES).ok();
        self.shared.extend(self.io.get_mut().grow(bytes, charge));
    }
}

/// Returns whether a client that begins with these bytes is native; `None` if undecided.
fn is_native(opening: &[u8]) -> Option<bool> {
    const SETTINGS: u8 = 4;
    const MAX_HEADER_LIST_SIZE: u16 = 6;
    if ASK.starts_with(&opening[..opening.len().min(ASK.len())]) && opening.len() < MAX_ASK_BYTES {
        return None;
    }
    let preface = opening.len().min(PREFACE.len());
    if opening[..preface] != PREFACE[..preface] {
        return Some(false);
    }
    let [a, b, c, kind, _, _, _, _, _, settings @ ..] = opening.get(PREFACE.len()..)? else {
        return None;
    };
    let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
    if *kind != SETTINGS || length > 100 {
        return Some(false);
    }
    let settings = settings.get(..length)?;
    let [a, b] = MAX_HEADER_LIST_SIZE.to_be_bytes();
    let [c, d, e, f] = NATIVE_SETTING.to_be_bytes();
    Some(settings.as_chunks::<6>().0.contains(&[a, b, c, d, e, f]))
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_over(cx) {
            return self.poll_farewell(cx);
        }
        let before = buf.filled().len();
        if !self.opening.is_empty() {
            let n = self.opening.len().min(buf.remaining());
            buf.put_slice(&self.opening.split_to(n));
            return self.poll_count(cx, buf, before);
        }
        self.grow(0);
        let most = ready!(self.poll_admit(cx, buf.remaining()))?;
        self.io.set_limit(most as u64);
        if self.peer.budget.waits_for_disk() {
            self.io.get_mut().never_spin();
        }
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        self.peer.budget.passed(buf.filled().len() - before);
        self.poll_count(cx, buf, before)
    }
}

// `is_write_vectored` must be forwarded, or h2 copies every payload behind its header.
impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(buf)])
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.farewell {
            None => Pin::new(self.io.get_mut()).poll_flush(cx),
            Some(_) => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.io.get_mut()).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_owner();
        if self.is_over(cx) {
            // Nothing is sent after the GOAWAY.
            return Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()));
        }
        self.grow(bufs.iter().map(|buf| buf.len()).sum());
        let written = ready!(Pin::new(self.io.get_mut()).poll_write_vectored(cx, bufs))?;
        self.count_written(bufs, written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.get_ref().is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_native_client_is_known_by_its_settings() {
        let opening = |settings: &[(u16, u32)]| {
            let mut bytes = PREFACE.to_vec();
            bytes.extend([0, 0, 6 * settings.len() as u8, 4, 0, 0, 0, 0, 0]);
            for (name, value) in settings {
                bytes.extend(name.to_be_bytes());
                bytes.extend(value.to_be_bytes());
            }
            bytes
        };
        for (settings, native) in [
            (&[][..], false),
            (&[(6, NATIVE_SETTING)], true),
            (&[(4, NATIVE_SETTING)], false),
            (&[(2, 0), (6, 16 << 20)], false),
            (&[(2, 0), (5, 1 << 20), (6, NATIVE_SETTING), (4, 9)], true),
        ] {
            let bytes = opening(settings);
            for n in 0..bytes.len() {
                assert_eq!(is_native(&bytes[..n]), None, "{n} bytes of {settings:?}");
            }
            assert_eq!(is_native(&bytes), Some(native), "{settings:?}");
        }
        assert_eq!(is_native(b"GET / HTTP/1.1"), Some(false));
        assert_eq!(is_native(b"PRJ"), Some(false));
    }
}
