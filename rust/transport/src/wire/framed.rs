//! A reader that ends each read where an HTTP/2 frame ends. `h2` gets the nine bytes of a frame's header,
//! allocates the whole frame, and reads it from the socket into that buffer.
//!
//! After a large frame the reader pauses for one poll, so that the frame is used and its memory is free
//! before the next one is read.

use super::PollCycle;
use fastps_core::failpoint::reach;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};

const FRAME_HEADER_BYTES: usize = 9;
/// The type of the frames that carry messages.
const DATA_FRAME: u8 = 0;
/// Bytes read at a time when a header is expected: enough for a small frame.
const READ_AHEAD_BYTES: usize = 8 << 10;
/// Size from which frames are followed by a pause, and writes count as parts of a large transfer.
const LARGE_FRAME_BYTES: usize = 16 << 10;

/// A connection whose reads end where frames end.
#[derive(Debug)]
pub struct Framed<S> {
    inner: Take<S>,
    /// Bytes read and not handed out: `ahead[from..to]`.
    ahead: Box<[u8]>,
    from: usize,
    to: usize,
    /// Bytes before the first frame that are not handed out yet: a client's preface.
    preface: usize,
    header: [u8; FRAME_HEADER_BYTES],
    /// Header bytes handed out.
    seen: usize,
    /// Bytes of the frame after it that are not handed out yet.
    left: usize,
    paused: bool,
    cycle: PollCycle,
}

impl<S: AsyncRead + Unpin> Framed<S> {
    /// Expects `preface` bytes before the first frame.
    pub fn new(inner: S, preface: usize, cycle: PollCycle) -> Self {
        Self {
            inner: inner.take(0),
            ahead: vec![0; READ_AHEAD_BYTES].into_boxed_slice(),
            from: 0,
            to: 0,
            preface,
            header: [0; FRAME_HEADER_BYTES],
            seen: 0,
            left: 0,
            paused: false,
            cycle,
        }
    }

    /// Bytes up to the next place where a read ends.
    fn stretch(&self) -> usize {
        match (self.preface, self.left) {
            (0, 0) => FRAME_HEADER_BYTES - self.seen,
            (0, left) => left,
            (preface, _) => preface,
        }
    }

    /// Hands out bytes that were read ahead, within one stretch.
    fn hand_out(&mut self, buf: &mut ReadBuf<'_>) {
        let n = self.stretch().min(self.to - self.from).min(buf.remaining());
        let bytes = &self.ahead[self.from..self.from + n];
        buf.put_slice(bytes);
        self.from += n;
        if self.preface > 0 {
            self.preface -= n;
        } else if self.left > 0 {
            self.passed_frame(n);
        } else {
            self.header[self.seen..self.seen + n].copy_from_slice(bytes);
            self.seen += n;
            if self.seen == FRAME_HEADER_BYTES {
                let [a, b, c, ..] = self.header;
                self.left = u32::from_be_bytes([0, a, b, c]) as usize;
                self.seen = 0;
                if self.header[3] == DATA_FRAME {
                    reach("header_read");
                }
            }
        }
    }

    fn passed_frame(&mut self, bytes: usize) {
        self.left -= bytes;
        let [a, b, ..] = self.header;
        if self.left > 0 && self.header[3] == DATA_FRAME {
            reach("half_frame");
            self.cycle.pace().part();
        }
        self.paused = self.left == 0 && (usize::from(a) << 16 | usize::from(b) << 8) >= LARGE_FRAME_BYTES;
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Framed<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.cycle.is_writing() {
            return Poll::Pending;
        }
        if std::mem::take(&mut this.paused) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if this.from == this.to && (this.preface > 0 || this.left == 0) {
            let mut ahead = ReadBuf::new(&mut this.ahead);
            this.inner.set_limit(READ_AHEAD_BYTES as u64);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut ahead))?;
            (this.from, this.to) = (0, ahead.filled().len());
        }
        if this.from < this.to {
            this.hand_out(buf);
            return Poll::Ready(Ok(()));
        }
        if this.left == 0 {
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        this.inner.set_limit(this.left as u64);
        ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
        this.passed_frame(buf.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Framed<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(self.inner.get_mut()).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.inner.get_mut()).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.inner.get_mut()).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(self.inner.get_mut()).poll_write_vectored(cx, bufs))?;
        if written >= LARGE_FRAME_BYTES {
            self.cycle.pace().part();
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.get_ref().is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands out its bytes in reads of random sizes, with waits between.
    struct Trickle {
        bytes: Vec<u8>,
        at: usize,
        random: u64,
        most: usize,
    }

    impl Trickle {
        fn random(&mut self) -> usize {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            self.random as usize
        }
    }

    impl AsyncRead for Trickle {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if self.random().is_multiple_of(4) {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let most = self.most;
            let n = (1 + self.random() % most).min(buf.remaining()).min(self.bytes.len() - self.at);
            let at = self.at;
            buf.put_slice(&self.bytes[at..at + n]);
            self.at += n;
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn reads_end_where_frames_end_and_nothing_is_lost() {
        for (seed, most) in [(1, 1), (2, 7), (3, 9000), (4, 1 << 20)] {
            let mut bytes: Vec<u8> = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
            let mut ends = vec![bytes.len()];
            for length in [0_usize, 1, 9, 8183, 8192, 0, 70_000, 16_384, 3] {
                bytes.extend(&(length as u32).to_be_bytes()[1..]);
                bytes.extend([0; 6]);
                ends.push(bytes.len());
                bytes.extend((0..length).map(|k| (k % 255) as u8));
                ends.push(bytes.len());
            }
            let trickle = Trickle { bytes: bytes.clone(), at: 0, random: seed, most };
            let mut framed = Framed::new(trickle, 24, PollCycle::default());
            let mut got = Vec::<u8>::new();
            loop {
                let mut part = vec![0; 100_000];
                let n = framed.read(&mut part).await.unwrap();
                if n == 0 {
                    break;
                }
                let crossed = ends.iter().any(|end| got.len() < *end && got.len() + n > *end);
                assert!(!crossed, "a read of {n} bytes at {} goes beyond its frame", got.len());
                got.extend(&part[..n]);
            }
            assert!(got == bytes);
        }
    }
}
