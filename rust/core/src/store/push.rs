//! Pushes to a store: checks all gradients, then passes each slice its part of the values, plain or encoded.

use super::Store;
use super::places::Places;
use super::settle::{Answers, Begun, Residues};
use crate::base::dtype::View;
use crate::base::error::{Kind, Result};
use crate::base::sync::{Arc, Mutex, MutexGuard, Ordering, lock};
use crate::kernel::codec::{CodecId, ErrorFeedback, Position};
use crate::push::outcome::Collect;
use crate::push::outgoing;
use crate::push::residue::Residue;
use crate::push::sparse::Gathered;
use crate::slice::Slice;
use crate::slice::frame::{Applied, Base, Identity, Push};
use crate::verbs::{Gradient, GradientRef, PushOptions, Pushed, Versions};
use rayon::prelude::*;
use std::sync::OnceLock;

/// Gradients that are pushed repeatedly, with their targets.
#[derive(Debug)]
pub struct Bound {
    gradients: Arc<Vec<Gradient>>,
    places: Mutex<Places>,
}

/// What the encoded slices of one push leave behind.
#[derive(Default)]
pub(super) struct EncodedParts {
    /// The body of the last one.
    memory: Vec<u8>,
    pub(super) residues: Residues,
}

/// Data that the slices of one push share.
pub(super) struct UnderWay<'a> {
    pub(super) identity: Identity,
    pub(super) options: &'a PushOptions,
    /// Learning rates per tensor, which replace the options' rate; may be empty.
    pub(super) rates: &'a [Option<f64>],
    /// The largest magnitude of its values.
    pub(super) largest: f64,
    /// Created when a policy holds the first slice's push.
    pub(super) late: OnceLock<Arc<Collect>>,
}

impl<'o> UnderWay<'o> {
    pub(super) fn new(identity: Identity, options: &'o PushOptions, largest: f64) -> Self {
        UnderWay { identity, options, rates: &[], largest, late: OnceLock::new() }
    }

    /// Called when all slices have got the push.
    #[inline(always)]
    pub(super) fn begun(self, answers: Answers, residues: Residues, sent: Option<Vec<u64>>) -> Begun {
        Begun { identity: self.identity, answers, late: self.late.into_inner(), residues, sent }
    }

    /// The learning rate of the k-th tensor.
    #[inline(always)]
    fn lr(&self, k: usize) -> Option<f64> {
        self.rates.get(k).copied().flatten().or(self.options.lr)
    }

    /// The push to one whole slice.
    #[inline(always)]
    fn of<'a>(&'a self, slice: &Slice, codec: CodecId, body: &'a [u8]) -> Push<'a> {
        Push {
            lr: self.options.lr,
            scale: self.options.scale,
            weight: self.options.weight,
            correction: self.options.correction,
            largest: Some(self.largest),
            once: true,
            note: self.options.note.as_deref().unwrap_or_default(),
            ..Push::gradient(slice.id(), self.identity, slice.len() as u64, codec, body)
        }
    }
}

impl Store {
    /// Pushes gradients that the caller lends for the call:
    /// [`PushTensors::push`](crate::verbs::PushTensors::push) without an owned list.
    pub fn push_borrowed(&self, gradients: &[GradientRef<'_>], options: &PushOptions) -> Pushed {
        let _ends = self.shared.deadlines.end_complete_at_last();
        let (places, begun) = self.begin(gradients, options)?;
        self.settle(&places, begun, options.timeout)
    }

    /// Passes gradients to their slices, without waiting for slices whose push a policy holds.
    #[inline(always)]
    pub(super) fn begin(
        &self,
        gradients: &[GradientRef<'_>],
        options: &PushOptions,
    ) -> Result<(Places, Begun)> {
        let mut places = self.look_up(gradients.iter().map(|gradient| gradient.name))?;
        let specs = places.tensors.iter().map(|tensor| &*tensor.spec);
        let mut feedback = options.feedback.as_deref().map(lock);
        let both = gradients.iter().copied().zip(specs);
        let largest = outgoing::check(self.shared.isa, both.clone(), options, feedback.as_deref_mut())?;
        if gradients.iter().any(|gradient| gradient.indices.is_some()) {
            places.sparse = outgoing::gather(self.shared.isa, both, options)?;
            let begun = self.push_sparse(&places, gradients, options, largest)?;
            return Ok((places, begun));
        }
        let begun = self.push_to(&places, |k| gradients[k], options, largest, feedback)?;
        Ok((places, begun))
    }

    /// Looks up the targets of gradients that will be pushed repeatedly, and checks their shapes.
    pub fn bind(&self, gradients: Arc<Vec<Gradient>>) -> Result<Bound> {
        let places = self.look_up(gradients.iter().map(|gradient| &*gradient.name))?;
        for (gradient, tensor) in gradients.iter().zip(&places.tensors) {
            outgoing::check_shape(gradient.borrow(), &tensor.spec)?;
        }
        Ok(Bound { gradients, places: Mutex::new(places) })
    }

    /// Pushes a bound list. Its tensors are looked up again only if one was unregistered since.
    pub fn push_bound(&self, bound: &Bound, options: &PushOptions) -> Pushed {
        let _ends = self.shared.deadlines.end_complete_at_last();
        let mut places = lock(&bound.places);
        let gradients = || bound.gradients.iter().map(Gradient::borrow);
        if places.generation != self.shared.generation.load(Ordering::Acquire) {
            *places = self.look_up(gradients().map(|gradient| gradient.name))?;
            for (gradient, tensor) in gradients().zip(&places.tensors) {
                outgoing::check_shape(gradient, &tensor.spec)?;
            }
        }
        let mut feedback = options.feedback.as_deref().map(lock);
        outgoing::check_options(options, feedback.is_some())?;
        for tensor in &places.tensors {
            outgoing::check_rate(&tensor.spec, options.lr)?;
            outgoing::check_codec(&tensor.spec, options.codec, feedback.is_some())?;
        }
        let isa = self.shared.isa;
        let largest = outgoing::check_finite(isa, gradients(), options, feedback.as_deref_mut())?;
        let gradient = |k: usize| bound.gradients[k].borrow();
        let begun = self.push_to(&places, gradient, options, largest, feedback)?;
        self.settle(&places, begun, options.timeout)
    }

    /// Pushes checked gradients; `gradient` returns that of the k-th tensor.
    #[inline(always)]
    fn push_to<'a>(
        &self,
        places: &Places,
        gradient: impl Fn(usize) -> GradientRef<'a> + Sync,
        options: &PushOptions,
        largest: f64,
        feedback: Option<MutexGuard<'_, ErrorFeedback>>,
    ) -> Result<Begun> {
        let push = UnderWay::new(self.identity(), options, largest);
        let is_encoded = |k| gradient(k).bodies.is_some();
        if options.is_plain() && feedback.is_none() && !(0..places.tensors.len()).any(is_encoded) {
            let answers = self.push_plain(places, &push, |k| gradient(k).values);
            return Ok(push.begun(answers, Vec::new(), None));
        }
        let mut sent = vec![0; places.tensors.len()];
        let (answers, residues) = self.push_encoded(places, &push, gradient, feedback, &mut sent)?;
        Ok(push.begun(answers, residues, Some(sent)))
    }

    /// Pushes a list with sparse gradients in it.
    fn push_sparse(
        &self,
        places: &Places,
        gradients: &[GradientRef<'_>],
        options: &PushOptions,
        largest: f64,
    ) -> Result<Begun> {
        let push = UnderWay::new(self.identity(), options, largest);
        let (codec, mut body) = (options.encoder(), Vec::new());
        let (mut results, mut sent) = (Vec::new(), vec![0; places.tensors.len()]);
        for (k, tensor) in places.tensors.iter().enumerate() {
            let Some(Gathered { plan, values }) = places.rows(k) else {
                for slice in &tensor.slices {
                    let (codec, bytes) = self.body(&mut body, gradients[k], slice, &push, None)?;
                    sent[k] += bytes.len() as u64;
                    results.push(self.push_part(&push, (results.len(), k), slice, codec, bytes));
                }
                continue;
            };
            for (j, part) in plan.parts().iter().enumerate() {
                let (slice, values) = (&tensor.slices[part.slice], &values[part.elements.clone()]);
                let first_element = slice.range().start as u64;
                let position = Position { first_element, sequence: push.identity.sequence };
                let body = if options.is_plain() {
                    bytemuck::cast_slice(values)
                } else {
                    body.clear();
                    codec.encode(self.shared.isa, values, None, position, &mut body);
                    &body
                };
                let indices = plan.indices(part);
                sent[k] += (indices.bytes().len() + body.len()) as u64;
                let part = Push {
                    base: self.base(options, (k, j), slice),
                    count: values.len() as u64,
                    indices: Some(indices),
                    ..push.of(slice, codec.id(), body)
                };
                let late = || push.late.get_or_init(Arc::default).expect(results.len());
                let result = self.shared.shard.push_to(slice, &part, late);
                results.push(result);
            }
        }
        Ok(push.begun(results, Vec::new(), Some(sent)))
    }

    /// The version that a push to a slice is based on. The slice is probably the j-th known one of the k-th
    /// tensor, which makes the lookup fast.
    #[inline(always)]
    fn base(&self, options: &PushOptions, (k, j): (usize, usize), slice: &Slice) -> Option<Base> {
        let versions = options.based_on.as_ref()?;
        let version = Versions::slice_near(versions.tensor_near(k, &slice.spec().name)?, j, slice.id())?;
        let own = (versions.client == self.client).then_some(version.own);
        Some(Base { version: version.version, own })
    }

    /// Pushes plain values; a large push uses several threads.
    fn push_plain<'a>(
        &self,
        places: &Places,
        push: &UnderWay<'_>,
        values: impl Fn(usize) -> View<'a> + Sync,
    ) -> Answers {
        if let Some(pool) = self.pool(places.elements) {
            let parts: Vec<_> = places.parts().enumerate().collect();
            let one = |(part, (k, slice))| self.push_values(push, (part, k), slice, values(k));
            return pool.install(|| parts.into_par_iter().map(one).collect());
        }
        let mut results = Vec::with_capacity(places.tensors.len());
        for (k, tensor) in places.tensors.iter().enumerate() {
            for slice in &tensor.slices {
                results.push(self.push_values(push, (results.len(), k), slice, values(k)));
            }
        }
        results
    }

    /// Pushes one slice of a tensor's plain values. Inlined together with all that it calls up to the kernel:
    /// passing answers and scalars through memory between functions costs a tenth of a small push.
    #[inline(always)]
    pub(super) fn push_values(
        &self,
        push: &UnderWay<'_>,
        which: (usize, usize),
        slice: &Arc<Slice>,
        values: View<'_>,
    ) -> Option<Result<Applied>> {
        let codec = CodecId::plain(slice.spec().dtype.computed());
        self.push_part(push, which, slice, codec, values.get(slice.range()).bytes())
    }

    /// Pushes encoded values; adds to `sent` the bytes of each tensor.
    fn push_encoded<'a>(
        &self,
        places: &Places,
        push: &UnderWay<'_>,
        gradient: impl Fn(usize) -> GradientRef<'a>,
        mut feedback: Option<MutexGuard<'_, ErrorFeedback>>,
        sent: &mut [u64],
    ) -> Result<(Answers, Residues)> {
        let (mut results, mut memory) = (Vec::new(), EncodedParts::default());
        for (part, (k, slice)) in places.parts().enumerate() {
            let which = (part, k, slice);
            let (result, bytes) =
                self.push_encoded_part(push, which, gradient(k), feedback.as_deref_mut(), &mut memory)?;
            sent[k] += bytes;
            results.push(result);
        }
        Ok((results, memory.residues))
    }

    /// Encodes and pushes one slice, as [`Self::push_part`]; also returns the bytes of its body. What a slice
    /// has refused returns to its residual.
    pub(super) fn push_encoded_part(
        &self,
        push: &UnderWay<'_>,
        (part, k, slice): (usize, usize, &Arc<Slice>),
        given: GradientRef<'_>,
        mut feedback: Option<&mut ErrorFeedback>,
        EncodedParts { memory, residues }: &mut EncodedParts,
    ) -> Result<(Option<Result<Applied>>, u64)> {
        let (codec, body) = self.body(memory, given, slice, push, feedback.as_deref_mut())?;
        let result = self.push_part(push, (part, k), slice, codec, body);
        let guard = feedback.filter(|_| given.bodies.is_none());
        if let (Some(guard), Some(feedback)) = (guard, &push.options.feedback) {
            let (name, range) = (&slice.spec().name, slice.range());
            match &result {
                Some(Ok(_)) => {}
                Some(Err(error)) if error.kind == Kind::StalePush => {}
                Some(Err(error)) if error.kind == Kind::NonFinite => guard.forget(name, range),
                Some(Err(_)) => {
                    guard.give_back(self.shared.isa, name, range.start, codec, body, range.len())?;
                }
                None => residues.push((part, self.residue(slice, feedback, codec, body))),
            }
        }
        Ok((result, body.len() as u64))
    }

    fn residue(
        &self,
        slice: &Arc<Slice>,
        feedback: &Arc<Mutex<ErrorFeedback>>,
        codec: CodecId,
        body: &[u8],
    ) -> Residue<Vec<u8>> {
        let (tensor, elements) = (slice.spec().name.clone(), slice.range());
        let feedback = feedback.clone();
        Residue { isa: self.shared.isa, feedback, tensor, elements, codec, body: body.to_vec() }
    }

    /// The body of a slice, and its codec: as the caller has encoded it, or the plain values, or encoded into
    /// `memory`.
    fn body<'b>(
        &self,
        memory: &'b mut Vec<u8>,
        given: GradientRef<'b>,
        slice: &Slice,
        push: &UnderWay<'_>,
        feedback: Option<&mut ErrorFeedback>,
    ) -> Result<(CodecId, &'b [u8])> {
        let range = slice.range();
        if let Some(bodies) = given.bodies {
            return Ok((bodies.codec, bodies.of(range)));
        }
        if push.options.is_plain() && feedback.is_none() {
            return Ok((CodecId::plain(slice.spec().dtype.computed()), given.values.get(range).bytes()));
        }
        let (values, codec) = (given.values.float32s()?, push.options.encoder());
        let position = Position { first_element: range.start as u64, sequence: push.identity.sequence };
        let residual = match feedback {
            Some(feedback) => Some(&mut feedback.residual(&slice.spec().name, values.len())?[range.clone()]),
            None => None,
        };
        // All slices but the last have one length, so nothing is cleared before it is overwritten.
        memory.resize(codec.id().body_len(range.len()), 0);
        codec.encode_into(self.shared.isa, &values[range], residual, position, memory);
        Ok((codec.id(), memory))
    }

    /// Pushes one slice, which is this part of the push and belongs to its k-th tensor. Returns the answer,
    /// or `None` if a policy holds the push.
    #[inline(always)]
    fn push_part(
        &self,
        push: &UnderWay<'_>,
        (part, k): (usize, usize),
        slice: &Arc<Slice>,
        codec: CodecId,
        body: &[u8],
    ) -> Option<Result<Applied>> {
        let base = self.base(push.options, (k, slice.index()), slice);
        let late = || push.late.get_or_init(Arc::default).expect(part);
        let what = Push { base, lr: push.lr(k), ..push.of(slice, codec, body) };
        self.shared.shard.push_to(slice, &what, late)
    }
}
