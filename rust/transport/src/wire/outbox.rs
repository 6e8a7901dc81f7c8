//! Sends messages when the peer's window has space for them; small ones that are ready leave together.

use super::{MAX_FRAME, Piece, PollCycle};
use crate::memory_budget::Busy;
use bytes::BytesMut;
use fastps_proto::v1 as pb;
use h2::SendStream;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// How long a message waits for a window that takes it whole.
const WHOLE_WINDOW_TIMEOUT: Duration = Duration::from_millis(100);
/// Bytes of small messages that are sent without waiting for more.
const MAX_GATHERED_BYTES: usize = 32 << 10;

/// The outgoing half of a stream.
#[derive(Debug)]
pub struct Outbox {
    stream: SendStream<Piece>,
    /// Set while the peer's window has held a whole message, or is untried.
    patient: bool,
    /// Small messages that are sent in one HTTP/2 frame.
    gathered: BytesMut,
    /// Keeps their connection from resting.
    busy: Option<Busy>,
    cycle: PollCycle,
}

impl Outbox {
    /// The outgoing half of this stream; `cycle` is notified when there is something to write.
    pub fn new(stream: SendStream<Piece>, cycle: PollCycle) -> Self {
        Self { stream, patient: true, gathered: BytesMut::new(), busy: None, cycle }
    }

    /// Waits for the next message; sends the gathered ones if none is ready.
    pub async fn next<T>(
        &mut self,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Result<T, h2::Error> {
        loop {
            if self.gathered.is_empty() {
                self.wait_for_window().await?;
                return Ok(poll_fn(poll).await);
            }
            match poll_fn(|cx| Poll::Ready(poll(cx))).await {
                Poll::Ready(next) => return Ok(next),
                Poll::Pending => self.flush()?,
            }
        }
    }

    /// Waits for room. A message that fits the window travels in one HTTP/2 frame, which its receiver need
    /// not assemble; a peer with small windows gets it in parts.
    async fn wait_for_window(&mut self) -> Result<(), h2::Error> {
        self.stream.reserve_capacity(MAX_FRAME as usize);
        if self.stream.capacity() >= MAX_FRAME as usize {
            self.patient = true;
            return Ok(());
        }
        if self.patient {
            let whole = poll_fn(|cx| self.poll_capacity(cx, MAX_FRAME as usize));
            match tokio::time::timeout(WHOLE_WINDOW_TIMEOUT, whole).await {
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

    /// Takes a message; its connection is busy until it is written.
    pub fn send(&mut self, frame: pb::Frame, busy: Option<Busy>) -> Result<(), h2::Error> {
        if Piece::is_small(&frame) {
            self.busy = busy;
            Piece::append(&frame, &mut self.gathered);
            return if self.gathered.len() < MAX_GATHERED_BYTES { Ok(()) } else { self.flush() };
        }
        self.flush()?;
        self.cycle.sent();
        self.stream.send_data(Piece::new(frame).keeping(busy), false)
    }

    fn flush(&mut self) -> Result<(), h2::Error> {
        if self.gathered.is_empty() {
            return Ok(());
        }
        let gathered = Piece::from(self.gathered.split().freeze());
        self.cycle.sent();
        self.stream.send_data(gathered.keeping(self.busy.take()), false)
    }

    /// Ends the stream.
    pub fn finish(&mut self, trailers: http::HeaderMap) -> Result<(), h2::Error> {
        self.flush()?;
        self.cycle.sent();
        self.stream.send_trailers(trailers)
    }
}
