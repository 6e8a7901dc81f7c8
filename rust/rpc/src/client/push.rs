//! Pushes and assignments: from the caller's arrays to queued frames, and from answers to receipts.

use super::call::{Call, Part};
use super::doubt::Residue;
use super::map::Entry;
use super::payload::{Memory, Payload};
use super::runtime::lock;
use super::{Client, after, stats};
use crate::convert::{self, Route};
use bytes::Bytes;
use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::dtype::View;
use fastps_core::error::Result;
use fastps_core::frame::{Action, Base, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::outgoing;
use fastps_core::verbs::{Gradient, PushOptions, Versions};
use fastps_proto::v1 as pb;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A part with its frame, not yet queued.
pub(super) struct Draft {
    pub(super) part: Part,
    /// Further parts of a sparse message.
    pub(super) more: Vec<Part>,
    pub(super) header: pb::Header,
    pub(super) payload: Payload,
}

/// What the frames of one push have in common.
pub(super) struct Common {
    pub(super) epoch: u64,
    pub(super) sequence: u64,
    pub(super) reservation: u64,
}

impl Client {
    /// Checks, encodes and queues a push.
    pub(super) fn start_push(
        &self,
        gradients: &[Gradient],
        options: &PushOptions,
        want_values: bool,
    ) -> Result<Arc<Call>> {
        let deadline = after(options.timeout);
        let (epoch, entries) = self.look_up(gradients.iter().map(|g| &g.name), deadline)?;
        if let Some(feedback) = &options.feedback {
            self.shared.settle_doubts(feedback, deadline)?;
        }
        let isa = Isa::get()?;
        // Only stochastic rounding depends on the sequence number; else encoding needs no turn. The turn comes before
        // the residuals: whoever has the turn may have to give content back to them.
        let in_turn = matches!(options.codec, Codec::Int8 { seed: Some(_) });
        let mut turn = in_turn.then(|| self.turn());
        let mut guard = options.feedback.as_deref().map(lock);
        let both = gradients.iter().map(Gradient::borrow).zip(entries.iter().map(|e| &*e.spec));
        outgoing::check(isa, both.clone(), options, guard.as_deref_mut())?;
        let sparse = outgoing::gather(isa, both, options)?;
        stats::count(&self.shared.counters.pushes, 1);
        let lend = options.codec == Codec::Float32 && options.feedback.is_none();
        let lent = gradients.iter().zip(&sparse).filter(|(_, sparse)| lend && sparse.is_none());
        let mut memories = Vec::with_capacity(gradients.len());
        let mut lent = lent.map(|(gradient, _)| Memory::new(gradient.values.clone()));
        let sequence = turn.as_deref_mut().map_or(0, next);
        let mut drafts = Vec::new();
        for (tensor, (gradient, entry)) in gradients.iter().zip(&entries).enumerate() {
            if let Some(gathered) = &sparse[tensor] {
                drafts.extend(self.sparse_push(isa, (tensor, entry), gathered, options, (epoch, sequence)));
                continue;
            }
            let View::Float32(values) = gradient.values.view();
            let memory = lent.next();
            memories.extend(memory.clone());
            let mut residual = match guard.as_deref_mut() {
                Some(feedback) => Some(feedback.residual(&gradient.name, values.len())?),
                None => None,
            };
            for (k, range) in entry.spec.slices().enumerate() {
                let (payload, residue) = if let Some(memory) = &memory {
                    (Payload::Lent(memory.clone(), range.clone()), None)
                } else {
                    let values = &values[range.clone()];
                    let position = Position { first_element: range.start as u64, sequence };
                    let mut body = Vec::with_capacity(options.codec.id().body_len(values.len()));
                    let rest = residual.as_deref_mut().map(|r| &mut r[range.clone()]);
                    options.codec.encode(isa, values, rest, position, &mut body);
                    let body = Bytes::from(body);
                    let residue = options.feedback.as_ref().map(|feedback| Residue {
                        feedback: feedback.clone(),
                        tensor: gradient.name.clone(),
                        first_element: range.start,
                        elements: range.len(),
                        codec: options.codec.id(),
                        body: body.clone(),
                    });
                    (Payload::Owned(body), residue)
                };
                let base = self.base(options, entry, (k, k));
                let push = Push { base, ..with_options(entry, k, options) };
                let common = Common { epoch, sequence, reservation: 0 };
                drafts.push(self.draft(tensor, entry, k, &push, &common, want_values, payload, residue));
            }
        }
        drop(guard);
        let mut turn = turn.unwrap_or_else(|| self.turn());
        if !in_turn {
            let sequence = next(&mut turn);
            for draft in &mut drafts {
                draft.header.sequence = sequence;
            }
        }
        Ok(self.submit(drafts, memories, deadline, true))
    }

    /// What a push to the tensor's k-th slice is based on; it is probably the j-th that is known.
    pub(super) fn base(&self, options: &PushOptions, entry: &Entry, (k, j): (usize, usize)) -> Option<Base> {
        let versions = options.based_on.as_ref()?;
        let version = Versions::slice_near(versions.tensor(&entry.spec.name)?, j, entry.slices[k].0)?;
        let own = (versions.client == self.versions_id()).then_some(version.own);
        Some(Base { version: version.version, own })
    }

    /// One slice of a push or assignment.
    #[allow(clippy::too_many_arguments)] // one frame has that many sides
    pub(super) fn draft(
        &self,
        tensor: usize,
        entry: &Entry,
        k: usize,
        push: &Push<'_>,
        common: &Common,
        want_values: bool,
        payload: Payload,
        residue: Option<Residue>,
    ) -> Draft {
        let route = Route { group: entry.group, epoch: common.epoch, client: 0 };
        let identity = Identity { client: 0, sequence: common.sequence };
        let push = Push { identity, ..*push };
        let frame = convert::push_frame(0, route, &push, entry.spec.dtype, want_values, Bytes::new());
        let header = pb::Header { reservation: common.reservation, ..frame.header.unwrap_or_default() };
        let elements = entry.spec.slice_range(k);
        let answer_bytes = want_values.then_some(entry.spec.dtype.size() * elements.len());
        let part = Part {
            tensor,
            name: entry.spec.name.clone(),
            link: self.links[entry.slices[k].1].clone(),
            slice: entry.slices[k].0.0,
            elements,
            sent_bytes: payload.len(),
            answer_bytes,
            residue: Mutex::new(residue),
            tag: AtomicU64::new(0),
        };
        Draft { part, more: Vec::new(), header, payload }
    }

    /// Queues the frames of a call. For identified ones, the caller holds the turn.
    pub(super) fn submit(
        &self,
        drafts: Vec<Draft>,
        memories: Vec<Arc<Memory>>,
        deadline: std::time::Instant,
        identified: bool,
    ) -> Arc<Call> {
        let mut frames: Vec<Vec<_>> = self.links.iter().map(|_| Vec::new()).collect();
        let mut parts = Vec::with_capacity(drafts.len());
        for draft in drafts {
            let first = parts.len();
            let shard = draft.part.link.shard() as usize;
            parts.push(draft.part);
            parts.extend(draft.more);
            frames[shard].push((first..parts.len(), draft.header, draft.payload));
        }
        let call = Call::new(self.shared.process, deadline, identified, parts, memories);
        for (link, frames) in self.links.iter().zip(frames) {
            if !frames.is_empty() {
                link.enqueue(&call, frames);
            }
        }
        call
    }

    /// A whole assignment, one body or range of memory per slice.
    pub(super) fn start_assign(
        &self,
        entry: &Entry,
        bodies: Vec<(Action, Payload)>,
        memories: Vec<Arc<Memory>>,
        epoch: u64,
        timeout: Duration,
    ) -> Arc<Call> {
        let mut turn = self.turn();
        let common = Common { epoch, sequence: next(&mut turn), reservation: 0 };
        let drafts = bodies.into_iter().enumerate().map(|(k, (action, payload))| {
            let push = Push { action, ..push(entry, k, CodecId::Float32) };
            self.draft(0, entry, k, &push, &common, false, payload, None)
        });
        let drafts = drafts.collect();
        self.submit(drafts, memories, after(timeout), true)
    }
}

/// The next sequence number of a client whose turn it is.
pub(super) fn next(turn: &mut u64) -> u64 {
    *turn += 1;
    *turn
}

/// A gradient with the settings of its push.
pub(super) fn with_options(entry: &Entry, k: usize, options: &PushOptions) -> Push<'static> {
    let PushOptions { lr, scale, correction, .. } = *options;
    Push { lr, scale, correction, ..push(entry, k, options.codec.id()) }
}

/// A push without settings.
pub(super) fn push(entry: &Entry, k: usize, codec: CodecId) -> Push<'static> {
    Push {
        slice: entry.slices[k].0,
        action: Action::Gradient,
        identity: Identity { client: 0, sequence: 0 },
        base: None,
        lr: None,
        scale: None,
        momentum: None,
        correction: None,
        count: entry.spec.slice_range(k).len() as u64,
        codec,
        body: &[],
        trusted: false,
        indices: None,
        once: false,
    }
}
