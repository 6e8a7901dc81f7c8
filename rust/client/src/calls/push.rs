//! Pushes: a gradient is checked, encoded slice by slice, and queued at the links to its shards.

use crate::calls::small::{Body, Kinship, SmallSlice, SmallSlices};
use crate::calls::submit::{Draft, next};
use crate::client::Client;
use crate::link::call::payload::{Memory, Payload};
use crate::link::call::{Call, CallPart, Outcome};
use crate::link::queue::Frame;
use crate::link::wait::CallHandle;
use crate::state::doubt::Residue;
use crate::state::map::Entry;
use crate::state::runtime::lock;
use crate::state::stats;
use crate::state::time::after;
use bytes::Bytes;
use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::Base;
use fastps_core::isa::Isa;
use fastps_core::outgoing;
use fastps_core::sparse::Gathered;
use fastps_core::verbs::{Caller, Gradient, GradientRef, PushOptions, Versions};
use fastps_transport::convert::header::{self, GradientSettings, separate};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Elements per batch, about a slice: one batch is sent while the next is encoded.
const ENCODE_BATCH_ELEMENTS: usize = 1 << 17;

/// Makes the bodies of a push.
struct Encoder<'a> {
    isa: Isa,
    gradients: &'a [Gradient],
    options: &'a PushOptions,
    sequence: u64,
}

impl Encoder<'_> {
    /// The body of a part. Remembers its residue, to restore it if the part is not applied.
    fn encode(&self, part: &CallPart) -> Result<Bytes> {
        let (gradient, codec) = (&self.gradients[part.tensor], self.options.encoder());
        if let Some(bodies) = gradient.values.bodies() {
            return Ok(Bytes::copy_from_slice(bodies.of(part.elements.clone())));
        }
        let values = gradient.values.view().float32s()?;
        let position = Position { first_element: part.elements.start as u64, sequence: self.sequence };
        // Locked per body: answers to earlier bodies may restore content.
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

    /// Encodes the parts of a frame. If one fails, the others are sent in frames of their own.
    fn encode_frame(&self, call: &Call, mut frame: Frame) -> Vec<Frame> {
        let bodies: Vec<_> = call.parts[frame.parts.clone()].iter().map(|part| self.encode(part)).collect();
        if bodies.iter().all(Result::is_ok) {
            let mut bodies: Vec<_> = bodies.into_iter().flatten().collect();
            let joined = if bodies.len() == 1 { bodies.pop() } else { None };
            frame.payload = Payload::Owned(joined.unwrap_or_else(|| bodies.concat().into()));
            return vec![frame];
        }
        let single = frame.parts.len() == 1;
        let headers: Vec<_> = if single { vec![frame.header] } else { separate(&frame.header).collect() };
        let mut sent = Vec::new();
        for ((index, body), header) in frame.parts.zip(bodies).zip(headers) {
            match body {
                Ok(body) => {
                    sent.push(Frame { parts: index..index + 1, header, payload: Payload::Owned(body) });
                }
                Err(error) => {
                    call.deliver(index, Outcome::Failed(call.parts[index].refused(error)), None);
                }
            }
        }
        sent
    }
}

/// A push that was checked.
struct Checked<'a> {
    isa: Isa,
    gradients: &'a [Gradient],
    options: &'a PushOptions,
    epoch: u64,
    entries: Vec<Arc<Entry>>,
    /// The rows of each sparse gradient, slice by slice.
    sparse: Vec<Option<Gathered>>,
}

impl Client {
    /// Checks, encodes and queues a push. A caller that wants values receives them as they arrive.
    pub(crate) fn start_push(
        &self,
        gradients: &[Gradient],
        options: &PushOptions,
        wants_values: Option<&mut dyn Caller>,
    ) -> Result<CallHandle> {
        let deadline = after(options.timeout);
        let checked = self.check_push(gradients, options, deadline, wants_values.is_some())?;
        if wants_values.is_some() {
            checked.entries.iter().try_for_each(|entry| entry.spec.need_float32("push_pull"))?;
        }
        stats::count(&self.shared.counters.pushes, 1);
        // Only stochastic rounding depends on the sequence number; without it no lock is held while sparse
        // bodies are encoded.
        let numbered_first = matches!(options.codec, Some(Codec::Int8 { seed: Some(_) }));
        let mut last = numbered_first.then(|| self.lock_sequence());
        let first = last.as_deref_mut().map(next);
        let (drafts, memories) = self.push_drafts(&checked, first.unwrap_or(0), wants_values.is_some());
        let mut last = last.unwrap_or_else(|| self.lock_sequence());
        let sequence = first.unwrap_or_else(|| next(&mut last));
        let (call, frames) = self.call(drafts, memories, deadline, true);
        let encoder = Encoder { isa: checked.isa, gradients, options, sequence };
        self.encode_and_enqueue(&call, frames, &encoder, wants_values);
        Ok(call)
    }

    /// Fails if a server of the tensor matches momentum by another rule, which would train another model.
    fn check_matching(&self, entry: &Entry) -> Result<()> {
        if !entry.spec.optimizer.has_momentum() {
            return Ok(());
        }
        let links = entry.slices.iter().map(|(_, shard)| &self.links[*shard]);
        let Some(link) = links.into_iter().find(|link| !link.matches.load(Ordering::Relaxed)) else {
            return Ok(());
        };
        let why = "the server is of an earlier version, which matches momentum by the number of clients";
        let error = Error::new(Kind::Precondition, why).shard(link.shard()).tensor(entry.spec.name.clone());
        Err(error.expected("a server that matches it by staleness, or momentum_matching=False", "neither"))
    }

    /// Looks the tensors up and scans the whole push before any part of it is sent. A caller that `wants_values`
    /// has memory for those of the tensors that it knew.
    fn check_push<'a>(
        &self,
        gradients: &'a [Gradient],
        options: &'a PushOptions,
        deadline: Instant,
        wants_values: bool,
    ) -> Result<Checked<'a>> {
        let names = gradients.iter().map(|gradient| &gradient.name);
        let check = |entries: &[Arc<Entry>]| {
            let both = gradients.iter().map(Gradient::borrow).zip(entries.iter().map(|e| &*e.spec));
            outgoing::check_form(both, options, options.feedback.is_some())
        };
        let (epoch, entries) = if wants_values {
            let found = self.look_up(names, deadline)?;
            self.doubted(check(&found.1)).map(|()| found)?
        } else {
            let (epoch, entries, ()) = self.look_up_for(names, deadline, check)?;
            (epoch, entries)
        };
        if options.correction.is_some_and(|asked| asked.momentum_matching) {
            entries.iter().try_for_each(|entry| self.check_matching(entry))?;
        }
        if let Some(feedback) = &options.feedback {
            self.shared.settle_doubts(feedback, deadline)?;
        }
        let isa = Isa::get()?;
        let both = gradients.iter().map(Gradient::borrow).zip(entries.iter().map(|e| &*e.spec));
        // The rest is checked slice by slice while encoding.
        let early = |gradient: &GradientRef<'_>| {
            options.check_finite || gradient.indices.is_some() || gradient.bodies.is_some()
        };
        let checked = gradients.iter().map(Gradient::borrow).filter(early);
        outgoing::check_finite(isa, checked, options, options.feedback.as_deref().map(lock).as_deref_mut())?;
        let sparse = outgoing::gather(isa, both, options)?;
        Ok(Checked { isa, gradients, options, epoch, entries, sparse })
    }

    /// One frame per large slice of each gradient, shared ones for small slices, and the callers' arrays that are
    /// sent without a copy.
    fn push_drafts(
        &self,
        push: &Checked<'_>,
        sequence: u64,
        want_values: bool,
    ) -> (Vec<Draft>, Vec<Arc<Memory>>) {
        let &Checked { isa, gradients, options, epoch, .. } = push;
        let lend = options.is_plain() && options.feedback.is_none();
        let (mut drafts, mut memories) = (Vec::new(), Vec::new());
        let mut small = SmallSlices::new(|kin: Kinship, parts, bases: &[Option<Base>]| {
            let codec = kin.codec.unwrap_or(CodecId::plain(kin.dtype));
            let settings = settings(kin.dtype, codec, options);
            header::whole_gradients(kin.target(epoch), &settings, parts, bases, want_values)
        });
        for (tensor, (entry, sparse)) in push.entries.iter().zip(&push.sparse).enumerate() {
            if let Some(gathered) = sparse {
                drafts.extend(self.sparse_push(isa, (tensor, entry), gathered, options, (epoch, sequence)));
                continue;
            }
            let values = &gradients[tensor].values;
            let bodies = values.bodies().map(|bodies| bodies.codec);
            let lends = lend && bodies.is_none();
            let mut memory = None;
            let codec = bodies.unwrap_or_else(|| options.codec_of(entry.spec.dtype));
            let answer = want_values.then_some(entry.spec.dtype.size());
            for (k, range) in entry.spec.slices().enumerate() {
                let (sent_bytes, base) = (codec.body_len(range.len()), self.base(options, entry, (k, k)));
                let answer_bytes = answer.map(|size| size * range.len());
                if self.is_small(entry, k, sent_bytes, answer_bytes) {
                    let view = lends.then(|| values.view().get(range));
                    let body =
                        view.as_ref().map_or(Body::Later(sent_bytes), |view| Body::Ready(view.bytes()));
                    let codec = Some(codec);
                    drafts.extend(small.add(SmallSlice {
                        tensor,
                        entry,
                        k,
                        codec,
                        bfloat16: false,
                        base,
                        reservation: 0,
                        body,
                        answer_bytes,
                    }));
                    continue;
                }
                let settings = settings(entry.spec.dtype, codec, options);
                let (target, count) = (entry.target(k, epoch), range.len() as u64);
                let header = header::gradient(target, &settings, count, base, want_values);
                let payload = if lends {
                    let memory = memory.get_or_insert_with(|| Memory::new(values.clone()));
                    Payload::Lent(memory.clone(), range)
                } else {
                    Payload::Later(sent_bytes)
                };
                drafts.push(Draft::new(tensor, entry, k, header, answer_bytes, payload));
            }
            memories.extend(memory);
        }
        drafts.extend(small.finish());
        (drafts, memories)
    }

    /// Encodes the remaining parts and queues them batch by batch, so that a batch is sent while the next is
    /// encoded.
    fn encode_and_enqueue(
        &self,
        call: &CallHandle,
        frames: Vec<Frame>,
        encoder: &Encoder<'_>,
        mut wants_values: Option<&mut dyn Caller>,
    ) {
        let (mut batch, mut encoded) = (Vec::with_capacity(frames.len()), 0);
        for frame in frames {
            if matches!(frame.payload, Payload::Later(_)) {
                if encoded >= ENCODE_BATCH_ELEMENTS {
                    self.enqueue(call, std::mem::take(&mut batch), encoder.sequence);
                    self.driver.run_once();
                    if let Some(caller) = &mut wants_values {
                        call.hand_out(*caller);
                    }
                    encoded = 0;
                }
                let parts = &call.parts[frame.parts.clone()];
                encoded += parts.iter().map(|part| part.elements.len()).sum::<usize>();
                batch.extend(encoder.encode_frame(call, frame));
                continue;
            }
            batch.push(frame);
        }
        self.enqueue(call, batch, encoder.sequence);
    }

    /// The base of a push to the tensor's k-th slice; its known version is probably the j-th.
    pub(crate) fn base(&self, options: &PushOptions, entry: &Entry, (k, j): (usize, usize)) -> Option<Base> {
        let versions = options.based_on.as_ref()?;
        let version = Versions::slice_near(versions.tensor(&entry.spec.name)?, j, entry.slices[k].0)?;
        let own = (versions.client == self.versions_id()).then_some(version.own);
        Some(Base { version: version.version, own })
    }
}

/// Settings shared by all gradients of one push to a tensor.
pub(crate) fn settings(dtype: DType, codec: CodecId, options: &PushOptions) -> GradientSettings<'_> {
    let &PushOptions { lr, scale, weight, correction, ref note, .. } = options;
    GradientSettings {
        dtype,
        codec,
        lr,
        scale,
        weight,
        correction,
        note: note.as_deref().unwrap_or_default(),
    }
}
