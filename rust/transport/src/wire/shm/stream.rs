//! A Unix socket, or the shared memory of its two ends.

use super::adaptive_spin::AdaptiveSpin;
use super::borrow::{Borrower, Lender, wake};
use super::ring::{Reader, Writer};
use super::sync::Ordering;
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
    rings: Option<Box<Ends>>,
}

/// The rings that a server gives a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rings {
    /// Of the whole size from the first byte.
    Whole,
    /// Small ones, which grow once.
    Growing,
}

/// This process's ends of the two rings.
#[derive(Debug)]
struct Ends {
    reader: Reader,
    writer: Writer,
    /// Cleared when they have grown, or if they never do.
    grow: bool,
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
                let rings = Ends::new(Reader::new(to_client), Writer::new(to_server), spin);
                self.rings = Some(Box::new(Ends { borrower, ..rings }));
                Ok(Ok(()))
            }
            Err(reason) => Ok(Err(reason)),
        }
    }

    /// Gives a client that has asked its shared memory, or the reason why there is none. With `lends`, the
    /// stream has a lender.
    pub async fn share(
        &mut self,
        permitted: std::result::Result<Rings, String>,
        spin: Duration,
        lends: bool,
    ) -> Result<()> {
        let make = |rings| memory::make(rings == Rings::Growing);
        let made =
            permitted.and_then(|rings| make(rings).map_err(|error| format!("no shared memory: {error}")));
        let rings = match made {
            Ok(rings) => rings,
            Err(reason) => return pass::answer(&self.socket, Err(&reason)).await,
        };
        pass::answer(&self.socket, Ok(rings.as_fd())).await?;
        let [to_server, to_client] = memory::map(rings)?;
        let lender = lends.then(|| Lender::new(to_server.clone(), &self.socket)).transpose()?;
        let rings = Ends::new(Reader::new(to_server), Writer::new(to_client), spin);
        self.rings = Some(Box::new(Ends { lender, ..rings }));
        Ok(())
    }

    /// Returns whether a server should let small rings grow: the client has had more to write than half a ring,
    /// or this end has so many bytes now.
    pub fn wants_larger(&self, bytes: usize) -> bool {
        let Some(ends) = self.rings.as_ref().filter(|ends| ends.grow && ends.borrower.is_none()) else {
            return false;
        };
        ends.writer.want(bytes);
        [ends.reader.half(), ends.writer.half()]
            .iter()
            .any(|half| half.growth().is_wanted.load(Ordering::Relaxed) != 0)
    }

    /// Asks again only after the next large message.
    pub fn stay_small(&self) {
        for half in self.rings.iter().flat_map(|ends| [ends.reader.half(), ends.writer.half()]) {
            half.growth().is_wanted.store(0, Ordering::Relaxed);
        }
    }

    /// Lets the rings grow, on a server, which has taken memory for that. On an error they stay as they are.
    pub fn grow(&mut self) -> Result<()> {
        let Some(ends) = &mut self.rings else { return Ok(()) };
        let memory = memory::make_larger()?;
        let passed = memory.try_clone()?;
        let [to_server, to_client] = memory::map_larger(memory, [ends.reader.half(), ends.writer.half()])?;
        // The client has it before it sees that this end writes there.
        pass::hand_rings(&self.socket, passed.as_fd())?;
        ends.reader.may_move_to(to_server);
        ends.writer.move_to(to_client);
        ends.grow = false;
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

impl Ends {
    fn new(reader: Reader, writer: Writer, spin: Duration) -> Self {
        let grow = writer.half().larger_size().is_some();
        let spin_state = AdaptiveSpin::new(spin);
        Self { reader, writer, grow, spin_state, asleep: false, ended: false, lender: None, borrower: None }
    }

    /// Moves to larger memory, on a client to which the server has passed some.
    fn follow(&mut self) -> Result<()> {
        let Some(borrower) = self.borrower.as_ref().filter(|_| self.grow) else { return Ok(()) };
        let mut passed = borrower.take_rings();
        while passed.is_none() && self.reader.lacks_memory() {
            if borrower.receive()? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            passed = borrower.take_rings();
        }
        if let Some(memory) = passed {
            let [to_server, to_client] =
                memory::map_larger(memory, [self.writer.half(), self.reader.half()])?;
            self.reader.may_move_to(to_client);
            self.writer.move_to(to_server);
            self.grow = false;
        }
        Ok(())
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
            self.follow()?;
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
        if self.grow {
            self.writer.want(bufs.iter().map(|buf| buf.len()).sum());
        }
        loop {
            self.follow()?;
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
        pair_with(Rings::Whole).await
    }

    async fn pair_with(rings: Rings) -> (LocalStream, LocalStream) {
        let (client, mut server) = UnixStream::pair().unwrap();
        let mut client = LocalStream::from(client);
        let serve = async {
            asked(&mut server).await;
            let mut server = LocalStream::from(server);
            server.share(Ok(rings), DEFAULT_SPIN, false).await.unwrap();
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
    async fn small_rings_grow_once_and_lose_nothing() {
        for pause in [0, 2] {
            let (client, mut server) = pair_with(Rings::Growing).await;
            let (mut client_reads, mut client_writes) = split(client);
            let (mut in_all, mut grown_at) = (0, Vec::new());
            for (round, n) in [4_000, 30_000, 4_000, 3_000_000, 1, 3_000_000].into_iter().enumerate() {
                let (there, back) = (bytes(n, round), bytes(n, round + 7));
                let write = async {
                    client_writes.write_all(&there).await.unwrap();
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                };
                let serve = async {
                    let mut got = Vec::with_capacity(n);
                    while got.len() < n {
                        if server.wants_larger(0) {
                            server.grow().unwrap();
                            grown_at.push(round);
                        }
                        assert!(server.read_buf(&mut got).await.unwrap() > 0);
                    }
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                    server.write_all(&back).await.unwrap();
                    got
                };
                let mut answer = vec![0; n];
                let (got, (), read) =
                    within(async { tokio::join!(serve, write, client_reads.read_exact(&mut answer)) }).await;
                read.unwrap();
                in_all += n;
                assert!(got == there && answer == back, "round {round}, {in_all} bytes, pause {pause}");
            }
            assert_eq!(grown_at, [3], "when more than half a ring was to be written");
        }
    }

    /// A client that says it has moved, without memory to move to, reaches nothing.
    #[tokio::test]
    async fn a_move_that_cannot_be_ends_the_stream() {
        let moved = 1536_u64;
        for (at, is_refused) in
            [(1, false), (1 + (64 << 10), false), (2 + (64 << 10), true), (u64::MAX, true)]
        {
            let (mut client, mut server) = UnixStream::pair().unwrap();
            let serve = async {
                asked(&mut server).await;
                let mut server = LocalStream::from(server);
                server.share(Ok(Rings::Growing), DEFAULT_SPIN, false).await.unwrap();
                server
            };
            let (memory, mut server) =
                within(async { tokio::join!(pass::ask(&mut client, None), serve) }).await;
            let memory = memory.unwrap().unwrap();
            rustix::io::pwrite(&memory, &at.to_ne_bytes(), moved).unwrap();
            rustix::io::pwrite(&memory, &(100_u64 << 10).to_ne_bytes(), 0).unwrap();
            let mut got = vec![0; 200 << 10];
            if is_refused {
                let error = within(server.read(&mut got)).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidData, "{at}");
                continue;
            }
            let before = at as usize - 1;
            within(server.read_exact(&mut got[..before])).await.unwrap();
            let more = tokio::time::timeout(Duration::from_millis(100), server.read(&mut got)).await;
            assert!(more.is_err(), "bytes after the move at {at}");
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
                server.share(Ok(Rings::Whole), DEFAULT_SPIN, false).await.unwrap();
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
