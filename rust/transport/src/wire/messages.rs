//! Incoming messages: decoded in the HTTP/2 frame that carried them, or assembled if a peer split one.

use super::piece::PREFIX_BYTES;
use crate::convert;
use crate::memory_budget::{Busy, MemoryBudget};
use bytes::{Buf, Bytes, BytesMut};
use fastps_core::error::Error;
use fastps_core::shard::Charge;
use fastps_proto::MAX_MESSAGE_BYTES;
use fastps_proto::v1 as pb;
use h2::RecvStream;
use prost::Message;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tonic::{Code, Status};

/// Bytes that a server's stream has received and not used, charged to its connection's memory.
#[derive(Debug)]
pub struct Arrivals {
    budget: Arc<MemoryBudget>,
    /// Memory for messages that arrive in parts.
    parts: Charge,
    busy: Option<Busy>,
}

impl Arrivals {
    /// Counts the bytes that a new stream of the connection receives.
    pub fn new(budget: &Arc<MemoryBudget>) -> Result<Self, Error> {
        Ok(Self { budget: budget.clone(), parts: budget.parts()?, busy: None })
    }

    /// Keeps the connection busy while bytes wait, else releases the memory for parts.
    fn note(&mut self, something: bool) {
        if something {
            self.busy.get_or_insert_with(|| self.budget.busy());
        } else {
            self.busy = None;
            self.parts.shrink_to(0);
        }
    }
}

/// The messages of one stream.
#[derive(Debug)]
pub struct Messages {
    stream: RecvStream,
    /// Bytes received and not read.
    rest: Bytes,
    /// A message that arrives in parts.
    parts: BytesMut,
    /// Memory of the parts, if it is counted.
    arrivals: Option<Arrivals>,
    /// Bytes received whose window was not returned yet.
    owed: usize,
    /// Bytes of the messages handed out last.
    in_work: usize,
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.in_work += self.owed;
        self.note_used();
    }
}

impl Messages {
    /// Reads the messages of a stream; `arrivals` counts their memory, if given.
    pub fn new(stream: RecvStream, arrivals: Option<Arrivals>) -> Self {
        Self { stream, rest: Bytes::new(), parts: BytesMut::new(), arrivals, owed: 0, in_work: 0 }
    }

    /// The next message, `None` at the end of the stream.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<pb::Frame>, Status>> {
        self.note_used();
        loop {
            let message = self.cut()?;
            self.give_back();
            if let Some(message) = message {
                let frame = pb::Frame::decode(message);
                return Poll::Ready(
                    frame
                        .map(Some)
                        .map_err(|e| Status::internal(format!("these bytes are not a frame: {e}"))),
                );
            }
            let polled = self.stream.poll_data(cx);
            if let Some(arrivals) = &mut self.arrivals {
                arrivals.note(polled.is_ready() || !self.parts.is_empty());
            }
            match ready!(polled) {
                Some(Ok(data)) => {
                    self.owed += data.len();
                    self.rest = data;
                }
                Some(Err(error)) => return Poll::Ready(Err(status(&error))),
                None if self.parts.is_empty() => return Poll::Ready(Ok(None)),
                None => return Poll::Ready(Err(Status::internal("the stream ended within a message"))),
            }
        }
    }

    /// The end of the stream as the peer sent it.
    pub async fn trailers(&mut self) -> Result<(), Status> {
        match self.stream.trailers().await {
            Ok(Some(trailers)) => match Status::from_header_map(&trailers) {
                Some(status) if status.code() != Code::Ok => Err(status),
                _ => Ok(()),
            },
            Ok(None) => Ok(()),
            Err(error) => Err(status(&error)),
        }
    }

    fn give_back(&mut self) {
        if self.rest.is_empty() && self.owed > 0 {
            // Fails only if the stream is gone.
            let _ = self.stream.flow_control().release_capacity(self.owed);
            self.in_work += std::mem::take(&mut self.owed);
        }
    }

    /// Counts the messages handed out as used, since the next is requested.
    fn note_used(&mut self) {
        let used = std::mem::take(&mut self.in_work);
        if let Some(arrivals) = &self.arrivals {
            arrivals.budget.used(used as u64);
        }
    }

    /// A whole message without its prefix; an incomplete one is set aside.
    fn cut(&mut self) -> Result<Option<Bytes>, Status> {
        if self.parts.is_empty()
            && let Some(length) = length(&self.rest)?
            && self.rest.len() >= PREFIX_BYTES + length
        {
            self.rest.advance(PREFIX_BYTES);
            return Ok(Some(self.rest.split_to(length)));
        }
        if self.parts.len() < PREFIX_BYTES {
            self.set_aside(PREFIX_BYTES);
        }
        let Some(length) = length(&self.parts)? else {
            return Ok(None);
        };
        if let Some(arrivals) = &mut self.arrivals {
            arrivals
                .parts
                .grow_to((PREFIX_BYTES + length) as u64)
                .map_err(|error| convert::status(&error))?;
        }
        self.parts.reserve((PREFIX_BYTES + length).saturating_sub(self.parts.len()));
        self.set_aside(PREFIX_BYTES + length);
        if self.parts.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        // Takes the whole buffer: parts split off would keep it alive.
        let mut message = std::mem::take(&mut self.parts).freeze();
        message.advance(PREFIX_BYTES);
        Ok(Some(message))
    }

    /// Moves bytes aside until there are `wanted`.
    fn set_aside(&mut self, wanted: usize) {
        let n = wanted.saturating_sub(self.parts.len()).min(self.rest.len());
        self.parts.extend_from_slice(&self.rest.split_to(n));
    }
}

/// The length that a prefix announces, if it is complete.
fn length(bytes: &[u8]) -> Result<Option<usize>, Status> {
    let Some([compressed, length @ ..]) = bytes.first_chunk::<PREFIX_BYTES>() else {
        return Ok(None);
    };
    if *compressed != 0 {
        return Err(Status::unimplemented("messages must not be compressed"));
    }
    let length = u32::from_be_bytes(*length) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(Status::out_of_range(format!(
            "a message of {length} bytes is too large: at most {MAX_MESSAGE_BYTES}"
        )));
    }
    Ok(Some(length))
}

/// The connection's own error as a status.
pub fn status(error: &h2::Error) -> Status {
    let code = match error.reason() {
        Some(h2::Reason::CANCEL) => Code::Cancelled,
        Some(h2::Reason::ENHANCE_YOUR_CALM) => Code::ResourceExhausted,
        _ => Code::Unavailable,
    };
    Status::new(code, format!("the connection broke: {error}"))
}
