//! Rounds of `Sync` groups. A round adds up the gradients of several workers as they arrive, and the last
//! gradient that it needs takes one optimizer step for all of them.
//!
//! A gradient belongs to the version after the one that it is based on, and is refused once that version is
//! made. A worker has at most one gradient in a round; the gradient has no effect before the step, and its
//! answer waits for the step. If all gradients of a round are sparse, the step touches exactly the rows that
//! at least one of them names.

use super::context::{Counters, SliceContext};
use super::exact::ExactMemory;
use super::slice::{Slice, SliceMemory};
use crate::base::error::{Error, Kind, Result};
use crate::base::fault::fault;
use crate::base::mode::Quorum;
use crate::kernel::apply::{Touch, add, add_rows};
use crate::kernel::codec::CodecId;
use crate::kernel::finite;
use crate::kernel::robust;
use crate::kernel::rows::{Indices, RowSet};
use crate::memory::{Buffer, Charge, Pieces, Purpose};
use crate::slice::frame::{Applied, Identity, Push};
use crate::slice::identity::{Completion, Outcome, Seen, Settled};
use crate::slice::policy::{Gathered, Policy, Share, Verdict};
use crate::slice::record::{Identities, Record};
use std::fmt;

/// Array number of the sum, as if it were one of the slice's arrays: see [`Buffer::filled`].
const SUM: usize = 3;

/// The gradients that have arrived for the next version.
///
/// ```text
///        first gradient               a quorum of them           all of them, or the grace is over
/// empty ----------------> gathering ------------------> enough ------------------------------------> empty
///                             |                            |                    one step, one version
///                             +----------------------------+--> empty
///                               `Why`, or a sum that is not finite, refuses them all
/// ```
pub(super) struct Round {
    parts: Vec<Contribution>,
    sum: Buffer,
    /// The rows that sparse gradients name; allocated with the first of these.
    rows: Option<ContributedRows>,
    /// Set if a dense gradient is in the sum.
    whole: bool,
    /// The first moment at which enough gradients were seen, by the caller's clock.
    enough_at: Option<u64>,
    _memory: Charge,
}

struct ContributedRows {
    set: RowSet,
    _memory: Charge,
}

/// One worker's gradient.
struct Contribution {
    identity: Identity,
    done: Completion,
    lr: f64,
    weight: f32,
    /// The gradient itself, kept until all have arrived if the sum has a fixed order or needs all at once.
    kept: Option<Kept>,
}

struct Kept {
    rank: Option<u32>,
    scale: f32,
    codec: CodecId,
    indices: Option<Vec<u8>>,
    elements: usize,
    body: Vec<u8>,
    _memory: Charge,
}

/// The sum of a round whose gradients are all sparse.
struct Few {
    indices: Vec<u8>,
    values: Vec<f32>,
}

/// Completions with their results, to be called after the slice's lock is released.
pub(super) type Completions = Vec<(Completion, Result<Applied>)>;

impl Round {
    fn new(slice: &SliceContext) -> Result<Self> {
        let dtype = slice.spec.dtype.computed();
        let memory = slice.meter.take(Purpose::Held, Buffer::bytes_for(dtype, slice.len))?;
        let sum = Buffer::filled(dtype, slice.len, 0.0, SUM, &mut Pieces::none());
        Ok(Self { parts: Vec::new(), sum, rows: None, whole: false, enough_at: None, _memory: memory })
    }

    fn add(&mut self, slice: &SliceContext, indices: Option<Indices<'_>>, gradient: EncodedGradient<'_>) {
        let EncodedGradient { codec, body, elements, scale } = gradient;
        let (isa, sum) = (slice.isa, self.sum.values_mut());
        let Some(indices) = indices else {
            self.whole = true;
            return add(isa, sum, codec, body, scale);
        };
        if let Some(rows) = &mut self.rows {
            rows.set.insert(indices);
        }
        add_rows(isa, sum, Touch { layout: slice.layout, indices, codec, body, elements, scale });
    }

    /// How many of the smallest and of the largest values of each element are left out, where this sorts them.
    fn trimmed(&self, quorum: Quorum) -> Option<usize> {
        let is_dense = |part: &Contribution| part.kept.as_ref().is_some_and(|kept| kept.indices.is_none());
        let robust = quorum.robust.filter(|_| self.parts.iter().all(is_dense))?;
        Some(robust.trimmed(self.parts.len()))
    }

    /// Completes the sum of the gradients, in rank order if they have ranks, or with `trim` that of each
    /// element's middle values. The result stays in `sum` or, if all are sparse, is moved out of it and
    /// returned. Also returns its largest magnitude. Fails if it is not finite.
    fn complete(&mut self, slice: &SliceContext, trim: Option<usize>) -> Result<(Option<Few>, f64)> {
        self.parts.sort_by_key(|part| part.kept.as_ref().map(|kept| kept.rank));
        let kept: Vec<_> = self.parts.iter_mut().filter_map(|part| part.kept.take()).collect();
        if let Some(trim) = trim {
            let bodies: Vec<_> = kept.iter().map(|kept| (kept.codec, &kept.body[..], kept.scale)).collect();
            robust::sum_of_middle(slice.isa, &bodies, trim, self.sum.values_mut());
            self.whole = true;
        } else {
            for kept in kept {
                self.add(slice, kept.indices.as_deref().map(Indices::new), kept.gradient());
            }
        }
        let few = self.take_rows(slice);
        let sum = few.as_ref().map_or(self.values(), |few| &few.values);
        let largest = finite::check(slice.isa, sum, None)
            .map_err(|error| error.expected("a finite sum of the workers' gradients", "infinity"))?;
        Ok((few, largest))
    }

    /// Moves the rows out of the sum if all gradients are sparse.
    fn take_rows(&mut self, slice: &SliceContext) -> Option<Few> {
        let indices = self.rows.as_mut()?.set.take();
        if self.whole {
            return None;
        }
        let (mut values, sum) = (Vec::new(), self.sum.values_mut::<f32>());
        let mut runs = slice.layout.runs(Indices::new(&indices));
        while let Some(run) = runs.next_of(slice.len) {
            values.extend_from_slice(&sum[run.clone()]);
            sum[run].fill(0.0);
        }
        Some(Few { indices, values })
    }

    fn values(&self) -> &[f32] {
        bytemuck::cast_slice(self.sum.bytes())
    }

    /// Clears the sum for the next version, which reuses its warm memory.
    fn clear(&mut self) {
        self.enough_at = None;
        if std::mem::take(&mut self.whole) {
            self.sum.values_mut::<f32>().fill(0.0);
        }
    }
}

/// Reason why a round ends without a version.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Why {
    /// A push outside the round changed the slice.
    Changed,
    /// No workers are left to complete it.
    Alone,
    /// The server is stopping.
    Ends,
    /// The tensor was removed.
    Removed,
}

impl From<Why> for Error {
    fn from(why: Why) -> Self {
        let (kind, what) = match why {
            Why::Changed => (Kind::StalePush, "the slice was changed otherwise"),
            Why::Alone => (Kind::StalePush, "the other workers left"),
            Why::Ends => (Kind::StalePush, "the server was stopped"),
            Why::Removed => (Kind::UnknownTensor, "the tensor was removed"),
        };
        Self::new(kind, format!("{what} while the gradient waited for its version"))
    }
}

/// Calls the completions; the caller has released the slice's lock.
pub(super) fn tell(completions: Completions) {
    for (done, result) in completions {
        done(result);
    }
}

impl Slice {
    /// Adds a gradient to the round of the next version, and returns its answer, or `None` if that comes with
    /// the version. The caller must call the returned completions after releasing the slice's lock.
    pub(super) fn share(
        &self,
        memory: &mut ExactMemory,
        push: &Push<'_>,
        share: Share,
        later: impl FnOnce() -> Completion,
    ) -> (Option<Result<Applied>>, Completions) {
        memory.meet_cut_to_acknowledge(self, push);
        memory.identities.acknowledge(push.identity.client, push.acknowledged);
        match memory.identities.look_up(push.identity) {
            Seen::Before(Outcome::Applied(applied)) => {
                Counters::count(&self.counters.duplicates);
                return (Some(Ok(applied.repeated())), Completions::new());
            }
            Seen::Before(Outcome::Shared(waiting) | Outcome::Held(waiting) | Outcome::Applying(waiting)) => {
                waiting.push(later());
                return (None, Completions::new());
            }
            Seen::Before(Outcome::Fenced) => return (Some(Err(self.name(fenced()))), Completions::new()),
            Seen::Forgotten => return (Some(Err(self.name(forgotten()))), Completions::new()),
            Seen::Unmet | Seen::New => {}
        }
        if memory.removed {
            // The caller looked the slice up before it was removed; nothing would end a round that begins
            // now.
            return (Some(Err(self.name(Why::Removed.into()))), Completions::new());
        }
        match memory.take_in(self, push, share, later) {
            Ok(completions) => (None, completions),
            Err(error) => {
                Counters::count(&self.counters.refused);
                (Some(Err(self.name(error))), Completions::new())
            }
        }
    }

    /// Returns whether the next version no longer waits for a client that computes at version `base`: its
    /// quorum is in without that client, or it is made.
    pub(crate) fn goes_on_without(&self, policy: &dyn Policy, client: u64, base: u64) -> bool {
        let SliceMemory::Exact(memory) = &self.memory else { return false };
        let memory = memory.lock();
        let is_enough = |round: &Round| {
            let (count, since) = (round.parts.len(), memory.arrivals);
            let gathered = Gathered { count, has: &|client| round.has(client), since };
            policy.judge(self.group(), gathered).is_some_and(|verdict| verdict.enough)
        };
        let round = memory.round.as_deref().filter(|round| !round.parts.is_empty());
        memory.changed() != base || round.is_some_and(|round| !round.has(client) && is_enough(round))
    }

    /// Makes the version that gradients wait for if the policy awaits no more of them, or the grace after
    /// enough of them is over; `now` is the caller's clock in milliseconds, if it has one.
    pub(crate) fn end_round(&self, policy: &dyn Policy, now: Option<u64>) {
        let SliceMemory::Exact(memory) = &self.memory else { return };
        let mut memory = memory.lock();
        let completions = memory.end_round(self, |gathered| policy.judge(self.group(), gathered), now);
        drop(memory);
        tell(completions);
    }
}

impl ExactMemory {
    /// Adds a new gradient. On an error, the push counts as never seen.
    fn take_in(
        &mut self,
        slice: &SliceContext,
        push: &Push<'_>,
        share: Share,
        later: impl FnOnce() -> Completion,
    ) -> Result<Completions> {
        slice.spec.need_float32("a version made by several workers")?;
        if let Some(vectors) = &self.vectors {
            return Err(vectors.occupied());
        }
        self.check_base(slice, push)?;
        let client = push.identity.client;
        if self.round.as_ref().is_some_and(|round| round.has(client)) {
            return Err(Error::new(
                Kind::Precondition,
                "the worker has a gradient in the coming version already",
            ));
        }
        if self.round.as_ref().map_or(0, |round| round.parts.len()) as u64 + 1 >= u64::from(share.least) {
            // Take the memory for the step before this gradient is added, also for what a cut pins. If
            // readers leave no room for it, only this gradient is refused, and it can be sent again.
            self.meet_cut(slice);
            self.make_writable(slice)?;
        }
        let weight = push.weight.unwrap_or(1.0);
        let keeps = share.rank.is_some() || share.quorum.robust.is_some();
        let kept = keeps.then(|| Kept::of(slice, push, share.rank)).transpose()?;
        self.identities.make_room(client, &slice.home())?;
        self.identities.acknowledge(client, push.acknowledged);
        let names_rows = self.round.as_ref().is_some_and(|round| round.rows.is_some());
        let rows = (push.indices.is_some() && !names_rows).then(|| ContributedRows::of(slice)).transpose()?;
        let mut round = match self.round.take() {
            Some(round) => round,
            None => Box::new(Round::new(slice)?),
        };
        round.rows = round.rows.take().or(rows);
        if kept.is_none() {
            round.add(slice, push.indices, EncodedGradient::of(push));
        }
        let completions = self.replace(&mut round, kept.as_ref());
        self.identities.note(push.identity, Outcome::Shared(Vec::new()));
        let (identity, lr) = (push.identity, slice.lr(push));
        round.parts.push(Contribution { identity, done: later(), lr, weight, kept });
        self.round = Some(round);
        Ok(completions)
    }

    /// Fails unless the gradient is based on the present version.
    fn check_base(&self, slice: &SliceContext, push: &Push<'_>) -> Result<()> {
        let Some(base) = push.base else {
            return Err(Error::new(Kind::Precondition, "a gradient of a version needs its base")
                .expected("based_on=", "nothing"));
        };
        let now = self.changed();
        if base.version == now || fault("late_gradient_counts") {
            return Ok(());
        }
        Counters::count(&slice.counters.gradients_late);
        let why = "the gradient came too late: its version was made without it";
        Err(Error::new(Kind::StalePush, why)
            .expected(format!("based on version {now}"), format!("version {}", base.version)))
    }

    /// Refuses an earlier gradient of the same rank: a restarted worker replaces it.
    fn replace(&mut self, round: &mut Round, by: Option<&Kept>) -> Completions {
        let rank = by.and_then(|kept| kept.rank);
        let same =
            |part: &mut Contribution| rank.is_some() && part.kept.as_ref().and_then(|kept| kept.rank) == rank;
        let old: Vec<_> = round.parts.extract_if(.., same).collect();
        self.refuse(
            old,
            &Error::new(Kind::StalePush, "the worker's next incarnation has sent a newer gradient"),
        )
    }

    /// Takes the step with all gradients that have arrived, if they make a version now. If the group no longer
    /// combines gradients, the waiting ones are refused.
    pub(super) fn end_round(
        &mut self,
        slice: &SliceContext,
        judge: impl FnOnce(Gathered<'_>) -> Option<Verdict>,
        now: Option<u64>,
    ) -> Completions {
        let Some(round) = self.round.as_ref().filter(|round| !round.parts.is_empty()) else {
            return Completions::new();
        };
        let (count, since) = (round.parts.len(), self.arrivals);
        let Some(verdict) = judge(Gathered { count, has: &|client| round.has(client), since }) else {
            return self.give_up_round(slice, Why::Alone);
        };
        let Some(mut round) = self.round.take_if(|round| round.is_made(verdict, now)) else {
            return Completions::new();
        };
        self.arrivals = verdict.arrivals;
        let trim = round.trimmed(verdict.quorum);
        let share = match trim {
            None => verdict.quorum.share(round.parts.iter().map(|part| f64::from(part.weight)).sum()),
            Some(trim) => 1.0 / round.parts.len().saturating_sub(2 * trim) as f32,
        };
        let mut ids = Vec::with_capacity(round.parts.len() * Identities::BYTES);
        let last = round.parts.last().map_or(Identity { client: 0, sequence: 0 }, |part| part.identity);
        let stepped = round.complete(slice, trim).and_then(|(few, largest)| {
            round.parts.iter().for_each(|part| Identities::put(&mut ids, part.identity));
            let push = sum_of(slice, &round, few.as_ref(), last, (share, largest));
            self.apply_shared(slice, &push, Identities::new(&ids).unwrap_or_default())
        });
        let mut completions = Completions::new();
        match stepped {
            Ok(applied) => {
                Counters::count(&slice.counters.rounds);
                for (part, (applied, waiting)) in round.parts.drain(..).zip(applied) {
                    completions.push((part.done, Ok(applied)));
                    completions.extend(
                        waiting.into_iter().map(|done| (done, Ok(Settled::from(applied).repeated()))),
                    );
                }
            }
            Err(error) => completions = self.refuse(round.parts.drain(..).collect(), &slice.name(error)),
        }
        round.clear();
        self.round = Some(round);
        completions
    }

    /// Applies and records one step with a sum, for all workers whose gradients are in it.
    fn apply_shared(
        &mut self,
        slice: &SliceContext,
        push: &Push<'_>,
        shared_by: Identities<'_>,
    ) -> Result<Vec<(Applied, Vec<Completion>)>> {
        let applied = self.replay_shared(slice, push, shared_by)?;
        if let (Some(sink), Some((one, _))) = (&slice.sink, applied.first()) {
            sink.record(&Record { shared_by, ..slice.record_of(push, *one) });
        }
        Ok(applied)
    }

    /// As `apply_shared`, without recording it.
    pub(super) fn replay_shared(
        &mut self,
        slice: &SliceContext,
        push: &Push<'_>,
        shared_by: Identities<'_>,
    ) -> Result<Vec<(Applied, Vec<Completion>)>> {
        self.meet_cut(slice);
        self.step(slice, push, slice.lr(push), push.scale.unwrap_or(1.0))?;
        self.version += 1;
        let (version, scale, momentum) = (self.version, push.scale.unwrap_or(1.0), slice.momentum(push));
        let note = |identity: Identity| {
            let own = self.identities.count_own(identity.client);
            let applied = Applied { version, own, staleness: Some(0), scale, momentum, duplicate: false };
            (applied, self.identities.note(identity, Outcome::Applied(applied.into())))
        };
        Ok(shared_by.iter().map(note).collect())
    }

    /// Refuses gradients that will not become part of a version.
    fn refuse(&mut self, parts: Vec<Contribution>, error: &Error) -> Completions {
        let mut completions = Completions::new();
        for part in parts {
            let waiting = self.identities.withdraw(part.identity);
            let all = std::iter::once(part.done).chain(waiting);
            completions.extend(all.map(|done| (done, Err(error.clone()))));
        }
        completions
    }

    /// Ends the round without a version, and refuses its gradients.
    #[cold]
    pub(super) fn give_up_round(&mut self, slice: &SliceContext, why: Why) -> Completions {
        let Some(round) = self.round.take() else { return Completions::new() };
        self.refuse(round.parts, &slice.name(why.into()))
    }

    /// Forgets a client that is gone. Its gradient stays in the sum; if no client of the round is left, the
    /// round ends without a version.
    pub(super) fn forget(&mut self, slice: &SliceContext, client: u64) -> Completions {
        self.identities.forget(client);
        let is_here = |part: &Contribution| self.identities.knows(part.identity.client);
        if self.round.as_ref().is_some_and(|round| !round.parts.iter().any(is_here)) {
            return self.give_up_round(slice, Why::Alone);
        }
        Completions::new()
    }
}

impl Round {
    /// The smallest learning rate of the gradients, so that no gradient takes a larger step than its worker
    /// asked for.
    fn lr(&self) -> f64 {
        self.parts.iter().map(|part| part.lr).fold(f64::INFINITY, f64::min)
    }

    /// Returns whether the gradients make the version now.
    fn is_made(&mut self, verdict: Verdict, now: Option<u64>) -> bool {
        if verdict.all || !verdict.enough || verdict.quorum.grace_ms == 0 {
            return verdict.all || verdict.enough;
        }
        let since = |now: u64| now.saturating_sub(*self.enough_at.get_or_insert(now));
        now.map(since).is_some_and(|waited| waited >= verdict.quorum.grace_ms)
    }

    fn has(&self, client: u64) -> bool {
        self.parts.iter().any(|part| part.identity.client == client)
    }
}

impl ContributedRows {
    fn of(slice: &SliceContext) -> Result<Self> {
        let memory = slice.meter.take(Purpose::Held, RowSet::bytes_for(slice.layout))?;
        Ok(Self { set: RowSet::of(slice.layout), _memory: memory })
    }
}

/// The encoded values of one gradient.
#[derive(Clone, Copy)]
struct EncodedGradient<'a> {
    codec: CodecId,
    body: &'a [u8],
    elements: usize,
    scale: f32,
}

impl<'a> EncodedGradient<'a> {
    fn of(push: &Push<'a>) -> Self {
        let Push { codec, body, count, .. } = *push;
        let scale = push.scale.unwrap_or(1.0) * push.weight.unwrap_or(1.0);
        Self { codec, body, elements: count as usize, scale }
    }
}

impl Kept {
    fn of(slice: &SliceContext, push: &Push<'_>, rank: Option<u32>) -> Result<Self> {
        let indices = push.indices.map(|indices| indices.bytes().to_vec());
        let bytes = push.body.len() + indices.as_ref().map_or(0, Vec::len);
        let memory = slice.meter.take(Purpose::Held, bytes as u64)?;
        let EncodedGradient { codec, body, elements, scale } = EncodedGradient::of(push);
        Ok(Self { rank, scale, codec, indices, elements, body: body.to_vec(), _memory: memory })
    }

    fn gradient(&self) -> EncodedGradient<'_> {
        let Self { codec, body, elements, scale, .. } = self;
        EncodedGradient { codec: *codec, body, elements: *elements, scale: *scale }
    }
}

/// The sum as a push.
fn sum_of<'a>(
    slice: &SliceContext,
    round: &'a Round,
    few: Option<&'a Few>,
    identity: Identity,
    (share, largest): (f32, f64),
) -> Push<'a> {
    let (indices, values) = match few {
        None => (None, round.values()),
        Some(Few { indices, values }) => (Some(Indices::new(indices)), &values[..]),
    };
    let (codec, body) = (CodecId::Float32, bytemuck::cast_slice::<f32, u8>(values));
    Push {
        lr: Some(round.lr()),
        scale: Some(share),
        indices,
        largest: Some(largest),
        ..Push::gradient(slice.id, identity, values.len() as u64, codec, body)
    }
}

pub(super) fn fenced() -> Error {
    Error::new(Kind::Fenced, "the push was fenced: it was not applied and never will be")
}

pub(super) fn forgotten() -> Error {
    Error::new(Kind::UnknownOutcome, "the push is older than what the slice remembers")
}

impl fmt::Debug for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Round").field("parts", &self.parts.len()).finish_non_exhaustive()
    }
}
