//! Sends messages when the peer's window has room for them.

use super::{MAX_FRAME, Piece};
use h2::SendStream;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// How long a message waits for a window that takes it whole.
const PATIENCE: Duration = Duration::from_millis(100);

/// The outgoing half of a stream.
#[derive(Debug)]
pub(crate) struct Outbox {
    stream: SendStream<Piece>,
    /// The peer's window has held a whole message, or was not tried.
    patient: bool,
}

impl Outbox {
    pub(crate) fn new(stream: SendStream<Piece>) -> Self {
        Self { stream, patient: true }
    }

    /// Waits for room. A message that the window takes whole travels in one HTTP/2 frame, and its receiver need not
    /// put it together; a peer with small windows gets it in parts.
    pub(crate) async fn room(&mut self) -> Result<(), h2::Error> {
        self.stream.reserve_capacity(MAX_FRAME as usize);
        if self.stream.capacity() >= MAX_FRAME as usize {
            self.patient = true;
            return Ok(());
        }
        if self.patient {
            let whole = poll_fn(|cx| self.poll_capacity(cx, MAX_FRAME as usize));
            match tokio::time::timeout(PATIENCE, whole).await {
                Ok(result) => return result,
                Err(_) => self.patient = false,
            }
        }
        poll_fn(|cx| self.poll_capacity(cx, 1)).await
    }

    fn poll_capacity(&mut self, cx: &mut Context<'_>, wanted: usize) -> Poll<Result<(), h2::Error>> {
        while self.stream.capacity() < wanted {
            match ready!(self.stream.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(error)),
                None => return Poll::Ready(Err(h2::Reason::CANCEL.into())),
            }
        }
        Poll::Ready(Ok(()))
    }

    pub(crate) fn send(&mut self, piece: Piece) -> Result<(), h2::Error> {
        self.stream.send_data(piece, false)
    }

    /// Ends the stream.
    pub(crate) fn finish(&mut self, trailers: http::HeaderMap) -> Result<(), h2::Error> {
        self.stream.send_trailers(trailers)
    }
}
