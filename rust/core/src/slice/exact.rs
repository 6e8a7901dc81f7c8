//! The memory of an `exact` slice, guarded by the slice's lock. A push writes in place unless a pull has
//! pinned the values; then it writes to a copy, so that a pinned version never changes.

use super::context::{Counters, SliceContext};
use super::image::{Image, Standing};
use super::round::Round;
use super::snapshot::{Bytes, Copied, Snapshot};
use super::vectors::Vectors;
use crate::base::dtype::DType;
use crate::base::error::{Error, Kind, Result};
use crate::base::failpoint::reach;
use crate::base::fault::fault;
use crate::base::isa::prefetch;
use crate::base::sync::{self, Counted as Arc};
use crate::kernel::apply::{
    Exact, Rounded, apply, apply_float64, apply_rounded, apply_rows, apply_rows_rounded,
};
use crate::kernel::codec::{CodecId, float64_lanes};
use crate::kernel::ema::{Following, average_of};
use crate::kernel::overflow::{first_overflow, is_due, is_finite, may_overflow};
use crate::kernel::rounding::Rounder;
use crate::kernel::rows::Indices;
use crate::memory::{Buffer, Charge, Meter, Pieces, Purpose};
use crate::slice::frame::{Action, Applied, Push};
use crate::slice::identity::{IdentityTable, Outcome};
use std::ops::Range;

/// The first of a slice's arrays; the state follows.
const PARAMS: usize = 0;

#[derive(Debug)]
pub(super) struct ExactMemory {
    /// Shared with the pulls that are being sent; a push that finds such a pin writes to a spare copy
    /// instead.
    pub(super) params: Arc<Buffer>,
    /// The buffer that the last such push replaced; its pages are warm when the next one needs a copy.
    pub(super) spare: Option<Arc<Buffer>>,
    state: Vec<Buffer>,
    step: u64,
    pub(super) version: u64,
    /// Number of changes that were not gradients.
    pub(super) assigns: u64,
    pub(super) identities: IdentityTable,
    /// Gradients that wait for those of other workers to make a version together.
    pub(super) round: Option<Box<Round>>,
    /// The workers that had joined any group when the last such version was made.
    pub(super) arrivals: u64,
    /// The space that is open over the tensor: then only its programs change the slice.
    pub(super) vectors: Option<Box<Vectors>>,
    /// Set if the last scan found values or state that are not finite.
    pub(super) overflowed: bool,
    /// Set once the shard has removed the slice.
    pub(super) removed: bool,
    /// The last cut that the slice has seen.
    cut: u64,
    /// The slice's image in that cut, until it is written.
    in_cut: Option<Box<Result<Image>>>,
}

impl ExactMemory {
    pub(super) fn new(
        dtype: DType,
        len: usize,
        slots: usize,
        initial_state: f32,
        pieces: &mut Pieces,
    ) -> Self {
        let params = Buffer::filled(dtype, len, 0.0, PARAMS, pieces);
        let mut slot = |k| Buffer::filled(dtype.computed(), len, initial_state, PARAMS + 1 + k, pieces);
        Self {
            params: Arc::new(params),
            spare: None,
            state: (0..slots).map(&mut slot).collect(),
            step: 0,
            version: 0,
            assigns: 0,
            identities: IdentityTable::default(),
            round: None,
            arrivals: 0,
            vectors: None,
            overflowed: false,
            removed: false,
            cut: 0,
            in_cut: None,
        }
    }

    /// Applies and records a new push, under the slice's lock. On an error, nothing has changed.
    #[inline(always)]
    pub(super) fn apply(&mut self, slice: &SliceContext, push: &Push<'_>) -> Result<Applied> {
        if self.vectors.is_some() {
            return Err(self.occupied(slice));
        }
        let corrected;
        let push = match push.correction {
            None => push,
            Some(correction) => {
                corrected = slice.corrected(push, correction, self.version, &self.identities);
                &corrected
            }
        };
        let applied = self.apply_unrecorded(slice, push)?;
        reach("applied");
        slice.record(push, applied);
        Ok(applied)
    }

    /// The refusal of a push while a space is open.
    #[cold]
    fn occupied(&self, slice: &SliceContext) -> Error {
        Counters::count(&slice.counters.refused);
        let occupied = self.vectors.as_ref().map(|vectors| slice.name(vectors.occupied()));
        occupied.unwrap_or_else(|| Error::new(Kind::Internal, "no space is open"))
    }

    /// Applies a change without recording it: the caller replays it from its record, or records it
    /// afterwards.
    #[inline(always)]
    pub(super) fn apply_unrecorded(&mut self, slice: &SliceContext, push: &Push<'_>) -> Result<Applied> {
        self.meet_cut(slice);
        let dropped = fault("drop_half") && push.identity.sequence.is_multiple_of(2);
        match push.action {
            Action::Gradient if dropped => {}
            Action::Gradient => {
                let (lr, scale) = slice.rate_and_factor(push);
                self.step(slice, push, lr, scale)?;
            }
            Action::Assign => {
                let params = unpinned(slice, &mut self.params, &mut self.spare)?;
                for buffer in [Some(params), twin(slice, &mut self.state)].into_iter().flatten() {
                    match push.indices {
                        None => assign(slice, push, push.body, buffer),
                        Some(rows) => assign_rows(slice, push, rows, buffer),
                    }
                }
            }
            Action::AssignState { step } => {
                for (k, slot) in self.state.iter_mut().enumerate() {
                    assign(slice, push, &push.body[k * slice.slot_bytes()..][..slice.slot_bytes()], slot);
                }
                self.step = step;
            }
        }
        self.assigns += u64::from(push.action != Action::Gradient);
        if self.overflowed && push.action != Action::Gradient {
            self.scan(slice);
        }
        self.version += u64::from(!(dropped || fault("version_not_bumped")));
        let applied = slice.count(push, self.version, &mut self.identities);
        if !push.once {
            self.identities.note(push.identity, Outcome::Applied(applied.into()));
        }
        Ok(applied)
    }

    /// Takes one optimizer step at a rate, with the pushed values times `scale`. On an error, nothing has
    /// changed; a step that overflows is one.
    #[inline(always)]
    pub(super) fn step(&mut self, slice: &SliceContext, push: &Push<'_>, lr: f64, scale: f32) -> Result<()> {
        // Records lack this bound: the steps that they repeat have not overflowed.
        let largest = push.largest.map(|largest| largest * f64::from(scale.abs()));
        if largest.is_some_and(|largest| may_overflow(&slice.spec.optimizer, slice.spec.dtype, lr, largest)) {
            self.step_on_trial(slice, push, lr, scale)?;
        } else {
            self.take_step(slice, push, lr, scale)?;
        }
        if is_due(self.version + 1, slice.len, push.count as usize) {
            self.scan(slice);
        }
        Ok(())
    }

    /// Takes a step that may overflow, and takes it back if it does.
    #[cold]
    fn step_on_trial(&mut self, slice: &SliceContext, push: &Push<'_>, lr: f64, scale: f32) -> Result<()> {
        self.make_writable(slice)?;
        let copies = self.arrays().map(|array| array.bytes().len() as u64).sum();
        let _memory = slice.meter.take(Purpose::Copies, copies).map_err(|error| slice.name(error))?;
        let before: Vec<_> = self.arrays().map(|array| array.bytes().to_vec()).collect();
        self.take_step(slice, push, lr, scale)?;
        let overflow = |(old, new): (&Vec<u8>, &Buffer)| first_overflow(new.dtype(), old, new.bytes());
        let found = before.iter().zip(self.arrays()).find_map(overflow);
        let Some((at, value)) = found else {
            return Ok(());
        };
        unpinned(slice, &mut self.params, &mut self.spare)?.values_mut().copy_from_slice(&before[PARAMS]);
        for (slot, old) in self.state.iter_mut().zip(&before[PARAMS + 1..]) {
            slot.values_mut().copy_from_slice(old);
        }
        self.step -= 1;
        let rule = format!("{value} from {} with lr={lr:?}", slice.spec.optimizer.title());
        let message = format!("the step overflows at element {} and was not taken", slice.range().start + at);
        Err(slice.name(Error::new(Kind::NonFinite, message).expected("finite values and state", rule)))
    }

    /// The values and each slot of the state.
    fn arrays(&self) -> impl Iterator<Item = &Buffer> {
        std::iter::once(&*self.params).chain(&self.state)
    }

    /// Notes whether values or state have overflowed through many steps.
    #[cold]
    fn scan(&mut self, slice: &SliceContext) {
        let finite = self.arrays().all(|array| is_finite(slice.isa, array.dtype(), array.bytes()));
        self.overflowed = !finite;
    }

    #[inline(always)]
    fn take_step(&mut self, slice: &SliceContext, push: &Push<'_>, lr: f64, scale: f32) -> Result<()> {
        let optimizer = &slice.spec.optimizer;
        let params = unpinned(slice, &mut self.params, &mut self.spare)?;
        if slice.spec.dtype == DType::Float64 {
            let mut step = optimizer.float64_step(self.step, lr)?;
            if let Some(momentum) = push.momentum {
                step = step.with_momentum(momentum);
            }
            apply_float64(slice.isa, params.values_mut(), &mut self.state, push.body, scale.into(), step);
            self.step += 1;
            return Ok(());
        }
        let weight = slice.spec.average.and_then(|average| average.weight(self.step + 1));
        let (state, average) = average(slice, &mut self.state);
        let average = average.zip(weight).map(|(average, weight)| Following {
            isa: slice.isa,
            average: average.values_mut(),
            weight,
        });
        if let Some(rounding) = slice.spec.rounding {
            let first = slice.range().start as u64;
            let rounder = Rounder { isa: slice.isa, rounding, first, step: self.step };
            let storage = Rounded { params: params.values_mut(), state, average, rounder };
            take_rounded_step(slice, storage, push, lr, scale)?;
            self.step += 1;
            return Ok(());
        }
        let storage = Exact { params: params.values_mut(), first: 0, state, average };
        match push.indices {
            None => {
                let rule = slice.rule(push, self.step, lr);
                apply(slice.isa, storage, push.codec, push.body, scale, rule);
            }
            Some(indices) => {
                let rule = optimizer.sparse_rule(self.step, lr)?;
                apply_rows(slice.isa, storage, slice.touch(indices, push), rule);
            }
        }
        self.step += 1;
        Ok(())
    }

    /// Takes the memory that the next step needs, so that the step cannot fail for lack of it.
    pub(super) fn make_writable(&mut self, slice: &SliceContext) -> Result<()> {
        unpinned(slice, &mut self.params, &mut self.spare).map(|_| ())
    }

    /// Splits `charge` of a dropped slice: each buffer that readers still pin keeps its own part.
    pub(super) fn leave_to_readers(&mut self, slice_bytes: u64, charge: &mut Charge) {
        for buffer in std::iter::once(&self.params).chain(&self.spare) {
            if Arc::strong_count(buffer) > 1 {
                buffer.leave_to_readers(charge.split(slice_bytes));
            }
        }
        if let Some(vectors) = &mut self.vectors {
            vectors.leave_to_readers(slice_bytes);
        }
    }

    /// Takes an image at one version. The values are pinned; the state is copied, and charged if there is a
    /// meter.
    pub(super) fn image(&self, slice: &SliceContext, meter: Option<&sync::Arc<Meter>>) -> Result<Image> {
        let standing = Standing {
            version: self.version,
            step: self.step,
            assigns: self.assigns,
            clients: self.identities.image(),
            gradients: self.identities.gradients(),
        };
        let state =
            self.copied(slice.spec.dtype.computed(), 0, meter, self.state.iter().map(Buffer::bytes))?;
        let vectors = self
            .vectors
            .as_ref()
            .map(|vectors| vectors.image(|bytes| self.snapshot(slice.spec.dtype, 0, bytes)));
        Ok(Image { standing, values: self.pull(slice, 0)?, state, vectors })
    }

    /// Takes the slice's image for a cut that has begun since the last change. Every change must call this
    /// first.
    #[inline(always)]
    pub(super) fn meet_cut(&mut self, slice: &SliceContext) {
        if self.cut != slice.cuts.last() && !fault("cut_unseen") {
            self.take_part_in_cut(slice);
        }
    }

    /// As `meet_cut`, if the slice is about to forget what the push acknowledges.
    #[inline(always)]
    pub(super) fn meet_cut_to_acknowledge(&mut self, slice: &SliceContext, push: &Push<'_>) {
        if push.acknowledged > 0 {
            self.meet_cut(slice);
        }
    }

    /// Takes part in a cut. Without memory for the image, the cut fails and the push continues.
    #[cold]
    fn take_part_in_cut(&mut self, slice: &SliceContext) {
        let (last, covered) = slice.cuts.covers(&slice.spec.group);
        self.cut = last;
        self.in_cut = covered.then(|| Box::new(self.image(slice, Some(&slice.meter))));
    }

    /// The slice's image in the cut that is being written; an image of the present if the cut has none.
    pub(super) fn image_in_cut(&mut self, slice: &SliceContext) -> Result<Image> {
        self.meet_cut(slice);
        self.in_cut.take().map_or_else(|| self.image(slice, None), |image| *image)
    }

    /// Drops the image for a cut that is over.
    pub(super) fn leave_cut(&mut self) {
        self.in_cut = None;
    }

    /// Restores the slice from an image; `values` and `state` must have the right lengths.
    pub(super) fn restore(
        &mut self,
        slice: &SliceContext,
        standing: &Standing,
        values: &[u8],
        state: &[u8],
    ) -> Result<()> {
        let identities = IdentityTable::restored(&standing.clients, &standing.gradients, &slice.home())?;
        unpinned(slice, &mut self.params, &mut self.spare)?.values_mut().copy_from_slice(values);
        for (k, slot) in self.state.iter_mut().enumerate() {
            slot.values_mut().copy_from_slice(&state[k * slice.slot_bytes()..][..slice.slot_bytes()]);
        }
        (self.version, self.step, self.assigns) = (standing.version, standing.step, standing.assigns);
        (self.identities, self.vectors) = (identities, None);
        Ok(())
    }

    /// Returns whether readers pin both the values and the spare, so that the next push must take memory.
    pub(super) fn needs_memory(&self) -> bool {
        let has_readers = |buffer: &Arc<Buffer>| Arc::strong_count(buffer) > 1;
        has_readers(&self.params) && self.spare.as_ref().is_some_and(has_readers)
    }

    /// Pins the values.
    pub(super) fn pull(&self, slice: &SliceContext, client: u64) -> Result<Snapshot> {
        if fault("copy_on_write_skipped") {
            return self.copied(
                slice.spec.dtype,
                client,
                Some(&slice.meter),
                std::iter::once(self.params.bytes()),
            );
        }
        Ok(self.snapshot(slice.spec.dtype, client, Bytes::Pinned(self.params.clone())))
    }

    /// Copies the state, all slots in order.
    pub(super) fn pull_state(&self, slice: &SliceContext, client: u64) -> Result<Snapshot> {
        self.copied(
            slice.spec.dtype.computed(),
            client,
            Some(&slice.meter),
            self.state.iter().map(Buffer::bytes),
        )
    }

    /// Copies the average of the values.
    pub(super) fn pull_average(&self, slice: &SliceContext, client: u64) -> Result<Snapshot> {
        slice.spec.need_average()?;
        let dtype = slice.spec.dtype.computed();
        let (Some(weight), Some(z)) = (slice.spec.optimizer.average_weight(), self.state.first()) else {
            let average = self.state.last().map(Buffer::bytes);
            return self.copied(dtype, client, Some(&slice.meter), average.into_iter());
        };
        let values = (CodecId::plain(slice.spec.dtype), self.params.bytes());
        let fill = |to: &mut Vec<u8>| average_of(slice.isa, values, z.bytes(), weight, to);
        let bytes = Copied::take(Some(&slice.meter), slice.slot_bytes(), fill)?;
        Ok(self.snapshot(dtype, client, bytes))
    }

    /// Sets the average to the values, which a program has changed.
    pub(super) fn restart_average(&mut self, slice: &SliceContext) {
        if let Some(twin) = twin(slice, &mut self.state) {
            twin.copy_from(&self.params);
        }
    }

    /// Appends the values of some rows; returns the version.
    pub(super) fn pull_rows(
        &self,
        slice: &SliceContext,
        client: u64,
        rows: Indices<'_>,
        into: &mut Vec<u8>,
    ) -> (u64, u64) {
        let (size, values) = (slice.spec.dtype.size(), self.params.bytes());
        let mut runs = slice.layout.runs(rows);
        while let Some(run) = runs.next_of(slice.len) {
            into.extend_from_slice(&values[size * run.start..size * run.end]);
        }
        self.version(client)
    }

    /// Appends all values; returns the version.
    pub(super) fn pull_copy(&self, client: u64, into: &mut Vec<u8>) -> (u64, u64) {
        into.extend_from_slice(self.params.bytes());
        self.version(client)
    }

    /// Prefetches where a client's next outcome goes.
    pub(super) fn prefetch_window(&self, client: u64) {
        self.identities.prefetch_window(client);
    }

    /// Prefetches the buffers' headers and the identity table.
    pub(super) fn prefetch(&self) {
        prefetch(std::slice::from_ref(&*self.params));
        prefetch(&self.state);
        self.identities.prefetch();
    }

    /// Prefetches the values of some rows; if a client is about to push them, also their state and the
    /// client's window.
    pub(super) fn prefetch_rows(&self, slice: &SliceContext, rows: Indices<'_>, pushed_by: Option<u64>) {
        let (size, values) = (slice.spec.dtype.size(), self.params.bytes());
        if let Some(client) = pushed_by {
            self.identities.prefetch_window(client);
        }
        let mut runs = slice.layout.runs(rows);
        while let Some(run) = runs.next_of(slice.len) {
            prefetch(&values[size * run.start..size * run.end]);
            for slot in self.state.iter().filter(|_| pushed_by.is_some()) {
                let size = slot.dtype().size();
                prefetch(&slot.bytes()[size * run.start..size * run.end]);
            }
        }
    }

    fn copied<'a>(
        &self,
        dtype: DType,
        client: u64,
        meter: Option<&sync::Arc<Meter>>,
        parts: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> Result<Snapshot> {
        let len = parts.clone().map(<[u8]>::len).sum();
        let bytes = Copied::take(meter, len, |to| parts.for_each(|part| to.extend_from_slice(part)))?;
        Ok(self.snapshot(dtype, client, bytes))
    }

    pub(super) fn snapshot(&self, dtype: DType, client: u64, bytes: Bytes) -> Snapshot {
        let (version, own) = self.version(client);
        Snapshot { dtype, codec: CodecId::plain(dtype), version, own, step: self.step, bytes }
    }

    /// Numbers of gradients and of assignments.
    pub(super) fn changes(&self) -> (u64, u64) {
        (self.version.saturating_sub(self.assigns), self.assigns)
    }

    pub(super) fn version(&self, client: u64) -> (u64, u64) {
        (self.version, self.identities.own(client))
    }

    /// Number of changes so far.
    pub(super) fn changed(&self) -> u64 {
        self.version
    }
}

/// Takes a step of a bfloat16 slice.
fn take_rounded_step(
    slice: &SliceContext,
    storage: Rounded<'_>,
    push: &Push<'_>,
    lr: f64,
    scale: f32,
) -> Result<()> {
    let (step, optimizer) = (storage.rounder.step, &slice.spec.optimizer);
    match push.indices {
        None => {
            apply_rounded(slice.isa, storage, push.codec, push.body, scale, slice.rule(push, step, lr));
        }
        Some(indices) => {
            let rule = optimizer.sparse_rule(step, lr)?;
            apply_rows_rounded(slice.isa, storage, slice.touch(indices, push), rule);
        }
    }
    Ok(())
}

/// The optimizer's state, and the average, which is the last slot of a tensor that keeps one.
fn average<'a>(slice: &SliceContext, state: &'a mut [Buffer]) -> (&'a mut [Buffer], Option<&'a mut Buffer>) {
    let kept = usize::from(slice.spec.average.is_some());
    let (state, average) = state.split_at_mut(slice.slots - kept);
    (state, average.first_mut())
}

/// The slot that assigned values replace, too: the average, or what it is computed from.
fn twin<'a>(slice: &SliceContext, state: &'a mut [Buffer]) -> Option<&'a mut Buffer> {
    if slice.spec.optimizer.keeps_average() {
        return state.first_mut();
    }
    average(slice, state).1
}

/// Replaces the values of one buffer with those of a body.
fn assign(slice: &SliceContext, push: &Push<'_>, body: &[u8], buffer: &mut Buffer) {
    assign_run(slice, push, body, buffer, 0..slice.len);
}

/// Replaces a run of values of one buffer with those of a body.
fn assign_run(slice: &SliceContext, push: &Push<'_>, body: &[u8], buffer: &mut Buffer, run: Range<usize>) {
    match buffer.dtype() {
        DType::Float32 => push.codec.decode(slice.isa, body, &mut buffer.values_mut()[run]),
        DType::BFloat16 => {
            for (value, bits) in buffer.values_mut()[run].iter_mut().zip(body.as_chunks().0) {
                *value = u16::from_le_bytes(*bits);
            }
        }
        DType::Float64 => {
            for (value, lane) in buffer.values_mut()[run].iter_mut().zip(float64_lanes(body)) {
                *value = f64::from_le_bytes(*lane);
            }
        }
    }
}

/// Replaces the values of some rows of one buffer with those of a body.
fn assign_rows(slice: &SliceContext, push: &Push<'_>, rows: Indices<'_>, buffer: &mut Buffer) {
    let (size, mut body) = (slice.spec.dtype.size(), push.body);
    let mut runs = slice.layout.runs(rows);
    while let Some(run) = runs.next_of(slice.len) {
        let (own, rest) = body.split_at(size * run.len());
        assign_run(slice, push, own, buffer, run);
        body = rest;
    }
}

/// The parameters for writing: in place if no reader pins them, else a copy, so that the reader keeps its
/// version. The slice's own charge covers one spare copy. A further copy is charged until its readers are
/// done, and refused if the meter has no room for it.
fn unpinned<'a>(
    slice: &SliceContext,
    params: &'a mut Arc<Buffer>,
    spare: &mut Option<Arc<Buffer>>,
) -> Result<&'a mut Buffer> {
    // The caller holds the slice's lock, so no new reader can pin the buffer.
    if Arc::strong_count(params) > 1 {
        set_aside(slice, params, spare)?;
    }
    Arc::get_mut(params).ok_or_else(|| Error::new(Kind::Internal, "a fresh buffer has readers"))
}

/// Replaces the parameters by a copy; the original becomes the spare.
pub(super) fn set_aside(
    slice: &SliceContext,
    params: &mut Arc<Buffer>,
    spare: &mut Option<Arc<Buffer>>,
) -> Result<()> {
    if let Some(pinned) = spare.take_if(|spare| Arc::get_mut(spare).is_none()) {
        match slice.meter.take(Purpose::Copies, Buffer::bytes_for(slice.spec.dtype, slice.len)) {
            Ok(charge) => pinned.leave_to_readers(charge),
            Err(error) => {
                *spare = Some(pinned);
                return Err(slice.name(error));
            }
        }
    }
    Counters::count(&slice.counters.slice_copies);
    let mut copy = spare.take().unwrap_or_else(|| Arc::new(params.spare()));
    if let (Some(copy), false) = (Arc::get_mut(&mut copy), fault("spare_not_filled")) {
        copy.copy_from(params);
    }
    *spare = Some(std::mem::replace(params, copy));
    Ok(())
}
