//! The memory of a `hogwild` slice. Pushes and pulls race on values and state without a lock; only the
//! identity table has one, so a repeated push is still recognized.

use super::context::SliceContext;
use super::image::{Image, Standing};
use super::snapshot::{Copied, Snapshot};
use crate::base::block::{BLOCK, blocks};
use crate::base::error::Result;
use crate::base::fault::fault;
use crate::base::sync::{Arc, AtomicBool, Mutex, Ordering, lock};
use crate::kernel::apply::{Hogwild, apply_racing, apply_rows};
use crate::kernel::codec::CodecId;
use crate::kernel::overflow::{is_due, is_finite};
use crate::kernel::rows::Indices;
use crate::memory::{Counts, Meter, RacyBuffer};
use crate::slice::frame::{Action, Applied, Push};
use crate::slice::identity::{Completion, IdentityTable, Outcome};
use crate::tensor::shared_directory::SharedTensor;

/// Number of consecutive pushes in a run whose update of the first 64 elements is probed; consecutive pushes
/// are the ones that race.
const PROBED: u64 = 64;
/// One of this many runs is probed.
const RUNS: u64 = 8;
/// Elements of a row that are read at a time.
const ROW: usize = 64;

#[derive(Debug)]
pub(super) struct HogwildMemory {
    params: RacyBuffer,
    state: Vec<RacyBuffer>,
    counts: Counts,
    /// Set if this process's last scan found values or state that are not finite.
    overflowed: AtomicBool,
    pub(super) identities: Mutex<IdentityTable>,
}

impl HogwildMemory {
    /// Memory of float32: a type of another width would need lanes of that width.
    pub(super) fn new(len: usize, slots: usize, initial_state: f32) -> Self {
        Self {
            params: RacyBuffer::filled(len, 0.0),
            state: (0..slots).map(|_| RacyBuffer::filled(len, initial_state)).collect(),
            counts: Counts::own(),
            overflowed: AtomicBool::new(false),
            identities: Mutex::default(),
        }
    }

    /// Slice `index` of a tensor in shared memory. The identity table is private to this process.
    pub(super) fn shared(tensor: &SharedTensor, index: usize, slots: usize) -> Self {
        Self {
            params: tensor.array(index, 0),
            state: (1..=slots).map(|slot| tensor.array(index, slot)).collect(),
            counts: tensor.counts(index),
            overflowed: AtomicBool::new(false),
            identities: Mutex::default(),
        }
    }

    /// Applies and records a push whose identity this thread has claimed; returns the completions of its
    /// repeats.
    pub(super) fn apply(&self, slice: &SliceContext, push: &Push<'_>) -> (Applied, Vec<Completion>) {
        let corrected;
        let push = match push.correction {
            None => push,
            Some(correction) => {
                let version = self.changed();
                corrected = slice.corrected(push, correction, version, &lock(&self.identities));
                &corrected
            }
        };
        match (push.action, push.indices) {
            (Action::Gradient, Some(indices)) => {
                let step = self.counts.step().fetch_add(1, Ordering::Relaxed);
                // Validation has checked that the optimizer has a sparse rule.
                if let Ok(rule) = slice.spec.optimizer.sparse_rule(step, slice.lr(push)) {
                    let memory =
                        Hogwild { params: &self.params, state: &self.state, first_block: 0, probe: None };
                    apply_rows(slice.isa, memory, slice.touch(indices, push), rule);
                }
            }
            (Action::Gradient, None) => {
                let step = self.counts.step().fetch_add(1, Ordering::Relaxed);
                let (lr, scale) = slice.rate_and_factor(push);
                let rule = slice.rule(push, step, lr);
                let blocks = slice.len.div_ceil(BLOCK).max(1) as u64;
                let turn = self.counts.turn().fetch_add(1, Ordering::Relaxed);
                // An odd stride of about 5/8 of the blocks keeps concurrent pushes far apart.
                let first_block = (turn.wrapping_mul((blocks * 5 / 8) | 1) % blocks) as usize;
                let probe = (turn / PROBED).is_multiple_of(RUNS).then_some(&self.counts);
                let memory = Hogwild { params: &self.params, state: &self.state, first_block, probe };
                apply_racing(slice.isa, memory, push.codec, push.body, scale, rule);
            }
            (Action::Assign | Action::AssignState { .. }, _) => self.assign(slice, push),
        }
        let mut identities = lock(&self.identities);
        let bump = u64::from(!fault("version_not_bumped"));
        let version = self.counts.version().fetch_add(bump, Ordering::AcqRel).wrapping_add(1);
        let applied = slice.count(push, version, &mut identities);
        let waiting = if push.once {
            Vec::new()
        } else {
            identities.note(push.identity, Outcome::Applied(applied.into()))
        };
        drop(identities);
        let assigned = push.action != Action::Gradient;
        if is_due(version, slice.len, push.count as usize) || (assigned && self.overflowed()) {
            self.scan(slice);
        }
        slice.record(push, applied);
        (applied, waiting)
    }

    /// Copies the values, possibly in the middle of pushes.
    pub(super) fn pull(&self, slice: &SliceContext, client: u64) -> Result<Snapshot> {
        self.snapshot(slice, client, Some(&slice.meter), std::slice::from_ref(&self.params))
    }

    /// Copies the state, all slots in order.
    pub(super) fn pull_state(&self, slice: &SliceContext, client: u64) -> Result<Snapshot> {
        self.snapshot(slice, client, Some(&slice.meter), &self.state)
    }

    /// Appends the values of some rows, possibly in the middle of pushes.
    pub(super) fn pull_rows(
        &self,
        slice: &SliceContext,
        client: u64,
        rows: Indices<'_>,
        into: &mut Vec<u8>,
    ) -> (u64, u64) {
        let version = self.version(client);
        let (mut runs, mut row) = (slice.layout.runs(rows), [0.0; ROW]);
        while let Some(run) = runs.next_of(ROW) {
            let values = &mut row[..run.len()];
            self.params.load(slice.isa, run.start, values);
            into.extend_from_slice(bytemuck::cast_slice(values));
        }
        version
    }

    fn snapshot(
        &self,
        slice: &SliceContext,
        client: u64,
        meter: Option<&Arc<Meter>>,
        buffers: &[RacyBuffer],
    ) -> Result<Snapshot> {
        let (version, own) = self.version(client);
        let step = self.counts.step().load(Ordering::Relaxed);
        let bytes = Copied::take(meter, slice.bytes() * buffers.len(), |bytes| {
            let mut block = [0.0; BLOCK];
            for buffer in buffers {
                for (at, len) in blocks(slice.len) {
                    buffer.load(slice.isa, at, &mut block[..len]);
                    bytes.extend_from_slice(bytemuck::cast_slice(&block[..len]));
                }
            }
        })?;
        let dtype = slice.spec.dtype;
        Ok(Snapshot { dtype, codec: CodecId::plain(dtype), version, own, step, bytes })
    }

    fn assign(&self, slice: &SliceContext, push: &Push<'_>) {
        match push.action {
            Action::Gradient => {}
            Action::Assign => store_racy(slice, &self.params, push, 0),
            Action::AssignState { step } => {
                self.state.iter().enumerate().for_each(|(k, slot)| store_racy(slice, slot, push, k));
                self.counts.step().store(step, Ordering::Relaxed);
            }
        }
        self.counts.assigns().fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether the last scan found values or state that are not finite.
    pub(super) fn overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Relaxed)
    }

    /// Notes whether values or state have overflowed through many steps.
    #[cold]
    fn scan(&self, slice: &SliceContext) {
        let mut block = [0.0; BLOCK];
        let overflowed = self.state.iter().chain([&self.params]).any(|buffer| {
            blocks(slice.len).any(|(at, len)| {
                buffer.load(slice.isa, at, &mut block[..len]);
                !is_finite(slice.isa, slice.spec.dtype, bytemuck::cast_slice(&block[..len]))
            })
        });
        self.overflowed.store(overflowed, Ordering::Relaxed);
    }

    /// Replays an assignment from its record. False: the slice already has it.
    pub(super) fn replay(&self, slice: &SliceContext, push: &Push<'_>, version: u64) -> Result<bool> {
        if self.counts.version().load(Ordering::Acquire) >= version {
            return Ok(false);
        }
        let mut identities = lock(&self.identities);
        let client = push.identity.client;
        if !push.once {
            identities.make_room_again(client, &slice.home())?;
        } else if !identities.knows(client) {
            identities.meet(client, &slice.home())?;
        }
        identities.acknowledge(client, push.acknowledged);
        self.assign(slice, push);
        self.counts.version().store(version, Ordering::Release);
        let applied = slice.count(push, version, &mut identities);
        if !push.once {
            identities.note(push.identity, Outcome::Applied(applied.into()));
        }
        Ok(true)
    }

    /// Takes an image, possibly in the middle of pushes.
    pub(super) fn image(&self, slice: &SliceContext) -> Result<Image> {
        let (clients, gradients) = {
            let identities = lock(&self.identities);
            (identities.image(), identities.gradients())
        };
        let standing = Standing {
            version: self.counts.version().load(Ordering::Acquire),
            step: self.counts.step().load(Ordering::Relaxed),
            assigns: self.counts.assigns().load(Ordering::Relaxed),
            clients,
            gradients,
        };
        let values = self.snapshot(slice, 0, None, std::slice::from_ref(&self.params))?;
        let state = self.snapshot(slice, 0, None, &self.state)?;
        Ok(Image { standing, values, state, vectors: None })
    }

    /// Restores the slice from an image; `values` and `state` must have the right lengths.
    pub(super) fn restore(
        &self,
        slice: &SliceContext,
        standing: &Standing,
        values: &[u8],
        state: &[u8],
    ) -> Result<()> {
        *lock(&self.identities) =
            IdentityTable::restored(&standing.clients, &standing.gradients, &slice.home())?;
        store_bytes(slice, &self.params, values);
        for (k, slot) in self.state.iter().enumerate() {
            store_bytes(slice, slot, &state[k * slice.bytes()..][..slice.bytes()]);
        }
        self.counts.version().store(standing.version, Ordering::Release);
        self.counts.step().store(standing.step, Ordering::Relaxed);
        self.counts.assigns().store(standing.assigns, Ordering::Relaxed);
        Ok(())
    }

    /// Numbers of gradients and of assignments.
    pub(super) fn changes(&self) -> (u64, u64) {
        let assigns = self.counts.assigns().load(Ordering::Relaxed);
        (self.counts.version().load(Ordering::Relaxed).saturating_sub(assigns), assigns)
    }

    /// Number of probed updates of the first 64 elements, and of those that were lost.
    pub(super) fn probed(&self) -> (u64, u64) {
        let kept = self.counts.kept().load(Ordering::Relaxed);
        let probed = self.counts.probed().load(Ordering::Relaxed);
        (probed, probed.saturating_sub(kept))
    }

    pub(super) fn version(&self, client: u64) -> (u64, u64) {
        (self.changed(), lock(&self.identities).own(client))
    }

    /// Number of changes so far.
    pub(super) fn changed(&self) -> u64 {
        self.counts.version().load(Ordering::Acquire)
    }
}

/// Stores the `k`-th array of an assignment's body, which is never compressed.
fn store_racy(slice: &SliceContext, buffer: &RacyBuffer, push: &Push<'_>, k: usize) {
    store_bytes(slice, buffer, &push.body[k * slice.bytes()..][..slice.bytes()]);
}

fn store_bytes(slice: &SliceContext, buffer: &RacyBuffer, body: &[u8]) {
    let (size, plain) = (slice.spec.dtype.size(), CodecId::plain(slice.spec.dtype));
    let mut block = [0.0; BLOCK];
    for (at, len) in blocks(slice.len) {
        plain.decode(slice.isa, &body[size * at..size * (at + len)], &mut block[..len]);
        buffer.store(slice.isa, at, &block[..len]);
    }
}
