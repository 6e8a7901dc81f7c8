//! Messages in parts, of rows or of whole slices: each part is applied or refused separately, and one answer
//! covers all parts.

use super::push::ReaderWait;
use super::{Exchange, fits, fits_dtype, owed};
use crate::answers::{AnswerSlot, Owed};
use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use fastps_core::frame::{Applied, Identity, Push};
use fastps_core::identity::Completion;
use fastps_core::shard::{Charge, Purpose};
use fastps_core::slice::{Slice, Snapshot};
use fastps_core::verbs::SliceVersion;
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, Part, Parts, Route};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Memory of an answer per part: its table entries, and a short refusal.
const ANSWER_PART_BYTES: u64 = 256;

/// Parts whose memory is prefetched before the first of them is pushed or pulled: enough to keep a CPU
/// busy, and little in its first-level cache.
const PARTS_PER_BATCH: usize = 16;

/// One of the connection's pins, so that it owes few large answers, and their memory.
type AnswerMemory = (OwnedSemaphorePermit, Charge);

/// The outcomes of parts that a policy holds.
type Late = UnboundedReceiver<(usize, Result<Applied>)>;

/// The slice of each part, or the reason why the part is refused.
type Admitted = Vec<Result<Arc<Slice>>>;

/// How a push in parts is answered.
struct Reply {
    tag: u64,
    client: u64,
    /// Set for whole slices.
    whole: bool,
    /// The memory of the values, if they are wanted.
    values: Option<(DType, Charge)>,
    charge: Charge,
    slot: AnswerSlot,
}

impl Exchange {
    /// The slice of each part, or the reason why it is refused before its slice is touched.
    fn admit_parts(&self, parts: &[Part<'_>], route: Route, dtype: Option<DType>) -> Admitted {
        let sealed = self.node.reservations.admit_all(parts.iter().map(|part| part.slice));
        self.admit_with(parts, route, dtype, sealed)
    }

    /// The same for a push, whose parts from the `first` on these are.
    fn admit_pushed(
        &self,
        (all, first): (&Parts<'_>, usize),
        parts: &[Part<'_>],
        route: Route,
        dtype: DType,
    ) -> Admitted {
        if !all.are_initial() {
            return self.admit_parts(parts, route, Some(dtype));
        }
        let (reservations, now) = (&self.node.reservations, Instant::now());
        let admit = |(k, part): (usize, &Part<'_>)| {
            reservations.admit(part.slice, all.reservation(k), route.client, now)
        };
        let reserved = (first..).zip(parts).map(admit).collect();
        self.admit_with(parts, route, Some(dtype), reserved)
    }

    fn admit_with(
        &self,
        parts: &[Part<'_>],
        route: Route,
        dtype: Option<DType>,
        sealed: Vec<Result<()>>,
    ) -> Admitted {
        let slices = self.node.shard.slices(parts.iter().map(|part| part.slice));
        let admit = |(slice, sealed): (Result<Arc<Slice>>, Result<()>)| {
            let slice = slice?;
            if !self.caller.may_use(&slice) {
                return Err(self.node.shard.no_slice(slice.id()));
            }
            let admitted = fits(&slice, route, dtype).and(sealed);
            admitted.map_err(|error| error.tensor(slice.spec().name.clone()))?;
            Ok(slice)
        };
        slices.into_iter().zip(sealed).map(admit).collect()
    }

    /// Gradients or assignments.
    pub(super) async fn push_parts(
        &self,
        tag: u64,
        route: Route,
        parts: &Parts<'_>,
        dtype: DType,
        slot: AnswerSlot,
    ) {
        let memory = self.memory_to_answer(route.client, parts).await;
        let memory = memory.and_then(|memory| Ok((memory, self.memory_of_values(parts, dtype)?)));
        let ((pin, charge), values) = match memory {
            Ok(memory) => memory,
            Err(error) => return self.refuse(slot, tag, error),
        };
        let (late, answers) = unbounded_channel();
        let (mut outcomes, mut wait) = (Vec::with_capacity(parts.len()), ReaderWait::default());
        let all: Vec<_> = parts.iter().collect();
        let mut slices = self.admit_pushed((parts, 0), &all, route, dtype);
        while outcomes.len() < all.len() {
            let k = outcomes.len();
            if k.is_multiple_of(PARTS_PER_BATCH) {
                prefetch(all[k..].iter().zip(&slices[k..]).take(PARTS_PER_BATCH), Some(route.client));
            }
            let (Ok(slice), Some(push)) = (&slices[k], parts.push(k, all[k])) else {
                outcomes.push(slices[k].clone().err().map(Err));
                continue;
            };
            let later = || -> Completion {
                let late = late.clone();
                Box::new(move |outcome| drop(late.send((k, outcome))))
            };
            if fault("part_applied_twice") {
                let sequence = push.identity.sequence + (1 << 40);
                let again = Push { identity: Identity { sequence, ..push.identity }, ..push };
                self.node.shard.push_to(slice, &again, || Box::new(|_| {}));
            }
            match self.node.shard.push_to(slice, &push, later) {
                Some(Err(error))
                    if error.kind == Kind::Capacity && self.wait_for_readers(push.slice, &mut wait).await =>
                {
                    // A slice may have been dropped meanwhile: a restart could not repeat what it applies
                    // after that.
                    slices.truncate(k);
                    slices.extend(self.admit_pushed((parts, k), &all[k..], route, dtype));
                }
                outcome => {
                    if let (Some(Ok(_)), Some(reservation)) = (&outcome, parts.reservation(k)) {
                        self.node.reservations.arrived(push.slice, reservation);
                    }
                    outcomes.push(outcome);
                }
            }
        }
        drop(late);
        let reply = Reply { tag, client: route.client, whole: parts.are_whole(), values, charge, slot };
        if outcomes.iter().all(Option::is_some) {
            return self.answer_parts(outcomes, &slices, reply, pin);
        }
        // Other answers need the pin while a policy holds parts of this one.
        drop(pin);
        let stream = self.clone();
        tokio::spawn(async move {
            stream.await_parts(answers, &mut outcomes).await;
            match stream.pin().await {
                Ok(pin) => stream.answer_parts(outcomes, &slices, reply, pin),
                Err(error) => stream.refuse(reply.slot, tag, error),
            }
        });
    }

    /// Waits for the parts that a policy holds.
    async fn await_parts(&self, mut answers: Late, outcomes: &mut [Option<Result<Applied>>]) {
        while let Some((k, outcome)) = answers.recv().await {
            outcomes[k] = Some(outcome);
        }
    }

    fn answer_parts(
        &self,
        outcomes: Vec<Option<Result<Applied>>>,
        slices: &[Result<Arc<Slice>>],
        reply: Reply,
        pin: OwnedSemaphorePermit,
    ) {
        let Reply { tag, client, whole, values, charge, slot } = reply;
        let lost = || Err(Error::new(Kind::Internal, "a push was not completed"));
        let index = self.node.index();
        let or_lost = |outcome: Option<Result<Applied>>| {
            outcome.unwrap_or_else(lost).map_err(|error| error.shard(index))
        };
        let mut outcomes: Vec<_> = outcomes.into_iter().map(or_lost).collect();
        if fault("other_part_answered") {
            outcomes.reverse();
        }
        let mut new = 0;
        for outcome in &outcomes {
            match outcome {
                Ok(applied) if applied.duplicate => {}
                Ok(applied) => {
                    new += 1;
                    self.node.measures.applied(applied);
                }
                Err(error) => self.node.measures.refused(error.kind),
            }
        }
        self.node.sessions.count_applied(client, new);
        let Some((dtype, of_values)) = values else {
            let mut answer = convert::receipts(tag, &outcomes, whole);
            answer.payload = convert::keeping([], (pin, charge));
            return slot.send(Ok(owed(answer)));
        };
        match new_values(client, &mut outcomes, slices) {
            Ok(values) => {
                let header = convert::values_header(tag, dtype, values.len() / dtype.size(), &outcomes);
                let values = Snapshot::of_rows((dtype, CodecId::plain(dtype)), values, of_values);
                self.send_values(slot, header, values, (pin, charge));
            }
            // Parts were applied, so the answer may not be a refusal.
            Err(error) => slot.send(Err(convert::status(&error.shard(index)))),
        }
    }

    fn send_values(
        &self,
        slot: AnswerSlot,
        header: pb::Header,
        values: Snapshot,
        (pin, charge): AnswerMemory,
    ) {
        self.charge_pulled(&values);
        let pin = self.node.pins.add(values, &self.shared, pin);
        slot.send(Ok(Owed::Rows { header: Box::new(header), pin, charge }));
    }

    /// Takes the memory for the values in the answer to a push, before anything is changed.
    fn memory_of_values(&self, parts: &Parts<'_>, dtype: DType) -> Result<Option<(DType, Charge)>> {
        if !parts.want_values() {
            return Ok(None);
        }
        self.memory_of_elements(parts.elements(), dtype).map(|charge| Some((dtype, charge)))
    }

    /// Takes the memory for values of many slices; fails if there are too many for one message.
    fn memory_of_elements(&self, elements: usize, dtype: DType) -> Result<Charge> {
        if elements > dtype.slice_len() {
            let error = Error::new(Kind::Frame, "the values of one message have too many elements");
            return Err(error.expected(format!("at most {}", dtype.slice_len()), elements));
        }
        let bytes = dtype.size() * elements;
        let charge = self.node.shard.meter().take(Purpose::Copies, bytes as u64)?;
        self.shared.reserve_encoded(bytes)?;
        Ok(charge)
    }

    /// Takes the memory for the answer to many parts.
    async fn memory_to_answer(&self, client: u64, parts: &Parts<'_>) -> Result<AnswerMemory> {
        let pin = self.pin().await?;
        // As after every wait: see `Exchange::handle`.
        self.sign_of_life(client, Instant::now())?;
        let charge =
            self.node.shard.meter().take(Purpose::Answers, ANSWER_PART_BYTES * parts.len() as u64)?;
        Ok((pin, charge))
    }

    /// Answers with many slices, or rows of them, at a time.
    pub(super) async fn pull_parts(&self, tag: u64, route: Route, parts: &Parts<'_>, slot: AnswerSlot) {
        let (pin, charge) = match self.memory_to_answer(route.client, parts).await {
            Ok(memory) => memory,
            Err(error) => return self.refuse(slot, tag, error),
        };
        match self.gather(route, parts) {
            Ok((outcomes, values)) => {
                let header = convert::rows_header(tag, &values, &outcomes);
                self.send_values(slot, header, values, (pin, charge));
            }
            Err(error) => self.refuse(slot, tag, error),
        }
    }

    /// Answers with the versions of many slices.
    pub(super) async fn pull_versions(&self, tag: u64, route: Route, parts: &Parts<'_>, slot: AnswerSlot) {
        let memory = match self.memory_to_answer(route.client, parts).await {
            Ok(memory) => memory,
            Err(error) => return self.refuse(slot, tag, error),
        };
        let all: Vec<_> = parts.iter().collect();
        let version = |slice: Result<Arc<Slice>>| {
            let slice = slice.map_err(|error| self.node.sign(error))?;
            let (version, own) = slice.version(route.client);
            Ok(SliceVersion { slice: slice.id(), version, own })
        };
        let outcomes: Vec<_> = self.admit_parts(&all, route, None).into_iter().map(version).collect();
        let mut answer = convert::versions(tag, &outcomes);
        answer.payload = convert::keeping([], memory);
        slot.send(Ok(owed(answer)));
    }

    /// Outcome of each part, and the values of all.
    fn gather(&self, route: Route, parts: &Parts<'_>) -> Result<(Vec<Result<SliceVersion>>, Snapshot)> {
        let (averages, bfloat16) = (parts.of_averages(), parts.in_bfloat16());
        let parts: Vec<_> = parts.iter().collect();
        let mut slices = self.admit_parts(&parts, route, None);
        // All values of an answer have one dtype: that of the first part.
        let dtype = slices.iter().flatten().next().map_or(DType::Float32, |slice| slice.spec().dtype);
        let answered = if averages { dtype.computed() } else { dtype };
        let (codec, sent) = if bfloat16 {
            (CodecId::BFloat16, DType::BFloat16)
        } else {
            (CodecId::plain(answered), answered)
        };
        let mut elements = 0;
        for (part, admitted) in parts.iter().zip(&mut slices) {
            let count = |slice: &Arc<Slice>| {
                if bfloat16 {
                    slice.need_bfloat16()?;
                }
                elements_of(slice, part, dtype)
            };
            match admitted.as_ref().map(count) {
                Ok(Ok(count)) => elements += count,
                Ok(Err(error)) => *admitted = Err(error),
                Err(_) => {}
            }
        }
        let charge = self.memory_of_elements(elements, sent)?;
        let mut values = Vec::with_capacity(sent.size() * elements);
        let index = self.node.index();
        let pull = |(k, (part, slice)): (usize, (&Part<'_>, &Result<Arc<Slice>>))| {
            if k % PARTS_PER_BATCH == 0 {
                prefetch(parts[k..].iter().zip(&slices[k..]).take(PARTS_PER_BATCH), None);
            }
            let slice = slice.as_ref().map_err(Error::clone);
            let pulled = slice.and_then(|slice| match part.indices {
                Some(rows) => slice.pull_rows(route.client, rows, &mut values),
                None if bfloat16 => slice.pull_bfloat16_copy(route.client, averages, &mut values),
                None if averages => slice.pull_average_copy(route.client, &mut values),
                None => slice.pull_copy(route.client, &mut values),
            });
            pulled.map_err(|error| error.shard(index))
        };
        let outcomes = parts.iter().zip(&slices).enumerate().map(pull).collect();
        Ok((outcomes, Snapshot::of_rows((answered, codec), values, charge)))
    }
}

/// Elements that a part of a pull reads.
fn elements_of(slice: &Slice, part: &Part<'_>, dtype: DType) -> Result<usize> {
    fits_dtype(slice, dtype).map_err(|error| error.tensor(slice.spec().name.clone()))?;
    part.indices.map_or(Ok(slice.len()), |rows| slice.row_elements(rows))
}

/// The values of the applied parts; the outcomes then report their versions.
fn new_values(
    client: u64,
    outcomes: &mut [Result<Applied>],
    slices: &[Result<Arc<Slice>>],
) -> Result<Vec<u8>> {
    let applied = || outcomes.iter().zip(slices).filter(|(outcome, _)| outcome.is_ok());
    let bytes = applied().filter_map(|(_, slice)| slice.as_ref().ok()).map(|slice| slice.bytes()).sum();
    let mut values = Vec::with_capacity(bytes);
    for (outcome, slice) in outcomes.iter_mut().zip(slices) {
        if let (Ok(applied), Ok(slice)) = (outcome, slice) {
            let SliceVersion { version, own, .. } = slice.pull_copy(client, &mut values)?;
            (applied.version, applied.own) = (version, own);
        }
    }
    Ok(values)
}

/// Prefetches the memory of the next parts.
fn prefetch<'a>(
    parts: impl Iterator<Item = (&'a Part<'a>, &'a Result<Arc<Slice>>)> + Clone,
    pushed_by: Option<u64>,
) {
    let admitted = || parts.clone().filter_map(|(part, slice)| Some((part, slice.as_ref().ok()?)));
    admitted().for_each(|(_, slice)| slice.prefetch());
    admitted().for_each(|(_, slice)| slice.prefetch_memory());
    admitted().for_each(|(part, slice)| slice.prefetch_rows(part.indices, pushed_by));
}
