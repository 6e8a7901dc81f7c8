//! Pushes and assignments: from the caller's arrays to queued frames, and from answers to receipts.

use crate::client::Client;
use crate::link::call::{Call, CallPart, Outcome};
use crate::link::payload::{Memory, Payload};
use crate::link::queue::Frame;
use crate::state::doubt::Residue;
use crate::state::map::Entry;
use crate::state::runtime::lock;
use crate::state::stats;
use crate::state::time::after;
use bytes::Bytes;
use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::dtype::View;
use fastps_core::error::Result;
use fastps_core::frame::{Action, Base, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::outgoing;
use fastps_core::verbs::{Caller, Gradient, GradientRef, PushOptions, Versions};
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, Route};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// So many elements are encoded at a time, about a slice: while the next are, these are on their way.
const ENCODE_BATCH_ELEMENTS: usize = 1 << 17;

/// A part with its frame, not yet queued.
pub(crate) struct Draft {
    pub(crate) part: CallPart,
    /// Further parts of a sparse message.
    pub(crate) more: Vec<CallPart>,
    pub(crate) header: pb::Header,
    pub(crate) payload: Payload,
}

/// Makes the bodies of a push.
struct Encoder<'a> {
    isa: Isa,
    gradients: &'a [Gradient],
    options: &'a PushOptions,
    sequence: u64,
}

impl Encoder<'_> {
    /// The body of a part. What it says is noted, to be given back if it is not applied.
    fn encode(&self, part: &CallPart) -> Result<Bytes> {
        let (gradient, codec) = (&self.gradients[part.tensor], self.options.codec);
        let View::Float32(values) = gradient.values.view();
        let position = Position { first_element: part.elements.start as u64, sequence: self.sequence };
        // Not held beyond this body: answers to those before it may give content back.
        let mut feedback = self.options.feedback.as_deref().map(lock);
        let rest = match feedback.as_deref_mut() {
            Some(feedback) => {
                Some(&mut feedback.residual(&gradient.name, values.len())?[part.elements.clone()])
            }
            None => None,
        };
        let values = &values[part.elements.clone()];
        let body = if self.options.check_finite {
            let mut body = Vec::with_capacity(part.sent_bytes);
            codec.encode(self.isa, values, rest, position, &mut body);
            body
        } else {
            outgoing::check_and_encode(self.isa, codec, values, rest, position)?
        };
        drop(feedback);
        let body = Bytes::from(body);
        *lock(&part.residue) = self.options.feedback.as_ref().map(|feedback| Residue {
            isa: self.isa,
            feedback: feedback.clone(),
            tensor: gradient.name.clone(),
            elements: part.elements.clone(),
            codec: codec.id(),
            body: body.clone(),
        });
        Ok(body)
    }
}

/// What the frames of one push have in common.
pub(crate) struct Common {
    pub(crate) epoch: u64,
    pub(crate) sequence: u64,
    pub(crate) reservation: u64,
}

impl Client {
    /// Checks, encodes and queues a push. Who wants values gets those that come meanwhile.
    pub(crate) fn start_push(
        &self,
        gradients: &[Gradient],
        options: &PushOptions,
        mut wants_values: Option<&mut dyn Caller>,
    ) -> Result<Arc<Call>> {
        let want_values = wants_values.is_some();
        let deadline = after(options.timeout);
        let (epoch, entries) = self.look_up(gradients.iter().map(|g| &g.name), deadline)?;
        if let Some(feedback) = &options.feedback {
            self.shared.settle_doubts(feedback, deadline)?;
        }
        let isa = Isa::get()?;
        let both = gradients.iter().map(Gradient::borrow).zip(entries.iter().map(|e| &*e.spec));
        outgoing::check_form(both.clone(), options, options.feedback.is_some())?;
        // What is not to be looked at in advance is looked at where it is encoded, slice by slice.
        let early = |gradient: &GradientRef<'_>| options.check_finite || gradient.indices.is_some();
        let checked = gradients.iter().map(Gradient::borrow).filter(early);
        outgoing::check_finite(isa, checked, options, options.feedback.as_deref().map(lock).as_deref_mut())?;
        let sparse = outgoing::gather(isa, both, options)?;
        stats::count(&self.shared.counters.pushes, 1);
        let lend = options.codec == Codec::Float32 && options.feedback.is_none();
        let lent = gradients.iter().zip(&sparse).filter(|(_, sparse)| lend && sparse.is_none());
        let mut memories = Vec::with_capacity(gradients.len());
        let mut lent = lent.map(|(gradient, _)| Memory::new(gradient.values.clone()));
        // Only stochastic rounding depends on the sequence number; else sparse bodies need none in advance.
        let numbered_first = matches!(options.codec, Codec::Int8 { seed: Some(_) });
        let mut last = numbered_first.then(|| self.lock_sequence());
        let sequence = last.as_deref_mut().map_or(0, next);
        let mut drafts = Vec::new();
        for (tensor, entry) in entries.iter().enumerate() {
            if let Some(gathered) = &sparse[tensor] {
                drafts.extend(self.sparse_push(isa, (tensor, entry), gathered, options, (epoch, sequence)));
                continue;
            }
            let memory = lent.next();
            memories.extend(memory.clone());
            for (k, range) in entry.spec.slices().enumerate() {
                let payload = match &memory {
                    Some(memory) => Payload::Lent(memory.clone(), range),
                    None => Payload::Later(options.codec.id().body_len(range.len())),
                };
                let base = self.base(options, entry, (k, k));
                let push = Push { base, ..with_options(entry, k, options) };
                let common = Common { epoch, sequence, reservation: 0 };
                drafts.push(self.draft(tensor, entry, k, &push, &common, want_values, payload));
            }
        }
        let mut last = last.unwrap_or_else(|| self.lock_sequence());
        let sequence = if numbered_first { sequence } else { next(&mut last) };
        let (call, frames) = self.call(drafts, memories, deadline, true);
        let encoder = Encoder { isa, gradients, options, sequence };
        let (mut batch, mut encoded) = (Vec::with_capacity(frames.len()), 0);
        for mut frame in frames {
            frame.header.sequence = sequence;
            if matches!(frame.payload, Payload::Later(_)) {
                if encoded >= ENCODE_BATCH_ELEMENTS {
                    self.enqueue(&call, std::mem::take(&mut batch));
                    self.driver.run_once();
                    if let Some(caller) = &mut wants_values {
                        call.hand_out(*caller);
                    }
                    encoded = 0;
                }
                let part = &call.parts[frame.parts.start];
                match encoder.encode(part) {
                    Ok(body) => frame.payload = Payload::Owned(body),
                    Err(error) => {
                        call.deliver(frame.parts.start, Outcome::Failed(part.refused(error)), None);
                        continue;
                    }
                }
                encoded += part.elements.len();
            }
            batch.push(frame);
        }
        self.enqueue(&call, batch);
        Ok(call)
    }

    /// What a push to the tensor's k-th slice is based on; it is probably the j-th that is known.
    pub(crate) fn base(&self, options: &PushOptions, entry: &Entry, (k, j): (usize, usize)) -> Option<Base> {
        let versions = options.based_on.as_ref()?;
        let version = Versions::slice_near(versions.tensor(&entry.spec.name)?, j, entry.slices[k].0)?;
        let own = (versions.client == self.versions_id()).then_some(version.own);
        Some(Base { version: version.version, own })
    }

    /// One slice of a push or assignment.
    #[allow(clippy::too_many_arguments)] // one frame has that many sides
    pub(crate) fn draft(
        &self,
        tensor: usize,
        entry: &Entry,
        k: usize,
        push: &Push<'_>,
        common: &Common,
        want_values: bool,
        payload: Payload,
    ) -> Draft {
        let route = Route { group: entry.group, epoch: common.epoch, client: 0 };
        let identity = Identity { client: 0, sequence: common.sequence };
        let push = Push { identity, ..*push };
        let frame = convert::push_frame(0, route, &push, entry.spec.dtype, want_values, Bytes::new());
        let header = pb::Header { reservation: common.reservation, ..frame.header.unwrap_or_default() };
        let elements = entry.spec.slice_range(k);
        let answer_bytes = want_values.then_some(entry.spec.dtype.size() * elements.len());
        let part = CallPart {
            tensor,
            name: entry.spec.name.clone(),
            link: self.links[entry.slices[k].1].clone(),
            slice: entry.slices[k].0.0,
            elements,
            sent_bytes: payload.len(),
            answer_bytes,
            residue: Mutex::new(None),
            tag: AtomicU64::new(0),
        };
        Draft { part, more: Vec::new(), header, payload }
    }

    /// Queues the frames of a call. For identified ones, the caller holds the lock of the sequence numbers.
    pub(crate) fn submit(
        &self,
        drafts: Vec<Draft>,
        memories: Vec<Arc<Memory>>,
        deadline: Instant,
        identified: bool,
    ) -> Arc<Call> {
        let (call, frames) = self.call(drafts, memories, deadline, identified);
        self.enqueue(&call, frames);
        call
    }

    /// A call, and its frames that are not queued yet.
    fn call(
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

    fn enqueue(&self, call: &Arc<Call>, frames: Vec<Frame>) {
        let mut by_link: Vec<Vec<_>> = self.links.iter().map(|_| Vec::new()).collect();
        for frame in frames {
            let shard = call.parts[frame.parts.start].link.shard() as usize;
            by_link[shard].push(frame);
        }
        for (link, frames) in self.links.iter().zip(by_link).filter(|(_, frames)| !frames.is_empty()) {
            link.enqueue(call, frames);
        }
    }

    /// A whole assignment, one body or range of memory per slice.
    pub(crate) fn start_assign(
        &self,
        entry: &Entry,
        bodies: Vec<(Action, Payload)>,
        memories: Vec<Arc<Memory>>,
        epoch: u64,
        timeout: Duration,
    ) -> Arc<Call> {
        let mut last = self.lock_sequence();
        let common = Common { epoch, sequence: next(&mut last), reservation: 0 };
        let drafts = bodies.into_iter().enumerate().map(|(k, (action, payload))| {
            let push = Push { action, ..push(entry, k, CodecId::Float32) };
            self.draft(0, entry, k, &push, &common, false, payload)
        });
        let drafts = drafts.collect();
        self.submit(drafts, memories, after(timeout), true)
    }
}

/// The next sequence number, of a client whose numbers are locked.
pub(crate) fn next(last: &mut u64) -> u64 {
    *last += 1;
    *last
}

/// A gradient with the settings of its push.
pub(crate) fn with_options(entry: &Entry, k: usize, options: &PushOptions) -> Push<'static> {
    let PushOptions { lr, scale, correction, .. } = *options;
    Push { lr, scale, correction, ..push(entry, k, options.codec.id()) }
}

/// A push without settings.
pub(crate) fn push(entry: &Entry, k: usize, codec: CodecId) -> Push<'static> {
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
