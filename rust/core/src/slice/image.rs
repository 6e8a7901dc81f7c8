//! Images of a slice: its complete state at one version, which snapshots write and recovery restores. Later
//! changes of an `exact` slice are replayed from their records, bit for bit.

use super::Snapshot;
use super::exact::ExactMemory;
use super::slice::{Slice, SliceMemory};
use super::vectors::{VectorsImage, VectorsStanding};
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::kernel::overflow::is_finite;
use crate::slice::asynchrony::Gradient;
use crate::slice::frame::{Action, Identity, Push};
use crate::slice::identity::{Outcome, Remembered, Seen};
use crate::slice::record::{Identities, Record};
use crate::tensor::program::MAX_COUNT;
use crate::tensor::{Apply, Space};

/// A slice at one version; a `hogwild` slice possibly in the middle of pushes.
#[derive(Clone, Debug)]
pub struct Image {
    /// Everything except the arrays.
    pub standing: Standing,
    /// The values; of an `exact` slice they are pinned, not copied.
    pub values: Snapshot,
    /// The optimizer state, all slots in order.
    pub state: Snapshot,
    /// The vectors of the space that is open over the tensor.
    pub vectors: Option<VectorsImage>,
}

/// The state of a slice without its arrays.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standing {
    /// Its version.
    pub version: u64,
    /// Optimizer steps taken.
    pub step: u64,
    /// Changes that were assignments.
    pub assigns: u64,
    /// The slice's memory of each client, in client order.
    pub clients: Vec<Remembered>,
    /// Client and staleness of the last dense gradients, the oldest first; at most 64, and none if the
    /// optimizer has no momentum.
    pub gradients: Vec<Gradient>,
}

impl Slice {
    /// Takes an image of the slice, and holds its lock while copying the state. The copy is not charged, so
    /// that a shard at its memory limit can still be written; callers hold one image at a time.
    pub fn image(&self) -> Result<Image> {
        let image = match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().image(self, None),
            SliceMemory::Hogwild(memory) => memory.image(self),
        };
        image.map_err(|error| self.name(error))
    }

    /// The slice at the moment of the cut that is being written
    /// ([`Shard::begin_cut`](crate::shard::Shard::begin_cut)), if the cut covers its group and the slice is
    /// `exact`; otherwise in its present state.
    pub fn image_in_cut(&self) -> Result<Image> {
        let image = match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().image_in_cut(self),
            SliceMemory::Hogwild(memory) => memory.image(self),
        };
        image.map_err(|error| self.name(error))
    }

    /// Most bytes that its image in a cut takes until it is written.
    pub(crate) fn cut_bytes(&self) -> u64 {
        if self.spec.apply != Apply::Exact {
            return 0;
        }
        let vectors = self.space().map_or(0, |(space, _)| space.vectors.len());
        (self.slots * self.slot_bytes() + vectors * self.bytes()) as u64
    }

    /// Drops the remains of a cut that is over.
    pub(crate) fn leave_cut(&self) {
        if let SliceMemory::Exact(memory) = &self.memory {
            memory.lock().leave_cut();
        }
    }

    /// Restores the vectors of an image, after [`Slice::restore`]. The sum of a batch is not part of an
    /// image: a sum that was open is lost.
    pub fn restore_space(
        &self,
        space: &Arc<Space>,
        standing: &VectorsStanding,
        vectors: &[&[u8]],
    ) -> Result<()> {
        let VectorsStanding { term, number, batch, .. } = standing;
        if let Some(count) = [term, number, batch].into_iter().find(|count| **count > MAX_COUNT) {
            let error = Error::new(Kind::Internal, "a count in the image is too large");
            return Err(self.name(error.expected("at most 2^62", count)));
        }
        let restored = self.exact()?.restore_space(self, (space, standing), vectors);
        restored.map_err(|error| self.name(error))
    }

    /// Returns whether all values and state of an image of the slice are finite.
    pub fn is_finite(&self, image: &Image) -> bool {
        let arrays = [&image.values, &image.state];
        arrays.into_iter().all(|array| is_finite(self.isa, array.dtype, array.as_ref()))
    }

    /// Restores the slice from an image, without vectors. No push may run at the same time.
    pub fn restore(&self, standing: &Standing, values: &[u8], state: &[u8]) -> Result<()> {
        let (bytes, all) = (self.bytes(), self.slots * self.slot_bytes());
        if values.len() != bytes || state.len() != all {
            let error = Error::new(Kind::Shape, "the image is of another slice").expected(
                format!("{bytes} bytes of values and {all} of state"),
                format!("{} and {}", values.len(), state.len()),
            );
            return Err(self.name(error));
        }
        let Standing { version, step, assigns, clients, .. } = standing;
        let counts = [version, step, assigns]
            .into_iter()
            .chain(clients.iter().flat_map(|client| [&client.own, &client.assigned]));
        if let Some(count) = counts.into_iter().find(|count| **count > MAX_COUNT) {
            let error = Error::new(Kind::Internal, "the image has an impossible count");
            return Err(self.name(error.expected("at most 2^62", count)));
        }
        let restored = match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().restore(self, standing, values, state),
            SliceMemory::Hogwild(memory) => memory.restore(self, standing, values, state),
        };
        restored.map_err(|error| self.name(error))
    }

    /// Replays a change from its record, without recording it again. False: the slice already has the change.
    /// The records of an `exact` slice must come in version order; of a `hogwild` slice, only assignments can
    /// be replayed.
    pub fn replay(&self, record: &Record<'_>) -> Result<bool> {
        let elements = match record.indices {
            None => self.len,
            Some(indices) => self.row_elements(indices)?,
        };
        let gradient = record.action == Action::Gradient;
        let push = Push {
            action: record.action,
            base: record.base,
            lr: gradient.then_some(record.lr),
            scale: gradient.then_some(record.scale),
            momentum: gradient.then_some(record.momentum),
            beta1: record.beta1.filter(|_| gradient),
            indices: record.indices,
            once: record.once,
            acknowledged: record.acknowledged,
            ..Push::gradient(self.id, record.identity, elements as u64, record.codec, record.body)
        };
        let repeated = push.validate(self.isa, self.target()).and_then(|_| match &self.memory {
            SliceMemory::Exact(memory) => {
                self.replay_exact(&mut memory.lock(), &push, record.version, record.shared_by)
            }
            SliceMemory::Hogwild(_) if gradient => {
                Err(Error::new(Kind::Config, "gradients of a hogwild tensor cannot be repeated"))
            }
            SliceMemory::Hogwild(memory) => memory.replay(self, &push, record.version),
        });
        repeated.map_err(|error| self.name(error))
    }

    fn replay_exact(
        &self,
        memory: &mut ExactMemory,
        push: &Push<'_>,
        version: u64,
        shared_by: Identities<'_>,
    ) -> Result<bool> {
        let (last, _) = memory.version(0);
        if version <= last {
            return Ok(false);
        }
        if version != last + 1 {
            return Err(Error::new(Kind::Internal, "records of changes are missing")
                .expected(format!("version {}", last + 1), format!("version {version}")));
        }
        for identity in shared_by.iter().chain((!push.once).then_some(push.identity)) {
            memory.identities.make_room_again(identity.client, &self.home())?;
        }
        if !memory.identities.knows(push.identity.client) {
            memory.identities.meet(push.identity.client, &self.home())?;
        }
        memory.identities.acknowledge(push.identity.client, push.acknowledged);
        if shared_by.is_empty() {
            return memory.apply_unrecorded(self, push).map(|_| true);
        }
        if push.action != Action::Gradient {
            return Err(Error::new(Kind::Internal, "only a gradient is shared by several workers"));
        }
        memory.replay_shared(self, push, shared_by).map(|_| true)
    }

    /// Replays the promise never to apply a push, unless the slice already remembers the push or has
    /// forgotten it.
    pub fn replay_fence(&self, identity: Identity) -> Result<()> {
        let SliceMemory::Exact(memory) = &self.memory else { return Ok(()) };
        let mut memory = memory.lock();
        if matches!(memory.identities.look_up(identity), Seen::Before(_) | Seen::Forgotten) {
            return Ok(());
        }
        let made = memory.identities.make_room_again(identity.client, &self.home());
        made.map_err(|error| self.name(error))?;
        memory.identities.note(identity, Outcome::Fenced);
        Ok(())
    }
}
