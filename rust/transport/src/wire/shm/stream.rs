//! A Unix socket, or the shared memory of its two ends.

use super::adaptive_spin::AdaptiveSpin;
use super::borrow::{Borrower, Lender, wake};
use super::ring::{Reader, Writer};
use super::{memory, pass};
use http::HeaderValue;
use rustix::net::sockopt::{set_socket_send_buffer_size, socket_send_buffer_size};
use std::io::{ErrorKind, IoSlice, Result};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio::task::coop::poll_proceed;

/// Looks at a ring per poll of a wait: about a microsecond, and less than the poll itself takes.
const LOOKS_PER_POLL: u32 = 50;
/// Requested buffer of a socket: one frame. The default is a fifth of one, so that a writer sleeps several
/// times. The system may grant less.
const SOCKET_BUFFER_BYTES: usize = 1 << 20;

/// A connection within this machine. One task at a time may wait for it.
#[derive(Debug)]
pub struct LocalStream {
    socket: UnixStream,
    rings: Option<Box<Rings>>,
}

/// This process's ends of the two rings.
#[derive(Debug)]
struct Rings {
    reader: Reader,
    writer: Writer,
    spin_state: AdaptiveSpin,
    /// Set while the peer may have to wake this end.
    asleep: bool,
    /// Set when the peer's socket has ended: only the ring's bytes remain.
    ended: bool,
    /// Set on a server that lends values.
    lender: Option<Arc<Lender>>,
    /// Set on a client.
    borrower: Option<Arc<Borrower>>,
}

impl From<UnixStream> for LocalStream {
    fn from(socket: UnixStream) -> Self {
        // Keeps a larger default.
        if socket_send_buffer_size(&socket).is_ok_and(|held| held < SOCKET_BUFFER_BYTES) {
            let _ = set_socket_send_buffer_size(&socket, SOCKET_BUFFER_BYTES);
        }
        Self { socket, rings: None }
    }
}

impl LocalStream {
    /// Asks the server for shared memory and shows it a token; the inner error is its reason for staying with
    /// the socket.
    pub async fn ask(
        &mut self,
        token: Option<&HeaderValue>,
        spin: Duration,
    ) -> Result<std::result::Result<(), String>> {
        match pass::ask(&mut self.socket, token).await? {
            Ok(rings) => {
                let [to_server, to_client] = memory::map(rings)?;
                let borrower = Some(Borrower::new(to_server.clone(), &self.socket)?);
                let rings = Rings::new(Reader::new(to_client), Writer::new(to_server), spin);
                self.rings = Some(Box::new(Rings { borrower, ..rings }));
                Ok(Ok(()))
            }
            Err(reason) => Ok(Err(reason)),
        }
    }

    /// Gives a client that has asked its shared memory, or the reason why there is none. With `lends`, the
    /// stream has a lender.
    pub async fn share(
        &mut self,
        permitted: std::result::Result<(), String>,
        spin: Duration,
        lends: bool,
    ) -> Result<()> {
        let made =
            permitted.and_then(|()| memory::make().map_err(|error| format!("no shared memory: {error}")));
        let rings = match made {
            Ok(rings) => rings,
            Err(reason) => return pass::answer(&self.socket, Err(&reason)).await,
        };
        pass::answer(&self.socket, Ok(rings.as_fd())).await?;
        let [to_server, to_client] = memory::map(rings)?;
        let lender = lends.then(|| Lender::new(to_server.clone(), &self.socket)).transpose()?;
        let rings = Rings::new(Reader::new(to_server), Writer::new(to_client), spin);
        self.rings = Some(Box::new(Rings { lender, ..rings }));
        Ok(())
    }

    /// Lends values to the client, if enabled.
    pub fn lender(&self) -> Option<Arc<Lender>> {
        self.rings.as_ref()?.lender.clone()
    }

    /// Takes values that the server lends.
    pub fn borrower(&self) -> Option<Arc<Borrower>> {
        self.rings.as_ref()?.borrower.clone()
    }

    /// Disables spinning on this stream.
    pub fn never_spin(&mut self) {
        if let Some(rings) = &mut self.rings {
            rings.spin_state = AdaptiveSpin::new(Duration::ZERO);
        }
    }
}

impl Drop for LocalStream {
    fn drop(&mut self) {
        if let Some(lender) = self.lender() {
            lender.end();
        }
    }
}

impl Rings {
    fn new(reader: Reader, writer: Writer, spin: Duration) -> Self {
        let spin_state = AdaptiveSpin::new(spin);
        Self { reader, writer, spin_state, asleep: false, ended: false, lender: None, borrower: None }
    }

    fn take_back(&self) {
        if let Some(lender) = &self.lender {
            lender.take_back();
        }
    }

    fn poll_read(
        &mut self,
        socket: &UnixStream,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let coop = ready!(poll_proceed(cx));
        let before = buf.filled().len();
        loop {
            self.take_back();
            self.reader.read(buf, || wake(socket))?;
            if buf.filled().len() > before {
                self.spin_state.learn();
                coop.made_progress();
                return Poll::Ready(Ok(()));
            }
            if self.ended || buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            ready!(self.poll_wait(
                socket,
                cx,
                |this| this.reader.is_ready(),
                |this| this.reader.may_sleep()
            ))?;
        }
    }

    fn poll_write(
        &mut self,
        socket: &UnixStream,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let coop = ready!(poll_proceed(cx));
        loop {
            let sum = self.writer.write(bufs.iter().map(|buf| &**buf), || wake(socket))?;
            if sum > 0 || bufs.iter().all(|buf| buf.is_empty()) {
                coop.made_progress();
                self.spin_state.renew();
                if self.asleep {
                    // An answer may come soon: look for it.
                    cx.waker().wake_by_ref();
                }
                return Poll::Ready(Ok(sum));
            }
            if self.ended {
                return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
            }
            ready!(self.poll_wait(
                socket,
                cx,
                |this| this.writer.is_ready(),
                |this| this.writer.may_sleep()
            ))?;
        }
    }

    /// Waits for a change; `may_sleep` announces sleep to the peer, which has to wake us, and looks once
    /// more.
    fn poll_wait(
        &mut self,
        socket: &UnixStream,
        cx: &mut Context<'_>,
        is_ready: impl Fn(&mut Self) -> Result<bool>,
        may_sleep: impl FnOnce(&mut Self) -> Result<bool>,
    ) -> Poll<Result<()>> {
        if self.spin_state.looks_again() {
            if self.spin_state.is_under_way() {
                for _ in 0..LOOKS_PER_POLL {
                    if is_ready(self)? {
                        return Poll::Ready(Ok(()));
                    }
                    std::hint::spin_loop();
                }
            }
            if std::mem::take(&mut self.asleep) {
                self.reader.awake();
                self.writer.awake();
            }
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.asleep = true;
        if !may_sleep(self)? {
            return Poll::Ready(Ok(()));
        }
        self.take_back();
        loop {
            ready!(socket.poll_read_ready(cx))?;
            let read = match &self.borrower {
                Some(borrower) => socket.try_io(Interest::READABLE, || borrower.receive()),
                None => socket.try_read(&mut [0; 64]),
            };
            match read {
                Ok(1..) => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // A peer that leaves without reading all of our bytes resets the socket, which is fine.
                Ok(0) | Err(_) => {
                    self.ended = true;
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncRead for LocalStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        match &mut this.rings {
            Some(rings) => rings.poll_read(&this.socket, cx, buf),
            None => Pin::new(&mut this.socket).poll_read(cx, buf),
        }
    }
}

// `is_write_vectored` must be true, or h2 copies every payload behind its header.
impl AsyncWrite for LocalStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if self.borrower().is_some_and(|borrower| borrower.has_files()) {
            // Closing the socket returns all borrowed values, so it waits until they are.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.get_mut().socket).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let this = self.get_mut();
        match &mut this.rings {
            Some(rings) => rings.poll_write(&this.socket, cx, bufs),
            None => Pin::new(&mut this.socket).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use super::{memory::SHARED_BYTES, pass::ASK};
    use crate::wire::DEFAULT_SPIN;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, split};

    async fn within<T>(work: impl Future<Output = T>) -> T {
        tokio::time::timeout(Duration::from_secs(30), work).await.expect("nothing moves")
    }

    async fn asked(server: &mut UnixStream) {
        let mut question = vec![0; ASK.len()];
        within(server.read_exact(&mut question)).await.unwrap();
        assert_eq!(question, ASK);
    }

    /// A client and a server with shared memory.
    async fn pair() -> (LocalStream, LocalStream) {
        let (client, mut server) = UnixStream::pair().unwrap();
        let mut client = LocalStream::from(client);
        let serve = async {
            asked(&mut server).await;
            let mut server = LocalStream::from(server);
            server.share(Ok(()), DEFAULT_SPIN, false).await.unwrap();
            server
        };
        let (answer, server) = within(async { tokio::join!(client.ask(None, DEFAULT_SPIN), serve) }).await;
        answer.unwrap().unwrap();
        (client, server)
    }

    fn bytes(n: usize, seed: usize) -> Vec<u8> {
        (0..n).map(|k| ((k * 31 + k / 255 + seed) % 251) as u8).collect()
    }

    #[tokio::test]
    async fn bytes_travel_both_ways_at_once() {
        let (client, server) = pair().await;
        let (mut client_reads, mut client_writes) = split(client);
        let (mut server_reads, mut server_writes) = split(server);
        // More than a ring, so that all wait for room and for bytes; then less, with pauses, so that all
        // sleep.
        for (n, pause) in [(1, 0), (9_000_001, 0), (70_000, 2), (1, 2), (3_000_000, 1), (1, 1)] {
            let (there, back) = (bytes(n, 1), bytes(n, 2));
            let (mut to_server, mut to_client) = (vec![0; n], vec![0; n]);
            let pause = || tokio::time::sleep(Duration::from_millis(pause));
            let work = async {
                tokio::join!(
                    async {
                        for part in there.chunks(1_000_003) {
                            client_writes.write_all(part).await.unwrap();
                            pause().await;
                        }
                    },
                    async {
                        pause().await;
                        server_writes.write_all(&back).await.unwrap();
                    },
                    client_reads.read_exact(&mut to_client),
                    async {
                        pause().await;
                        server_reads.read_exact(&mut to_server).await.unwrap();
                    },
                )
            };
            within(work).await.2.unwrap();
            assert!(to_server == there && to_client == back, "{n} bytes");
        }
    }

    #[tokio::test]
    async fn a_socket_holds_more_than_by_default() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        let before = socket_send_buffer_size(&socket).unwrap();
        let stream = LocalStream::from(socket);
        let now = socket_send_buffer_size(&stream.socket).unwrap();
        assert!(now > before || now == before && before >= SOCKET_BUFFER_BYTES, "{before} and then {now}");
    }

    #[tokio::test]
    async fn the_end_comes_after_the_last_byte() {
        let (mut client, mut server) = pair().await;
        client.write_all(&bytes(100_000, 3)).await.unwrap();
        client.shutdown().await.unwrap();
        let mut got = Vec::new();
        within(server.read_to_end(&mut got)).await.unwrap();
        assert!(got == bytes(100_000, 3));
        // The other direction still works.
        server.write_all(b"received").await.unwrap();
        drop(server);
        let mut got = Vec::new();
        within(client.read_to_end(&mut got)).await.unwrap();
        assert_eq!(got, b"received");
    }

    #[tokio::test]
    async fn a_peer_that_goes_ends_a_write_that_has_no_room() {
        let (mut client, server) = pair().await;
        let write = tokio::spawn(async move { client.write_all(&vec![0; 10 << 20]).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!write.is_finished());
        drop(server);
        assert_eq!(within(write).await.unwrap().unwrap_err().kind(), ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn without_memory_it_stays_a_socket() {
        let (client, mut server) = UnixStream::pair().unwrap();
        let mut client = LocalStream::from(client);
        let serve = async {
            asked(&mut server).await;
            let mut server = LocalStream::from(server);
            server.share(Err("none to give ".repeat(100)), DEFAULT_SPIN, false).await.unwrap();
            server.write_all(b"by socket").await.unwrap();
            server
        };
        let (answer, _server) = within(async { tokio::join!(client.ask(None, DEFAULT_SPIN), serve) }).await;
        assert!(answer.unwrap().unwrap_err().starts_with("none to give none to give"));
        let mut got = [0; 9];
        within(client.read_exact(&mut got)).await.unwrap();
        assert_eq!(&got, b"by socket");
    }

    #[tokio::test]
    async fn a_server_without_shared_memory_is_recognised() {
        let (client, mut server) = UnixStream::pair().unwrap();
        let mut client = LocalStream::from(client);
        server.write_all(b"HTTP/1.1 400").await.unwrap();
        assert_eq!(within(client.ask(None, DEFAULT_SPIN)).await.unwrap_err().kind(), ErrorKind::InvalidData);
        drop(server);
        assert!(within(client.ask(None, DEFAULT_SPIN)).await.is_err());
    }

    /// A client that writes invalid counts ends its own stream, with an error.
    #[tokio::test]
    async fn nonsense_in_the_counts_ends_the_stream() {
        let written = 0_u64;
        // Of the second ring.
        let read = 512 + 128;
        for (at, count, reads) in [(written, 3 << 20, true), (written, u64::MAX, true), (read, 1, false)] {
            let (mut client, mut server) = UnixStream::pair().unwrap();
            let serve = async {
                asked(&mut server).await;
                let mut server = LocalStream::from(server);
                server.share(Ok(()), DEFAULT_SPIN, false).await.unwrap();
                server
            };
            let (memory, mut server) =
                within(async { tokio::join!(pass::ask(&mut client, None), serve) }).await;
            let memory = memory.unwrap().unwrap();
            rustix::io::pwrite(&memory, &count.to_ne_bytes(), at).unwrap();
            let error = if reads {
                within(server.read_u8()).await.unwrap_err()
            } else {
                within(server.write_all(&vec![0; 10 << 20])).await.unwrap_err()
            };
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
            // Nor can it take the memory away.
            assert!(rustix::fs::ftruncate(&memory, 0).is_err());
            assert!(rustix::fs::ftruncate(&memory, 2 * SHARED_BYTES).is_err());
        }
    }

    #[tokio::test]
    async fn memory_that_is_not_sealed_is_not_mapped() {
        use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
        let memory = memfd_create(c"open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&memory, SHARED_BYTES).unwrap();
        assert_eq!(memory::map(memory).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
