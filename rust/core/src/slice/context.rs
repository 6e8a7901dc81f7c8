//! [`SliceContext`]: the identity, shape and surroundings of a slice, which never change. Memory, rounds and
//! vectors take it instead of the slice.

use crate::base::correction::Correction;
use crate::base::cut::Cuts;
use crate::base::error::Error;
use crate::base::isa::Isa;
use crate::base::sync::{Arc, AtomicU64, Ordering};
use crate::kernel::apply::Touch;
use crate::kernel::optim::Rule;
use crate::kernel::rows::{Indices, RowLayout};
use crate::memory::Meter;
use crate::slice::clients::Clients;
use crate::slice::frame::{Action, Applied, Base, Push, Target};
use crate::slice::identity::{Home, IdentityTable};
use crate::slice::record::{Identities as SharedBy, Record, Sink};
use crate::tensor::{SliceId, TensorSpec};
use std::fmt;
use std::ops::Range;

/// A slice without its memory.
#[derive(Debug)]
pub struct SliceContext {
    pub(super) id: SliceId,
    pub(super) spec: Arc<TensorSpec>,
    index: usize,
    group: u32,
    /// Index of its first element in the tensor.
    first: usize,
    pub(super) len: usize,
    pub(super) slots: usize,
    pub(super) layout: RowLayout,
    pub(super) isa: Isa,
    pub(super) sink: Option<Arc<dyn Sink>>,
    pub(super) counters: Arc<Counters>,
    pub(super) cuts: Arc<Cuts>,
    pub(super) meter: Arc<Meter>,
    pub(super) clients: Arc<Clients>,
}

/// Counters that a shard keeps for all its slices. Statistics list each by its name.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident)*) => {
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $($(#[$doc])* pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            pub(crate) fn list(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.load(Ordering::Relaxed))),*].into_iter()
            }
        }
    };
}

counters! {
    /// Of dropped slices, as the next three; a live slice counts its own.
    pushes
    assigns
    updates_probed
    updates_lost
    duplicates
    refused
    pulls
    slice_copies
    /// Gradients that their mode's correction made smaller.
    gradients_scaled
    /// Gradients refused because they were staler than their mode allows.
    gradients_stale
    /// Gradients whose version was made without them.
    gradients_late
    /// Pushes in doubt that were not applied and never will be.
    pushes_fenced
    /// Versions made of the gradients of several workers.
    rounds
}

impl Counters {
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// A slice's surroundings, which its shard shares among its slices.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub(crate) isa: Isa,
    pub(crate) sink: Option<Arc<dyn Sink>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) cuts: Arc<Cuts>,
    pub(crate) meter: Arc<Meter>,
    pub(crate) clients: Arc<Clients>,
}

impl SliceContext {
    pub(super) fn new(
        id: SliceId,
        spec: &Arc<TensorSpec>,
        index: usize,
        group: u32,
        surroundings: Surroundings,
    ) -> Self {
        let Surroundings { isa, sink, counters, cuts, meter, clients } = surroundings;
        let range = spec.slice_range(index);
        let (first, len) = (range.start, range.len());
        let layout = RowLayout::new(first, len, spec.row_width());
        let (slots, spec) = (spec.slots().len(), spec.clone());
        Self { id, spec, index, group, first, len, slots, layout, isa, sink, counters, cuts, meter, clients }
    }

    pub(super) fn home(&self) -> Home<'_> {
        let has_momentum = self.spec.optimizer.has_momentum();
        Home { meter: &self.meter, clients: &self.clients, slice: self.id, has_momentum }
    }

    /// Its identifier.
    pub fn id(&self) -> SliceId {
        self.id
    }

    /// The spec of its tensor.
    pub fn spec(&self) -> &Arc<TensorSpec> {
        &self.spec
    }

    /// Its index among the slices of the tensor.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Range of its elements in the tensor.
    pub fn range(&self) -> Range<usize> {
        self.first..self.first + self.len
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of its values.
    pub fn bytes(&self) -> usize {
        self.spec.dtype.size() * self.len
    }

    /// Bytes of one slot of its state.
    pub fn slot_bytes(&self) -> usize {
        self.spec.dtype.computed().size() * self.len
    }

    /// Returns whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The tensor's group as frames carry it.
    pub fn group(&self) -> u32 {
        self.group
    }

    /// The push with its mode's correction applied at this version.
    #[cold]
    pub(super) fn corrected<'a>(
        &self,
        push: &Push<'a>,
        correction: Correction,
        version: u64,
        identities: &IdentityTable,
    ) -> Push<'a> {
        let staleness = next_staleness(push, version, identities);
        let (optimizer, client) = (&self.spec.optimizer, push.identity.client);
        // Counting the clients is a scan, so skip it where the number does not matter.
        let counts = staleness.is_some_and(|tau| tau > 1);
        let clients = if counts { identities.pushing(client) } else { 1 };
        let factor = correction.factor(staleness, clients);
        if factor < 1.0 && push.action == Action::Gradient {
            Counters::count(&self.counters.gradients_scaled);
        }
        let scale = (f64::from(push.scale.unwrap_or(1.0)) * factor) as f32;
        // A row keeps the optimizer's: the slice does not know how many pushes in between have named it.
        let dense = push.indices.is_none();
        let added = if dense { identities.asynchrony(client, staleness) } else { 0.0 };
        let momentum = correction.momentum(optimizer.momentum(), added);
        let lowered = |own| Some(correction.momentum(own, added)).filter(|beta1| *beta1 < own);
        let beta1 = optimizer.beta1().and_then(lowered);
        Push { scale: Some(scale), momentum: Some(momentum), beta1, correction: None, ..*push }
    }

    /// The momentum that a step by this push has.
    #[inline(always)]
    pub(super) fn momentum(&self, push: &Push<'_>) -> Option<f64> {
        if push.action != Action::Gradient || push.indices.is_some() {
            return None;
        }
        let optimizer = &self.spec.optimizer;
        let own = Some(optimizer.momentum()).filter(|own| *own > 0.0);
        let beta1 = optimizer.beta1().map(|own| push.beta1.unwrap_or(own));
        beta1.or(own.map(|own| push.momentum.unwrap_or(own)))
    }

    /// Notes a push that was just applied: the client's change, and the staleness of a dense gradient.
    #[inline(always)]
    pub(super) fn count(&self, push: &Push<'_>, version: u64, identities: &mut IdentityTable) -> Applied {
        let client = push.identity.client;
        let own = identities.count_own(client);
        let staleness = staleness(push.base, version, own);
        match push.action {
            Action::Gradient if push.indices.is_none() => identities.note_gradient(client, staleness),
            Action::Gradient => {}
            Action::Assign | Action::AssignState { .. } => identities.note_assigned(client),
        }
        let (scale, momentum) = (push.scale.unwrap_or(1.0), self.momentum(push));
        Applied { version, own, staleness, scale, momentum, duplicate: false }
    }

    /// The rows that a checked sparse push touches, and their values.
    pub(super) fn touch<'a>(&self, indices: Indices<'a>, push: &Push<'a>) -> Touch<'a> {
        let Push { codec, body, count, .. } = *push;
        let scale = push.scale.unwrap_or(1.0);
        Touch { layout: self.layout, indices, codec, body, elements: count as usize, scale }
    }

    pub(super) fn target(&self) -> Target<'_> {
        let Self { len, slots, layout, .. } = *self;
        Target { spec: &self.spec, len, slots, layout }
    }

    pub(super) fn name(&self, error: Error) -> Error {
        error.tensor(self.spec.name.clone())
    }

    pub(super) fn lr(&self, push: &Push<'_>) -> f64 {
        push.lr.unwrap_or_else(|| self.spec.optimizer.lr())
    }

    /// The rate of a push, and the factor on its values.
    #[inline(always)]
    pub(super) fn rate_and_factor(&self, push: &Push<'_>) -> (f64, f32) {
        self.spec.optimizer.rate_and_factor(self.lr(push), push.scale.unwrap_or(1.0))
    }

    /// The scalars of a dense step, with the momentum of the push.
    #[inline(always)]
    pub(super) fn rule(&self, push: &Push<'_>, step: u64, lr: f64) -> Rule {
        let optimizer = &self.spec.optimizer;
        if let Some(beta1) = push.beta1 {
            return optimizer.matched_rule(step, lr, beta1);
        }
        let rule = optimizer.rule(step, lr);
        push.momentum.map_or(rule, |momentum| rule.with_momentum(momentum))
    }

    pub(super) fn record(&self, push: &Push<'_>, applied: Applied) {
        let Some(sink) = &self.sink else { return };
        sink.record(&self.record_of(push, applied));
    }

    pub(super) fn record_of<'a>(&self, push: &Push<'a>, applied: Applied) -> Record<'a> {
        Record {
            slice: self.id,
            apply: self.spec.apply,
            version: applied.version,
            identity: push.identity,
            base: push.base,
            once: push.once,
            acknowledged: push.acknowledged,
            action: push.action,
            indices: push.indices,
            codec: push.codec,
            body: push.body,
            lr: self.lr(push),
            scale: applied.scale,
            momentum: push.momentum.unwrap_or_else(|| self.spec.optimizer.momentum()),
            beta1: push.beta1,
            shared_by: SharedBy::default(),
            note: push.note,
        }
    }
}

impl fmt::Display for SliceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slice {} of {:?}", self.index, self.spec.name)
    }
}

/// The staleness of a push if it were applied next, on top of this version.
pub(super) fn next_staleness(push: &Push<'_>, version: u64, identities: &IdentityTable) -> Option<u64> {
    // Other processes can write any version to shared memory, so the addition must not overflow.
    staleness(push.base, version.wrapping_add(1), identities.own(push.identity.client) + 1)
}

/// Changes by others between the base and this push (which is version `version` and the client's `own`-th).
pub(super) fn staleness(base: Option<Base>, version: u64, own: u64) -> Option<u64> {
    let base = base?;
    let changes = version.checked_sub(base.version)?.checked_sub(1)?;
    let own_between = own.checked_sub(base.own?)?.checked_sub(1)?;
    changes.checked_sub(own_between)
}
