//! The memory of a `hogwild` slice: no lock around the values, only around the table of identities.

use super::snapshot::{Copied, Snapshot};
use super::{Slice, staleness};
use crate::apply::{Hogwild, apply};
use crate::block::{BLOCK, blocks};
use crate::dtype::DType;
use crate::error::Result;
use crate::fault::fault;
use crate::frame::{Action, Applied, Push};
use crate::identity::{Completion, Identities, Outcome};
use crate::params::RacyBuffer;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

#[derive(Debug)]
pub(super) struct HogwildMemory {
    params: RacyBuffer,
    state: Vec<RacyBuffer>,
    step: AtomicU64,
    version: AtomicU64,
    /// Changes that were assignments.
    assigns: AtomicU64,
    /// Where the next push begins, so that racing pushes do not walk in lockstep.
    turn: AtomicU64,
    pub(super) identities: Mutex<Identities>,
}

impl HogwildMemory {
    pub(super) fn new(dtype: DType, len: usize, slots: usize, initial_state: f32) -> Self {
        // One lane per element; a type of another width needs lanes of that width.
        let filled = |value| match dtype {
            DType::Float32 => RacyBuffer::filled(len, value),
        };
        Self {
            params: filled(0.0),
            state: (0..slots).map(|_| filled(initial_state)).collect(),
            step: AtomicU64::new(0),
            version: AtomicU64::new(0),
            assigns: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            identities: Mutex::default(),
        }
    }

    /// Applies a push whose identity this thread has claimed; gives back the repeats that waited for it.
    pub(super) fn change(&self, slice: &Slice, push: &Push<'_>) -> (Applied, Vec<Completion>) {
        match push.action {
            Action::Gradient => {
                let step = self.step.fetch_add(1, Ordering::Relaxed);
                let rule = slice.spec.optimizer.rule(step, slice.lr(push));
                let blocks = slice.len.div_ceil(BLOCK).max(1) as u64;
                let turn = self.turn.fetch_add(1, Ordering::Relaxed);
                // An odd stride of about 5/8 of the blocks keeps concurrent pushes far apart.
                let first_block = (turn.wrapping_mul((blocks * 5 / 8) | 1) % blocks) as usize;
                let storage =
                    Hogwild { isa: slice.isa, params: &self.params, state: &self.state, first_block };
                apply(slice.isa, storage, push.codec, push.body, push.scale.unwrap_or(1.0), rule);
            }
            Action::Assign => store_racy(slice, &self.params, push, 0),
            Action::AssignState { step } => {
                self.state.iter().enumerate().for_each(|(k, slot)| store_racy(slice, slot, push, k));
                self.step.store(step, Ordering::Relaxed);
            }
        }
        if push.action != Action::Gradient {
            self.assigns.fetch_add(1, Ordering::Relaxed);
        }
        let mut identities = lock(&self.identities);
        let bump = u64::from(!fault("version_not_bumped"));
        let version = self.version.fetch_add(bump, Ordering::AcqRel) + 1;
        let own = identities.count_own(push.identity.client);
        let applied = Applied {
            version,
            own,
            staleness: staleness(push.base, version, own),
            scale: push.scale.unwrap_or(1.0),
            duplicate: false,
        };
        let waiting =
            if push.once { Vec::new() } else { identities.note(push.identity, Outcome::Applied(applied)) };
        drop(identities);
        slice.record(push, applied);
        (applied, waiting)
    }

    /// A copy of the values, perhaps in the middle of pushes.
    pub(super) fn pull(&self, slice: &Slice, client: u64) -> Result<Snapshot> {
        self.snapshot(slice, client, std::slice::from_ref(&self.params))
    }

    /// A copy of the state, all slots one after the other.
    pub(super) fn pull_state(&self, slice: &Slice, client: u64) -> Result<Snapshot> {
        self.snapshot(slice, client, &self.state)
    }

    fn snapshot(&self, slice: &Slice, client: u64, buffers: &[RacyBuffer]) -> Result<Snapshot> {
        let (version, own) = self.version(client);
        let step = self.step.load(Ordering::Relaxed);
        let bytes = Copied::take(&slice.meter, slice.bytes() * buffers.len(), |bytes| {
            let mut block = [0.0; BLOCK];
            for buffer in buffers {
                for (at, len) in blocks(slice.len) {
                    buffer.load(slice.isa, at, &mut block[..len]);
                    bytes.extend_from_slice(bytemuck::cast_slice(&block[..len]));
                }
            }
        })?;
        Ok(Snapshot { dtype: slice.spec.dtype, version, own, step, bytes })
    }

    /// Gradients and assignments.
    pub(super) fn changes(&self) -> (u64, u64) {
        let assigns = self.assigns.load(Ordering::Relaxed);
        (self.version.load(Ordering::Relaxed).saturating_sub(assigns), assigns)
    }

    pub(super) fn version(&self, client: u64) -> (u64, u64) {
        (self.version.load(Ordering::Acquire), lock(&self.identities).own(client))
    }
}

/// Stores the `k`-th run of values of an assignment's body.
fn store_racy(slice: &Slice, buffer: &RacyBuffer, push: &Push<'_>, k: usize) {
    let body = &push.body[k * slice.bytes()..][..slice.bytes()];
    let size = slice.spec.dtype.size();
    let mut block = [0.0; BLOCK];
    for (at, len) in blocks(slice.len) {
        push.codec.decode(slice.isa, &body[size * at..size * (at + len)], &mut block[..len]);
        buffer.store(slice.isa, at, &block[..len]);
    }
}
