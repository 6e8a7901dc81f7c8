//! A frame that waits to be sent or answered: its content, its recipient and its identity.

use crate::link::call::Call;
use crate::link::call::payload::Payload;
use crate::state::doubt::Doubt;
use fastps_core::error::Error;
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use fastps_transport::convert::header::Completion;
use std::ops::Range;
use std::sync::Arc;

/// Recipient of an answer.
#[derive(Clone, Debug)]
pub(crate) enum Waiter {
    /// Parts of a call: one, or all those of a message in parts.
    Parts(Arc<Call>, Range<usize>),
    Doubt(Arc<Doubt>),
}

#[derive(Debug)]
pub(crate) struct Pending {
    /// The part of the header that does not depend on the sender.
    pub(crate) header: pb::Header,
    pub(crate) payload: Payload,
    pub(crate) waiter: Waiter,
    pub(crate) sender: Sender,
    /// Times that it was passed to a connection.
    pub(crate) attempts: u32,
    /// The last refusal, if the frame is sent again because of its retry time.
    pub(crate) refused: Option<Error>,
}

/// Identity under which a frame is sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sender {
    /// The incarnation under which it was sent; 0 if not sent yet.
    pub(crate) client: u64,
    /// The number of the push; 0 if the frame changes nothing.
    pub(crate) sequence: u64,
    /// The incarnation under which the base's own changes were counted.
    pub(crate) base_of: u64,
}

impl Pending {
    pub(crate) fn identified(&self) -> bool {
        matches!(&self.waiter, Waiter::Parts(call, _) if call.identified)
    }

    /// Completes the header for this incarnation. A frame that was sent before keeps its incarnation. A push
    /// says up to which number all are answered.
    pub(crate) fn complete(
        &mut self,
        tag: u64,
        (client, acknowledged): (u64, u64),
        crc32c: Option<u32>,
    ) -> pb::Header {
        let acknowledged = if self.identified() { acknowledged } else { 0 };
        let sender = &mut self.sender;
        if sender.client == 0 {
            sender.client = client;
        }
        let Sender { client, sequence, base_of } = *sender;
        let counts_own = base_of == client;
        let completion = Completion { tag, client, sequence, acknowledged, counts_own, crc32c };
        convert::header::complete(&self.header, completion)
    }

    /// A message of whole slices as frames of one slice each, under the same identity; any other frame as it is.
    pub(crate) fn separate(self) -> Vec<Self> {
        let (Waiter::Parts(call, parts), Payload::Owned(bytes)) = (&self.waiter, &self.payload) else {
            return vec![self];
        };
        if !convert::are_whole(&self.header) {
            return vec![self];
        }
        let (sender, attempts, mut rest) = (self.sender, self.attempts, bytes.clone());
        let frame = |(header, k): (pb::Header, usize)| {
            let payload = rest.split_to(call.parts[k].sent_bytes.min(rest.len()));
            let (waiter, refused) = (Waiter::Parts(call.clone(), k..k + 1), self.refused.clone());
            Self { header, payload: Payload::Owned(payload), waiter, sender, attempts, refused }
        };
        convert::header::separate(&self.header).zip(parts.clone()).map(frame).collect()
    }

    /// The slices addressed.
    pub(crate) fn slices(&self) -> impl Iterator<Item = u64> {
        let parts = &self.header.parts;
        let whole = parts.is_empty().then_some(self.header.slice);
        whole.into_iter().chain(parts.iter().map(|part| part.slice))
    }
}
