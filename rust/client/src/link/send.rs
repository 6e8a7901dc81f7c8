//! Sends a link's frames: queues them, passes them to a connection in order, and withdraws them when their
//! call ends.

use crate::link::call::payload::Payload;
use crate::link::call::{Call, CallPart, Outcome};
use crate::link::pending::{Pending, Sender, Waiter};
use crate::link::queue::{Frame, MAX_UNANSWERED_PUSHES, Queue};
use crate::link::state::Link;
use crate::state::doubt::Doubt;
use crate::state::runtime::lock;
use crate::state::stats;
use bytes::Bytes;
use fastps_core::error::{Error, Kind};
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use fastps_transport::convert::header::{self, Target};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

/// Outcome of abandoning a frame.
pub(crate) enum Abandoned {
    /// Certainly not applied, for this reason.
    NotSent(Error),
    /// One doubt for each part.
    Sent(Vec<Arc<Doubt>>),
    /// The answer has just arrived.
    Answered,
}

impl Link {
    /// Queues the frames of a call in their order, under this sequence number.
    pub(crate) fn enqueue(&self, call: &Arc<Call>, frames: Vec<Frame>, sequence: u64) {
        let mut queue = lock(&self.queue);
        if queue.closed {
            drop(queue);
            for Frame { parts, .. } in frames {
                self.refuse(call, parts, &self.closed());
            }
            return;
        }
        let sender = Sender { client: 0, sequence, base_of: queue.client };
        let mut fenced = Vec::new();
        for Frame { parts, header, payload } in frames {
            // Under the lock of lease renewal, so that no gradient slips through to the new incarnation.
            if let Some(error) = self.shared.memberships.fences(&header) {
                fenced.push((parts, error));
                continue;
            }
            // The server may have changed since the message was made.
            let has = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
            let divide = convert::are_whole(&header) && !has(&self.parts)
                || convert::are_initial(&header) && !has(&self.initial_parts);
            let tag = queue.push(header, payload, Waiter::Parts(call.clone(), parts.clone()), sender);
            call.parts[parts].iter().for_each(|part| part.tag.store(tag, Ordering::Release));
            if divide {
                queue.divide(tag);
            }
        }
        queue.wake();
        drop(queue);
        for (parts, error) in fenced {
            self.refuse(call, parts, &error);
        }
    }

    /// The next frame for the stream of this session; `None` ends it.
    pub(crate) fn poll_frame(&self, session: u64, context: &mut Context<'_>) -> Poll<Option<pb::Frame>> {
        let mut guard = lock(&self.queue);
        let queue = &mut *guard;
        if queue.closed || queue.session != session {
            return Poll::Ready(None);
        }
        if !queue.lease_lost
            && let Some(question) = queue.question()
        {
            queue.sent += 1;
            return Poll::Ready(Some(question));
        }
        // Until a restarted server has reported its state, it changes nothing for this client.
        let acknowledged = queue.frames.acknowledged();
        while !queue.lease_lost
            && queue.to_ask.is_empty()
            && let Some((tag, pending)) = queue.frames.next(queue.cursor)
        {
            if pending.identified() {
                let slices = &mut queue.slices;
                if pending.slices().any(|slice| {
                    slices.get(&slice).is_some_and(|known| known.unanswered >= MAX_UNANSWERED_PUSHES)
                }) {
                    break;
                }
                pending.slices().for_each(|slice| slices.entry(slice).or_default().unanswered += 1);
            }
            queue.cursor = tag + 1;
            let Some(payload) = pending.payload.read() else {
                continue;
            };
            pending.attempts += 1;
            queue.sent += 1;
            pending.refused = None;
            if pending.attempts > 1 && fastps_core::fault::fault("resend_as_new") {
                pending.sender.sequence += 1 << 32;
            }
            stats::sent(&self.shared.counters, &pending.header, payload.len(), pending.attempts);
            let crc32c = (self.has_checksums() && !payload.is_empty()).then(|| convert::crc32c(&payload));
            let header = pending.complete(tag, (queue.client, acknowledged), crc32c);
            return Poll::Ready(Some(pb::Frame { header: Some(header), payload }));
        }
        queue.stream = Some(context.waker().clone());
        Poll::Pending
    }

    /// Leaves a doubt about a sent frame, with the question that will settle it.
    pub(crate) fn doubt(&self, queue: &mut Queue, pending: &Pending, part: &CallPart) -> Arc<Doubt> {
        let residue = lock(&part.residue).take();
        let doubt =
            Doubt::new(self.shared.process, part.name.clone(), self.shard, part.elements.clone(), residue);
        self.shared.note_doubt(&doubt);
        let pb::Header { group, epoch, .. } = pending.header;
        let question = header::resolve(Target { slice: SliceId(part.slice), group, epoch });
        queue.push(question, Payload::Owned(Bytes::new()), Waiter::Doubt(doubt.clone()), pending.sender);
        queue.wake();
        doubt
    }

    /// Removes a part's frame because its call has ended; returns the parts that the frame carries.
    pub(crate) fn abandon(&self, call: &Call, first: usize) -> (Range<usize>, Abandoned) {
        let mut queue = lock(&self.queue);
        let tag = call.parts[first].tag();
        let Some(pending) = queue.frames.remove(tag) else {
            return (first..first + 1, Abandoned::Answered);
        };
        let range = match &pending.waiter {
            Waiter::Parts(_, parts) => parts.clone(),
            Waiter::Doubt(_) => first..first + 1,
        };
        let parts = &call.parts[range.clone()];
        let abandoned = if pending.attempts > 0 && pending.identified() {
            let doubts: Vec<_> = parts.iter().map(|part| self.doubt(&mut queue, &pending, part)).collect();
            if queue.session != 0 {
                let of_slices = doubts.iter().cloned().zip(parts.iter().map(|part| part.slice));
                queue.late.insert(tag, of_slices.collect());
            }
            Abandoned::Sent(doubts)
        } else {
            Abandoned::NotSent(self.refusal(&call.parts[first], self.why_not(&queue, pending.refused)))
        };
        self.check_drained(&queue);
        (range, abandoned)
    }

    /// Reason why a frame has no answer at its deadline: the last refusal, unless the connection is gone.
    fn why_not(&self, queue: &Queue, refused: Option<Error>) -> Error {
        let mut error = self.not_sent(queue);
        match refused {
            Some(refused) if queue.session != 0 => refused,
            Some(refused) => {
                error.message = format!("{}; the answer before: {}", error.message, refused.message);
                error
            }
            None => error,
        }
    }

    /// Reason why an abandoned frame was not answered, or not even sent.
    pub(crate) fn not_sent(&self, queue: &Queue) -> Error {
        if let Some(error) = self.shared.fence.error() {
            return error.clone();
        }
        let (what, kind) = if queue.closed {
            ("the client was closed", Kind::Connection)
        } else {
            ("the deadline passed", Kind::Deadline)
        };
        let address = self.address();
        match &queue.last_error {
            Some(error) => {
                let mut message =
                    format!("{what} without a connection to {address}: {}", self.in_trouble(&error.message));
                let refused = error.kind == Kind::Unauthenticated;
                if !refused && !queue.closed {
                    message.push_str(
                        "; if that server has stopped, start it again: with --data-dir it keeps what it held",
                    );
                }
                Error::new(if refused { error.kind } else { Kind::Connection }, message)
            }
            None => Error::new(kind, format!("{what} before {address} answered")),
        }
    }

    /// The error of a part that was not applied.
    pub(crate) fn refusal(&self, part: &CallPart, mut error: Error) -> Error {
        // A slice's number means nothing to a user. A tensor still being registered keeps its retry time.
        if error.kind == Kind::UnknownTensor && error.retry_after_ms.is_none() {
            error.message = self.gone(&part.name);
        }
        part.refused(error)
    }

    pub(crate) fn refuse(&self, call: &Call, parts: Range<usize>, error: &Error) {
        for part in parts {
            call.deliver(part, Outcome::Failed(self.refusal(&call.parts[part], error.clone())), None);
        }
    }
}
