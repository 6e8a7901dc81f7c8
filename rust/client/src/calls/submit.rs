//! Turns drafted frames into a call whose frames wait at their links.

use crate::client::Client;
use crate::link::call::{Call, CallPart};
use crate::link::payload::{Memory, Payload};
use crate::link::queue::Frame;
use crate::state::map::Entry;
use crate::state::time::after;
use fastps_proto::v1 as pb;
use fastps_transport::convert::header;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A part with its frame, not yet queued.
pub(crate) struct Draft {
    pub(crate) part: CallPart,
    /// Further parts of a sparse message.
    pub(crate) more: Vec<CallPart>,
    pub(crate) header: pb::Header,
    pub(crate) payload: Payload,
}

impl Client {
    /// One slice of a push or assignment; `answer_bytes` is the size of the values in the answer.
    pub(crate) fn draft(
        &self,
        tensor: usize,
        entry: &Entry,
        k: usize,
        header: pb::Header,
        answer_bytes: Option<usize>,
        payload: Payload,
    ) -> Draft {
        let part = CallPart {
            tensor,
            name: entry.spec.name.clone(),
            link: self.links[entry.slices[k].1].clone(),
            slice: entry.slices[k].0.0,
            elements: entry.spec.slice_range(k),
            sent_bytes: payload.len(),
            answer_bytes,
            residue: Mutex::new(None),
            tag: AtomicU64::new(0),
        };
        Draft { part, more: Vec::new(), header, payload }
    }

    /// Queues the frames of a call. `sequence` is given if it changes anything; the caller then holds the
    /// lock of the sequence numbers.
    pub(crate) fn submit(
        &self,
        drafts: Vec<Draft>,
        memories: Vec<Arc<Memory>>,
        deadline: Instant,
        sequence: Option<u64>,
    ) -> Arc<Call> {
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
    ) -> (Arc<Call>, Vec<Frame>) {
        let (mut parts, mut frames) = (Vec::with_capacity(drafts.len()), Vec::with_capacity(drafts.len()));
        for Draft { part, more, header, payload } in drafts {
            let first = parts.len();
            parts.push(part);
            parts.extend(more);
            frames.push(Frame { parts: first..parts.len(), header, payload });
        }
        (Call::new(self.shared.process, deadline, identified, parts, memories), frames)
    }

    /// Queues frames of a call at the links to their shards, under this sequence number.
    pub(crate) fn enqueue(&self, call: &Arc<Call>, frames: Vec<Frame>, sequence: u64) {
        let mut by_link: Vec<Vec<_>> = self.links.iter().map(|_| Vec::new()).collect();
        for frame in frames {
            let shard = call.parts[frame.parts.start].link.shard() as usize;
            by_link[shard].push(frame);
        }
        for (link, frames) in self.links.iter().zip(by_link).filter(|(_, frames)| !frames.is_empty()) {
            link.enqueue(call, frames, sequence);
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
    ) -> Arc<Call> {
        let mut last = self.lock_sequence();
        let sequence = next(&mut last);
        let drafts = bodies.into_iter().enumerate().map(|(k, (step, payload))| {
            let count = entry.spec.slice_range(k).len() as u64;
            let header = header::assignment(entry.target(k, epoch), entry.spec.dtype, count, step, 0);
            self.draft(0, entry, k, header, None, payload)
        });
        self.submit(drafts.collect(), memories, after(timeout), Some(sequence))
    }
}

/// The next sequence number of a client whose numbers are locked.
pub(crate) fn next(last: &mut u64) -> u64 {
    *last += 1;
    *last
}
