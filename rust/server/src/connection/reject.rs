//! Rejects a connection with a GOAWAY that gives the reason: no memory, the wrong protocol, or too many
//! control frames. A connection rejected on arrival gets it in its first bytes, before any memory is taken.

use fastps_core::error::{Error, Kind};
use fastps_transport::Socket;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Time for the peer to read the reason.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);

/// HTTP/2's codes (RFC 9113, 7).
const NO_ERROR: u32 = 0;
const ENHANCE_YOUR_CALM: u32 = 0xb;
const INADEQUATE_SECURITY: u32 = 0xc;

/// The code of a GOAWAY with this reason.
fn code(reason: &Error) -> u32 {
    match reason.kind {
        Kind::Deadline | Kind::Unavailable => NO_ERROR,
        Kind::Capacity => ENHANCE_YOUR_CALM,
        _ => INADEQUATE_SECURITY,
    }
}

/// Says in HTTP/2 why the connection cannot be served, and closes it.
pub(crate) async fn reject(mut io: Socket, error: &Error) {
    // Empty SETTINGS, with which every server must begin. No stream was accepted.
    let mut farewell = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
    farewell.extend(goaway(0, code(error), &error.to_string()));
    let work = async {
        // The peer may be gone or not listening.
        let _ = io.write_all(&farewell).await;
        linger(&mut io).await;
    };
    let _ = tokio::time::timeout(LINGER_TIMEOUT, work).await;
}

/// Ends a connection so that the peer can read its last bytes: closing a socket with unread bytes would
/// reset the connection.
pub(crate) async fn linger(io: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let work = async {
        io.shutdown().await?;
        let mut unread = [0; 1024];
        while io.read(&mut unread).await? > 0 {}
        std::io::Result::Ok(())
    };
    let _ = tokio::time::timeout(LINGER_TIMEOUT, work).await;
}

/// [`linger`] for a connection that was served until now, polled by its owner.
#[derive(Debug)]
pub(crate) struct Farewell {
    goaway: Vec<u8>,
    written: usize,
    is_shut: bool,
    late: Pin<Box<Sleep>>,
}

impl Farewell {
    /// With a GOAWAY, if the sent bytes end with a frame.
    pub(crate) fn new(error: &Error, is_between_frames: bool) -> Self {
        // Any stream may have been answered.
        let last = i32::MAX as u32;
        let goaway =
            if is_between_frames { goaway(last, code(error), &error.to_string()) } else { Vec::new() };
        Self { goaway, written: 0, is_shut: false, late: Box::pin(sleep(LINGER_TIMEOUT)) }
    }

    /// Ready when the peer has ended the connection, or after a timeout.
    pub(crate) fn poll(&mut self, io: &mut Socket, cx: &mut Context<'_>) -> Poll<()> {
        if self.late.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        // The peer may be gone already.
        self.poll_end(io, cx).map(drop)
    }

    fn poll_end(&mut self, io: &mut Socket, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let mut io = Pin::new(io);
        while self.written < self.goaway.len() {
            match ready!(io.as_mut().poll_write(cx, &self.goaway[self.written..]))? {
                0 => return Poll::Ready(Ok(())),
                written => self.written += written,
            }
        }
        if !self.is_shut {
            ready!(io.as_mut().poll_shutdown(cx))?;
            self.is_shut = true;
        }
        loop {
            let mut unread = [0; 1024];
            let mut buffer = ReadBuf::new(&mut unread);
            ready!(io.as_mut().poll_read(cx, &mut buffer))?;
            if buffer.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

/// A GOAWAY with the reason as debug data (RFC 9113, 6.8).
fn goaway(last_stream: u32, code: u32, reason: &str) -> Vec<u8> {
    const GOAWAY: u8 = 7;
    let reason = &reason.as_bytes()[..reason.floor_char_boundary(512)];
    let mut bytes = (8 + reason.len() as u32).to_be_bytes()[1..].to_vec();
    bytes.extend([GOAWAY, 0, 0, 0, 0, 0]);
    bytes.extend(last_stream.to_be_bytes());
    bytes.extend(code.to_be_bytes());
    bytes.extend(reason);
    bytes
}
