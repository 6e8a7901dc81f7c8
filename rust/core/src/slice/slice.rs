//! [`Slice`] admits, checks and applies pushes. It checks a push completely before it changes anything, and
//! owns the optimizer state, step count, version and identity table. The shard routes every push here.

use super::context::{Counters, SliceContext, Surroundings, next_staleness};
use super::exact::ExactMemory;
use super::hogwild::HogwildMemory;
use super::{Why, round};
use crate::base::error::{Error, Kind, Result};
use crate::base::failpoint::reach;
use crate::base::fault::fault;
use crate::base::lock::SliceLock;
use crate::base::sync::{Arc, AtomicU64, Ordering, lock};
use crate::kernel::overflow::may_overflow;
use crate::memory::{Buffer, Charge, Exposed, Pieces, Purpose, RacyBuffer};
use crate::slice::frame::{Action, Applied, Identity, Push};
use crate::slice::identity::{Completion, IdentityTable, Outcome, Seen, Settled};
use crate::slice::policy::{Admission, Gathered, Held, Policy};
use crate::tensor::shared_directory::SharedTensor;
use crate::tensor::{Apply, SliceId, TensorSpec};
use std::ops::Deref;

/// One slice of one tensor: its context, which never changes, and its memory.
#[derive(Debug)]
pub struct Slice {
    context: SliceContext,
    /// The version at the last [`Slice::note_change`], and the moment of the one that found a new version.
    pub(super) noted: [AtomicU64; 2],
    /// The charge for the slice's own memory.
    charge: Charge,
    pub(super) memory: SliceMemory,
}

impl Deref for Slice {
    type Target = SliceContext;

    fn deref(&self) -> &SliceContext {
        &self.context
    }
}

#[derive(Debug)]
pub(super) enum SliceMemory {
    Exact(SliceLock<ExactMemory>),
    Hogwild(HogwildMemory),
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
        surroundings: Surroundings,
        (charge, shared): (Charge, Option<&Arc<SharedTensor>>),
        pieces: &mut Pieces,
    ) -> Self {
        let context = SliceContext::new(id, spec, index, group, surroundings);
        let (len, slots) = (context.len, context.slots);
        let (dtype, initial) = (spec.dtype, spec.optimizer.initial_state());
        let memory = match (spec.apply, shared) {
            (Apply::Exact, _) => {
                SliceMemory::Exact(SliceLock::new(ExactMemory::new(dtype, len, slots, initial, pieces)))
            }
            (Apply::Hogwild, None) => SliceMemory::Hogwild(HogwildMemory::new(len, slots, initial)),
            (Apply::Hogwild, Some(shared)) => {
                SliceMemory::Hogwild(HogwildMemory::shared(shared, index, slots))
            }
        };
        context.meter.slices.fetch_add(1, Ordering::Relaxed);
        Self { context, noted: [AtomicU64::new(0), AtomicU64::new(0)], charge, memory }
    }

    /// Memory of a slice of `spec` with `len` elements, in bytes: parameters, state, and one spare for
    /// copy-on-write.
    pub(crate) fn memory_for(spec: &TensorSpec, len: usize) -> u64 {
        let arrays = 1 + spec.slots().len() as u64;
        let bytes = match spec.apply {
            Apply::Exact => {
                let state = (arrays - 1) * Buffer::bytes_for(spec.dtype.computed(), len);
                2 * Buffer::bytes_for(spec.dtype, len) + state
            }
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
        if spec.dtype != spec.dtype.computed() {
            // Pieces have one length, so the values of such a tensor use ordinary memory.
            let len = Buffer::bytes_for(spec.dtype.computed(), spec.dtype.slice_len()) as usize;
            return Pieces::new(len, count, spec.slots().len(), None);
        }
        let len = Buffer::bytes_for(spec.dtype, spec.dtype.slice_len()) as usize;
        Pieces::new(len, count, 1 + spec.slots().len(), exposed)
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
            // The table is read after the gradient is there: a worker that leaves in between finds it waiting.
            let early = fault("table_looked_at_once").then(|| {
                let own = |client| client == push.identity.client;
                policy.judge(self.group(), Gathered { count: 1, has: &own, since: 0 })
            });
            // One holding of the lock: a gradient that came in between would be one too many.
            let mut memory = memory.lock();
            let (answer, mut completions) = self.share(&mut memory, push, *share, later);
            if answer.is_none() {
                let judge =
                    |gathered: Gathered<'_>| early.unwrap_or_else(|| policy.judge(self.group(), gathered));
                completions.extend(memory.end_round(self, judge, None));
            }
            drop(memory);
            round::tell(completions);
            return answer;
        }
        let arrival = match &self.memory {
            SliceMemory::Exact(memory) => {
                let mut memory = memory.lock();
                memory.meet_cut_to_acknowledge(self, push);
                let version = memory.changed();
                match self.arrive(&mut memory.identities, version, push, admission, later) {
                    Arrival::Apply => {
                        reach("identity_checked");
                        let applied = memory.apply(self, push);
                        if memory.round.is_some() && applied.is_ok() {
                            let completions = memory.give_up_round(self, Why::Changed);
                            drop(memory);
                            round::tell(completions);
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
                let (applied, waiting) = memory.apply(self, push);
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
            let _ = memory.lock().apply(self, push);
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
        identities.acknowledge(client, push.acknowledged);
        let seen = match identities.look_up(push.identity) {
            Seen::Unmet => Seen::Unmet,
            _ if fault("identity_off") => Seen::New,
            seen => seen,
        };
        match seen {
            Seen::Before(Outcome::Applied(applied)) => {
                Counters::count(&self.counters.duplicates);
                Arrival::Answer(Ok(applied.repeated()))
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
            let checked = correction.check(next_staleness(push, version, identities), changes);
            checked.inspect_err(|_| Counters::count(&self.counters.gradients_stale))?;
        }
        let charge = match admission {
            Admission::Apply => None,
            Admission::Hold => Some(self.meter.take(Purpose::Held, Held::memory_for(push))?),
            Admission::Refuse(error) => return Err(error),
            Admission::Share(_) => {
                return Err(Error::new(Kind::Precondition, "a hogwild tensor has no whole versions"));
            }
        };
        let client = push.identity.client;
        if charge.is_some() || !push.once {
            identities.make_room(client, &self.home())?;
        } else if unmet {
            identities.meet(client, &self.home())?;
        }
        if unmet {
            identities.acknowledge(client, push.acknowledged);
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
                match memory.apply(self, push) {
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
                memory.apply(self, push)
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

    /// Refuses the gradients that wait for a version; if the slice was removed, also those that arrive later.
    pub(crate) fn end_waiting(&self, why: Why) {
        let SliceMemory::Exact(memory) = &self.memory else { return };
        let mut memory = memory.lock();
        memory.removed |= matches!(why, Why::Removed);
        let completions = memory.give_up_round(self, why);
        drop(memory);
        round::tell(completions);
    }

    /// Number of clients in the identity table.
    pub(crate) fn known_clients(&self) -> usize {
        match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().identities.len(),
            SliceMemory::Hogwild(memory) => lock(&memory.identities).len(),
        }
    }
}

fn answer_all(waiting: Vec<Completion>, applied: Applied) {
    for done in waiting {
        done(Ok(Settled::from(applied).repeated()));
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        self.meter.slices.fetch_sub(1, Ordering::Relaxed);
        let (pushes, assigns) = self.changes();
        let (probed, lost) = self.probed();
        self.counters.pushes.fetch_add(pushes, Ordering::Relaxed);
        self.counters.assigns.fetch_add(assigns, Ordering::Relaxed);
        self.counters.updates_probed.fetch_add(probed, Ordering::Relaxed);
        self.counters.updates_lost.fetch_add(lost, Ordering::Relaxed);
        if let SliceMemory::Exact(memory) = &self.memory {
            let bytes = Buffer::bytes_for(self.spec.dtype, self.len);
            memory.lock().leave_to_readers(bytes, &mut self.charge);
        }
    }
}
