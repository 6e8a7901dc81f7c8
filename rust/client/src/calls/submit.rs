//! Turns drafted frames into a call whose frames wait at their links.

use crate::client::Client;
use crate::link::call::payload::{Memory, Payload};
use crate::link::call::{Call, CallPart};
use crate::link::queue::Frame;
use crate::link::wait::CallHandle;
use crate::state::map::Entry;
use crate::state::time::after;
use fastps_proto::v1 as pb;
use fastps_transport::convert::header;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A part with its frame, not yet queued.
pub(crate) struct Draft {
    pub(crate) part: CallPart,
    /// Further parts of the message.
    pub(crate) more: Vec<CallPart>,
    pub(crate) header: pb::Header,
    pub(crate) payload: Payload,
}

impl Draft {
    /// One slice; `answer_bytes` is the size of the values in the answer.
    pub(crate) fn new(
        tensor: usize,
        entry: &Entry,
        k: usize,
        header: pb::Header,
        answer_bytes: Option<usize>,
        payload: Payload,
    ) -> Self {
        let elements = entry.spec.slice_range(k);
        let part = CallPart::new(tensor, entry, k, elements, payload.len(), answer_bytes);
        Self { part, more: Vec::new(), header, payload }
    }
}

impl Client {
    /// Queues the frames of a call. `sequence` is given if it changes anything; the caller then holds the
    /// lock of the sequence numbers.
    pub(crate) fn submit(
        &self,
        drafts: Vec<Draft>,
        memories: Vec<Arc<Memory>>,
        deadline: Instant,
        sequence: Option<u64>,
    ) -> CallHandle {
        let (call, frames) = self.call(drafts, memories, deadline, sequence.is_some());
        self.enqueue(&call, frames, sequence.unwrap_or(0));
        call
    }

    /// A call, and its frames that are not queued yet.
    pub(crate) fn call(
        &self,
        drafts: Vec<Draft>,
        memories: Vec<Arc<Memory>>,
        deadline: Instant,
        identified: bool,
    ) -> (CallHandle, Vec<Frame>) {
        let (mut parts, mut frames) = (Vec::with_capacity(drafts.len()), Vec::with_capacity(drafts.len()));
        for Draft { part, more, header, payload } in drafts {
            let first = parts.len();
            parts.push(part);
            parts.extend(more);
            frames.push(Frame { parts: first..parts.len(), header, payload });
        }
        let links = self.links.clone();
        let recall = move |parts: &[CallPart]| parts.iter().for_each(|part| links[part.shard].recall());
        let process = self.shared.process;
        let call = Call::new(process, deadline, identified, parts, memories, Box::new(recall));
        (CallHandle::new(call, self.links.clone()), frames)
    }

    /// Queues frames of a call at the links to their shards, under this sequence number.
    pub(crate) fn enqueue(&self, call: &CallHandle, frames: Vec<Frame>, sequence: u64) {
        let mut by_link: Vec<Vec<_>> = self.links.iter().map(|_| Vec::new()).collect();
        for frame in frames {
            let shard = call.parts[frame.parts.start].shard;
            by_link[shard].push(frame);
        }
        for (link, frames) in self.links.iter().zip(by_link).filter(|(_, frames)| !frames.is_empty()) {
            link.enqueue(&call.call, frames, sequence);
        }
    }

    /// A whole assignment: the body or range of memory of each slice, with the step count for an optimizer's
    /// state.
    pub(crate) fn start_assign(
        &self,
        entry: &Entry,
        bodies: Vec<(Option<u64>, Payload)>,
        memories: Vec<Arc<Memory>>,
        epoch: u64,
        timeout: Duration,
    ) -> CallHandle {
        let mut last = self.lock_sequence();
        let sequence = next(&mut last);
        let drafts = bodies.into_iter().enumerate().map(|(k, (step, payload))| {
            let count = entry.spec.slice_range(k).len() as u64;
            let header = header::assignment(entry.target(k, epoch), entry.spec.dtype, count, step, 0);
            Draft::new(0, entry, k, header, None, payload)
        });
        self.submit(drafts.collect(), memories, after(timeout), Some(sequence))
    }
}

/// The next sequence number of a client whose numbers are locked.
pub(crate) fn next(last: &mut u64) -> u64 {
    *last += 1;
    *last
}
