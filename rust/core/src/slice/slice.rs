//! [`Slice`] admits, checks and applies pushes. It checks a push completely before it changes anything, and
//! owns the optimizer state, step count, version and identity table. The shard routes every push here.

use super::exact::ExactMemory;
use super::hogwild::HogwildMemory;
use super::{Why, round};
use crate::base::correction::Correction;
use crate::base::cut::Cuts;
use crate::base::error::{Error, Kind, Result};
use crate::base::failpoint::reach;
use crate::base::fault::fault;
use crate::base::isa::Isa;
use crate::base::lock::SliceLock;
use crate::base::mode::Quorum;
use crate::base::sync::{Arc, AtomicU64, Ordering, lock};
use crate::kernel::apply::Touch;
use crate::kernel::overflow::may_overflow;
use crate::kernel::rows::{Indices, RowLayout};
use crate::memory::{Buffer, Charge, Exposed, Meter, Pieces, Purpose, RacyBuffer};
use crate::slice::clients::Clients;
use crate::slice::frame::{Action, Applied, Base, Identity, Push, Target};
use crate::slice::identity::{Completion, Home, IdentityTable, Outcome, Seen};
use crate::slice::policy::{Admission, Held, Policy};
use crate::slice::record::{Identities as SharedBy, Record, Sink};
use crate::slice::shared_directory::SharedTensor;
use crate::tensor::{Apply, SliceId, TensorSpec};
use std::fmt;
use std::ops::Range;

/// One slice of one tensor.
#[derive(Debug)]
pub struct Slice {
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
    /// The version at the last [`Slice::note_change`], and the moment of the one that found a new version.
    pub(super) noted: [AtomicU64; 2],
    /// The charge for the slice's own memory.
    charge: Charge,
    pub(super) memory: SliceMemory,
}

#[derive(Debug)]
pub(super) enum SliceMemory {
    Exact(SliceLock<ExactMemory>),
    Hogwild(HogwildMemory),
}

/// Counters that a shard keeps for all its slices.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Of dropped slices, as `assigns`; a live slice counts its own.
    pub(crate) pushes: AtomicU64,
    pub(crate) assigns: AtomicU64,
    pub(crate) duplicates: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) pulls: AtomicU64,
    pub(crate) slice_copies: AtomicU64,
}

impl Counters {
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Resources that a slice gets from its shard.
#[derive(Debug)]
pub(crate) struct SliceContext {
    pub(crate) isa: Isa,
    pub(crate) sink: Option<Arc<dyn Sink>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) cuts: Arc<Cuts>,
    pub(crate) meter: Arc<Meter>,
    pub(crate) clients: Arc<Clients>,
    /// For [`Slice::memory_for`] bytes.
    pub(crate) charge: Charge,
    /// The tensor in shared memory that the slice is part of, if any.
    pub(crate) shared: Option<Arc<SharedTensor>>,
}

/// Handling of an arriving push.
enum Arrival {
    Apply,
    Hold(Completion, Charge),
    Answer(Result<Applied>),
    /// It repeats a pending push, and its completion was queued there.
    Waits,
}

impl Slice {
    pub(crate) fn new(
        id: SliceId,
        spec: &Arc<TensorSpec>,
        index: usize,
        group: u32,
        place: SliceContext,
        pieces: &mut Pieces,
    ) -> Self {
        let SliceContext { isa, sink, counters, cuts, meter, clients, charge, shared } = place;
        let range = spec.slice_range(index);
        let (first, len) = (range.start, range.len());
        let slots = spec.optimizer.slots().len();
        let (dtype, initial) = (spec.dtype, spec.optimizer.initial_state());
        let memory = match (spec.apply, &shared) {
            (Apply::Exact, _) => {
                SliceMemory::Exact(SliceLock::new(ExactMemory::new(dtype, len, slots, initial, pieces)))
            }
            (Apply::Hogwild, None) => SliceMemory::Hogwild(HogwildMemory::new(len, slots, initial)),
            (Apply::Hogwild, Some(shared)) => {
                SliceMemory::Hogwild(HogwildMemory::shared(shared, index, slots))
            }
        };
        let layout = RowLayout::new(first, len, spec.row_width());
        let spec = spec.clone();
        Self {
            id,
            spec,
            index,
            group,
            first,
            len,
            slots,
            layout,
            isa,
            sink,
            counters,
            cuts,
            meter,
            clients,
            noted: [AtomicU64::new(0), AtomicU64::new(0)],
            charge,
            memory,
        }
    }

    pub(super) fn home(&self) -> Home<'_> {
        Home { meter: &self.meter, clients: &self.clients, slice: self.id }
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

    /// Returns whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The tensor's group as frames carry it.
    pub fn group(&self) -> u32 {
        self.group
    }

    /// Memory of a slice of `spec` with `len` elements, in bytes: parameters, state, and one spare for
    /// copy-on-write.
    pub(crate) fn memory_for(spec: &TensorSpec, len: usize) -> u64 {
        let arrays = 1 + spec.optimizer.slots().len() as u64;
        let bytes = match spec.apply {
            Apply::Exact => (arrays + 1) * Buffer::bytes_for(spec.dtype, len),
            Apply::Hogwild => arrays * RacyBuffer::bytes_for(len),
        };
        // The names are also in the catalog of the shard's files.
        bytes + 512 + (spec.name.len() + spec.group.len() + size_of::<u64>() * spec.shape.len()) as u64
    }

    /// Allocates values and state of `count` full-length slices of `spec` at once; the values go to exposed
    /// memory, if there is any.
    pub(crate) fn pieces(spec: &TensorSpec, count: usize, exposed: Option<&Arc<Exposed>>) -> Pieces {
        if spec.apply == Apply::Hogwild {
            return Pieces::none();
        }
        let len = Buffer::bytes_for(spec.dtype, spec.dtype.slice_len()) as usize;
        Pieces::new(len, count, 1 + spec.optimizer.slots().len(), exposed)
    }

    /// Applies or refuses a push and returns the answer. `None`: the push must wait, because a policy holds
    /// it or it repeats a pending one; the completion from `later` then gets the answer, once, possibly on
    /// another thread.
    #[inline(always)]
    pub(crate) fn push(
        self: &Arc<Self>,
        push: &Push<'_>,
        policy: &dyn Policy,
        later: impl FnOnce() -> Completion,
    ) -> Option<Result<Applied>> {
        let checked;
        let push = match self.check(push) {
            Err(error) => {
                Counters::count(&self.counters.refused);
                return Some(Err(error));
            }
            Ok(_) if push.largest.is_some() => push,
            Ok(largest) => {
                checked = Push { largest: Some(largest), ..*push };
                &checked
            }
        };
        reach("validated");
        let admission = policy.admit(self, push);
        if let (Admission::Share(share), SliceMemory::Exact(memory)) = (&admission, &self.memory) {
            let (answer, told) = self.share(&mut memory.lock(), push, *share, later);
            round::tell(told);
            // A worker that left after `admit` read the group's table did not find this gradient waiting, so
            // check again whether the round is complete.
            if answer.is_none() && !fault("table_looked_at_once") {
                self.end_round(policy.needed(self.group));
            }
            return answer;
        }
        let arrival = match &self.memory {
            SliceMemory::Exact(memory) => {
                let mut memory = memory.lock();
                let version = memory.changed();
                match self.arrive(&mut memory.identities, version, push, admission, later) {
                    Arrival::Apply => {
                        reach("identity_checked");
                        let applied = memory.apply_and_record(self, push);
                        if memory.round.is_some() && applied.is_ok() {
                            let told = memory.give_up_round(self, Why::Changed);
                            drop(memory);
                            round::tell(told);
                        }
                        return Some(applied);
                    }
                    arrival => arrival,
                }
            }
            SliceMemory::Hogwild(memory) => {
                self.arrive(&mut lock(&memory.identities), memory.changed(), push, admission, later)
            }
        };
        match (arrival, &self.memory) {
            (Arrival::Apply, SliceMemory::Hogwild(memory)) => {
                let (applied, waiting) = memory.apply_and_record(self, push);
                answer_all(waiting, applied);
                Some(Ok(applied))
            }
            (Arrival::Hold(done, charge), _) => {
                policy.hold(Held::new(self.clone(), push, done, charge));
                None
            }
            (Arrival::Answer(result), _) => Some(result),
            (Arrival::Waits | Arrival::Apply, _) => None,
        }
    }

    /// Validates a push before anything changes.
    #[inline(always)]
    fn check(&self, push: &Push<'_>) -> Result<f64> {
        let checked = push.validate(self.isa, self.target()).and_then(|largest| {
            if self.spec.apply == Apply::Hogwild && push.action == Action::Gradient {
                self.check_racing_step(push, largest)?;
            }
            Ok(largest)
        });
        if fault("check_after_apply") && checked.is_err() {
            self.apply_unchecked(push);
        }
        checked.map_err(|error| self.name(error))
    }

    /// Fails if a step may overflow: a racing step cannot be taken back.
    fn check_racing_step(&self, push: &Push<'_>, largest: f64) -> Result<()> {
        let (lr, scale) = self.rate_and_factor(push);
        let (optimizer, dtype) = (&self.spec.optimizer, self.spec.dtype);
        if !may_overflow(optimizer, dtype, lr, largest * f64::from(scale.abs())) {
            return Ok(());
        }
        let message = "the step may overflow, which a hogwild tensor cannot take back";
        let got = format!("a gradient up to {largest:?} for {} with lr={lr:?}", optimizer.title());
        Err(Error::new(Kind::NonFinite, message).expected("lr, lr * |g| and g^2 below 2^100", got))
    }

    /// Applies a bad push unchecked: the effect of the seeded fault `check_after_apply`.
    fn apply_unchecked(&self, push: &Push<'_>) {
        if let (SliceMemory::Exact(memory), true) = (&self.memory, push.body.len() == self.bytes()) {
            let _ = memory.lock().apply_and_record(self, push);
        }
    }

    /// Looks the identity up and decides what to do with the push.
    fn arrive(
        &self,
        identities: &mut IdentityTable,
        version: u64,
        push: &Push<'_>,
        admission: Admission,
        later: impl FnOnce() -> Completion,
    ) -> Arrival {
        let client = push.identity.client;
        if push.once
            && push.correction.is_none()
            && matches!(admission, Admission::Apply)
            && identities.turn_to(client)
        {
            return Arrival::Apply;
        }
        let seen = match identities.look_up(push.identity) {
            Seen::Unmet => Seen::Unmet,
            _ if fault("identity_off") => Seen::New,
            seen => seen,
        };
        match seen {
            Seen::Before(Outcome::Applied(applied)) => {
                Counters::count(&self.counters.duplicates);
                Arrival::Answer(Ok(Applied { duplicate: true, ..*applied }))
            }
            Seen::Before(Outcome::Fenced) => Arrival::Answer(Err(self.name(round::fenced()))),
            Seen::Before(Outcome::Held(waiting) | Outcome::Applying(waiting) | Outcome::Shared(waiting)) => {
                waiting.push(later());
                Arrival::Waits
            }
            Seen::Forgotten => Arrival::Answer(Err(self.name(round::forgotten()))),
            seen @ (Seen::Unmet | Seen::New) => {
                let unmet = matches!(seen, Seen::Unmet);
                match self.admitted(identities, (version, unmet), push, admission) {
                    Ok(None) => Arrival::Apply,
                    Ok(Some(charge)) => Arrival::Hold(later(), charge),
                    Err(error) => {
                        Counters::count(&self.counters.refused);
                        Arrival::Answer(Err(self.name(error)))
                    }
                }
            }
        }
    }

    /// Carries out the policy's decision on a new push. Fails if there is no memory for the client's entry or
    /// for the push to be held; returns the charge of a held push.
    fn admitted(
        &self,
        identities: &mut IdentityTable,
        (version, unmet): (u64, bool),
        push: &Push<'_>,
        admission: Admission,
    ) -> Result<Option<Charge>> {
        if let Some(correction) = push.correction {
            let changes = push.base.and_then(|base| version.checked_sub(base.version));
            correction.check(next_staleness(push, version, identities), changes)?;
        }
        let charge = match admission {
            Admission::Apply => None,
            Admission::Hold => Some(self.meter.take(Purpose::Held, Held::memory_for(push))?),
            Admission::Refuse(error) => return Err(error),
            Admission::Share(_) => {
                return Err(Error::new(Kind::Precondition, "a hogwild tensor has no whole versions"));
            }
        };
        if unmet {
            identities.meet(push.identity.client, &self.home())?;
        }
        if charge.is_some() {
            identities.note(push.identity, Outcome::Held(Vec::new()));
        } else if self.spec.apply == Apply::Hogwild && !push.once && !fault("claim_left_out") {
            // No lock covers the change, so the identity must be claimed before it.
            identities.note(push.identity, Outcome::Applying(Vec::new()));
        }
        Ok(charge)
    }

    /// Applies a push that a policy had held.
    pub(crate) fn apply_held(&self, push: &Push<'_>) -> Result<Applied> {
        let fenced = || {
            self.name(Error::new(
                Kind::Fenced,
                "the push was fenced while it was held: it was not applied and never will be",
            ))
        };
        let (applied, waiting) = match &self.memory {
            SliceMemory::Exact(memory) => {
                let mut memory = memory.lock();
                let Seen::Before(Outcome::Held(waiting)) = memory.identities.look_up(push.identity) else {
                    return Err(fenced());
                };
                let waiting = std::mem::take(waiting);
                match memory.apply_and_record(self, push) {
                    Ok(applied) => (applied, waiting),
                    Err(error) => {
                        memory.identities.withdraw(push.identity);
                        drop(memory);
                        for done in waiting {
                            done(Err(error.clone()));
                        }
                        return Err(error);
                    }
                }
            }
            SliceMemory::Hogwild(memory) => {
                let mut identities = lock(&memory.identities);
                let Seen::Before(outcome @ Outcome::Held(_)) = identities.look_up(push.identity) else {
                    return Err(fenced());
                };
                let waiting = match outcome {
                    Outcome::Held(waiting) => std::mem::take(waiting),
                    _ => Vec::new(),
                };
                *outcome = Outcome::Applying(waiting);
                drop(identities);
                memory.apply_and_record(self, push)
            }
        };
        answer_all(waiting, applied);
        Ok(applied)
    }

    /// Withdraws the claim of a held push that is refused, and returns the completions of its repeats.
    pub(crate) fn withdraw(&self, identity: Identity) -> Vec<Completion> {
        Counters::count(&self.counters.refused);
        match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().identities.withdraw(identity),
            SliceMemory::Hogwild(memory) => lock(&memory.identities).withdraw(identity),
        }
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
        // Counting the clients is a scan, so skip it where the number does not matter.
        let counts = correction.momentum_matching || staleness.is_some_and(|tau| tau > 1);
        let clients = if counts { identities.pushing(push.identity.client) } else { 1 };
        let factor = correction.factor(staleness, clients);
        let scale = (f64::from(push.scale.unwrap_or(1.0)) * factor) as f32;
        let momentum = correction.momentum(self.spec.optimizer.momentum(), clients);
        Push { scale: Some(scale), momentum: Some(momentum), correction: None, ..*push }
    }

    /// The rows that a checked sparse push touches, and their values.
    pub(super) fn touch<'a>(&self, indices: Indices<'a>, push: &Push<'a>) -> Touch<'a> {
        let Push { codec, body, count, .. } = *push;
        let scale = push.scale.unwrap_or(1.0);
        Touch { layout: self.layout, indices, codec, body, elements: count as usize, scale }
    }

    pub(super) fn target(&self) -> Target<'_> {
        let Self { len, slots, layout, .. } = *self;
        let TensorSpec { dtype, apply, optimizer, .. } = &*self.spec;
        Target { dtype: *dtype, len, slots, layout, apply: *apply, optimizer }
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
            action: push.action,
            indices: push.indices,
            codec: push.codec,
            body: push.body,
            lr: self.lr(push),
            scale: applied.scale,
            momentum: push.momentum.unwrap_or_else(|| self.spec.optimizer.momentum()),
            shared_by: SharedBy::default(),
        }
    }

    /// Makes the version that gradients wait for, if as many have arrived as are needed now. `None`: the
    /// group no longer combines gradients, so the waiting ones are refused.
    pub(crate) fn end_round(&self, needed: Option<(Quorum, u32)>) {
        let SliceMemory::Exact(memory) = &self.memory else { return };
        let mut memory = memory.lock();
        let told = match needed {
            Some((quorum, needed)) => memory.end_round(self, quorum, needed),
            None => memory.give_up_round(self, Why::Alone),
        };
        drop(memory);
        round::tell(told);
    }

    /// Refuses the gradients that wait for a version; if the slice was removed, also those that arrive later.
    pub(crate) fn end_waiting(&self, why: Why) {
        let SliceMemory::Exact(memory) = &self.memory else { return };
        let mut memory = memory.lock();
        memory.removed |= matches!(why, Why::Removed);
        let told = memory.give_up_round(self, why);
        drop(memory);
        round::tell(told);
    }

    /// Number of clients in the identity table.
    pub(crate) fn known_clients(&self) -> usize {
        match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().identities.len(),
            SliceMemory::Hogwild(memory) => lock(&memory.identities).len(),
        }
    }
}

/// The staleness of a push if it were applied next, on top of this version.
fn next_staleness(push: &Push<'_>, version: u64, identities: &IdentityTable) -> Option<u64> {
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

fn answer_all(waiting: Vec<Completion>, applied: Applied) {
    for done in waiting {
        done(Ok(Applied { duplicate: true, ..applied }));
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        let (pushes, assigns) = self.changes();
        self.counters.pushes.fetch_add(pushes, Ordering::Relaxed);
        self.counters.assigns.fetch_add(assigns, Ordering::Relaxed);
        if let SliceMemory::Exact(memory) = &self.memory {
            let bytes = Buffer::bytes_for(self.spec.dtype, self.len);
            memory.lock().leave_to_readers(bytes, &mut self.charge);
        }
    }
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slice {} of {:?}", self.index, self.spec.name)
    }
}
