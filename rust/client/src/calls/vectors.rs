//! Vectors: programs, which are one message per shard, pulls, and portions of sums. None of these frames has
//! an identity: a slice runs a program once and takes a portion once, however often it is sent.

use crate::calls::pull::first_error;
use crate::calls::submit::Draft;
use crate::client::Client;
use crate::link::call::payload::{Memory, Payload};
use crate::link::call::{Call, CallPart, Outcome};
use crate::link::wait::CallHandle;
use crate::state::map::Entry;
use crate::state::time::after;
use bytes::Bytes;
use fastps_core::batch::BatchTask;
use fastps_core::error::{Kind, Result};
use fastps_core::outgoing;
use fastps_core::program::{Command, Program};
use fastps_core::spaces::{BatchReport, ReplicaAnswer, ReplicaRequest, Seat, SeatRequest};
use fastps_core::tensor::{SliceId, SpaceId};
use fastps_core::verbs::{Caller, Gradient, OpenedSpace, Patient, SpaceInfo, VectorPull, VectorSpaces};
use fastps_transport::convert::header::Target;
use fastps_transport::convert::{self, MAX_PARTS, MAX_SCALAR_BYTES, PortionOf, VectorRead};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Stores the results of slices.
struct Results<'a> {
    entries: &'a [Arc<Entry>],
    /// Bytes of a slice's results.
    bytes: usize,
    by_slice: Vec<Vec<Vec<f64>>>,
}

impl<'a> Results<'a> {
    fn new(entries: &'a [Arc<Entry>], results: usize) -> Self {
        let by_slice = entries.iter().map(|entry| vec![Vec::new(); entry.slices.len()]).collect();
        Self { entries, bytes: results * size_of::<f64>(), by_slice }
    }
}

impl Caller for Results<'_> {
    /// Takes the results of consecutive slices, which arrive together.
    fn take(&mut self, tensor: usize, first_element: usize, values: &[u8]) {
        let first = first_element / self.entries[tensor].spec.dtype.slice_len();
        for (slice, values) in values.chunks_exact(self.bytes.max(1)).enumerate() {
            let results = values.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
            self.by_slice[tensor][first + slice] = results.collect();
        }
    }
}

impl Client {
    /// The messages of a program: each has as many slices of a shard and a group as its answer has room for.
    fn program_drafts(entries: &[Arc<Entry>], epoch: u64, command: Command, program: &Program) -> Vec<Draft> {
        let (payload, bytes) = (convert::program_to_wire(program), program.results() * size_of::<f64>());
        let mut slices: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (tensor, entry) in entries.iter().enumerate() {
            for (k, (_, shard)) in entry.slices.iter().enumerate() {
                slices.entry((*shard, entry.group)).or_default().push((tensor, k));
            }
        }
        let most = (MAX_SCALAR_BYTES / bytes.max(1)).clamp(1, MAX_PARTS);
        let mut drafts = Vec::new();
        for ((_, group), slices) in &slices {
            for slices in slices.chunks(most) {
                let ids: Vec<_> = slices.iter().map(|(tensor, k)| entries[*tensor].slices[*k].0).collect();
                let target = Target { slice: SliceId(0), group: *group, epoch };
                let header = convert::run_header(target, command, &ids);
                let part = |(tensor, k): &(usize, usize)| {
                    let entry = &entries[*tensor];
                    CallPart::new(*tensor, entry, *k, entry.spec.slice_range(*k), 0, Some(bytes))
                };
                let mut parts = slices.iter().map(part);
                let Some(part) = parts.next() else { continue };
                let payload = Payload::Owned(payload.clone());
                drafts.push(Draft { part, more: parts.collect(), header, payload });
            }
        }
        drafts
    }

    /// Queues frames without an identity, and waits for their answers.
    fn complete(
        &self,
        drafts: Vec<Draft>,
        memories: Vec<Arc<Memory>>,
        deadline: Instant,
        caller: &mut dyn Caller,
    ) -> Result<CallHandle> {
        let in_order = self.lock_sequence();
        let call = self.submit(drafts, memories, deadline, None);
        drop(in_order);
        self.finish(&call, caller)?;
        Ok(call)
    }

    /// The entries of a space's tensors.
    fn entries_of(&self, space: SpaceId, deadline: Instant) -> Result<(u64, Vec<Arc<Entry>>)> {
        let tensors = self.tensors_of(space, deadline)?;
        self.look_up(tensors.iter(), deadline)
    }
}

/// Fails with the first refusal of this kind, if there is one.
fn refused_as(call: &Call, kind: Kind) -> Result<()> {
    let of_kind = |(_, outcome)| match outcome {
        Outcome::Failed(error) if error.kind == kind => Some(error),
        _ => None,
    };
    call.outcomes().into_iter().find_map(of_kind).map_or(Ok(()), Err)
}

/// Fails with the first refusal of another kind, if there is one.
fn refused_but_as(client: &Client, call: &Call, kind: Kind) -> Result<()> {
    match first_error(&client.shared, call) {
        Err(error) if error.kind == kind => {
            let other = |(_, outcome)| match outcome {
                Outcome::Failed(error) if error.kind != kind => Some(error),
                _ => None,
            };
            Err(call.outcomes().into_iter().find_map(other).unwrap_or(error))
        }
        other => other,
    }
}

impl VectorSpaces for Client {
    fn open_space(
        &self,
        name: &Arc<str>,
        tensors: &[Arc<str>],
        vectors: &[Arc<str>],
        keep_for: Duration,
        timeout: Duration,
    ) -> Result<OpenedSpace> {
        self.open_space_at_all(name, tensors, vectors, keep_for, after(timeout))
    }

    fn close_space(&self, space: SpaceId, timeout: Duration) -> Result<()> {
        self.close_space_at_all(space, after(timeout))
    }

    fn spaces(&self, timeout: Duration) -> Result<Vec<SpaceInfo>> {
        self.list_spaces(after(timeout))
    }

    fn coordinate(&self, space: SpaceId, request: &SeatRequest, timeout: Duration) -> Result<Seat> {
        self.ask_for_seat(space, request, after(timeout))
    }

    fn run_program(
        &self,
        command: Command,
        program: &Arc<Program>,
        timeout: Duration,
    ) -> Result<Vec<Vec<f64>>> {
        let deadline = after(timeout);
        let (epoch, entries) = self.entries_of(command.space, deadline)?;
        let drafts = Self::program_drafts(&entries, epoch, command, program);
        let mut results = Results::new(&entries, program.results());
        let call = self.complete(drafts, Vec::new(), deadline, &mut results)?;
        // A slice that has run a later program has run this one, so only failures elsewhere count.
        refused_but_as(self, &call, Kind::StalePush)?;
        Ok(results.by_slice.into_iter().flatten().collect())
    }

    fn pull_vector(&self, pull: &VectorPull, timeout: Duration, caller: &mut dyn Caller) -> Result<()> {
        let deadline = after(timeout);
        let (epoch, entries) = self.entries_of(pull.space, deadline)?;
        let read = VectorRead { space: pull.space, index: pull.vector, batch: pull.batch };
        let mut drafts = Vec::new();
        for (tensor, entry) in entries.iter().enumerate() {
            for (k, elements) in entry.spec.slices().enumerate() {
                let header = convert::vector_read_header(entry.target(k, epoch), read);
                let answer = Some(entry.spec.dtype.size() * elements.len());
                drafts.push(Draft::new(tensor, entry, k, header, answer, Payload::Owned(Bytes::new())));
            }
        }
        let call = self.complete(drafts, Vec::new(), deadline, caller)?;
        first_error(&self.shared, &call)
    }

    fn push_portion(
        &self,
        space: SpaceId,
        batch: u64,
        portion: u32,
        gradients: &[Gradient],
        timeout: Duration,
    ) -> Result<bool> {
        let deadline = after(timeout);
        let (epoch, entries) = self.entries_of(space, deadline)?;
        let specs: Vec<_> = entries.iter().map(|entry| entry.spec.clone()).collect();
        let of = PortionOf { space, batch, portion };
        let (mut drafts, mut memories) = (Vec::new(), Vec::new());
        let gradients = outgoing::portion_gradients(&specs, gradients)?;
        for (tensor, (entry, gradient)) in entries.iter().zip(gradients).enumerate() {
            let memory = Memory::new(gradient.values.clone());
            for (k, elements) in entry.spec.slices().enumerate() {
                let count = elements.len() as u64;
                let header = convert::portion_header(entry.target(k, epoch), of, entry.spec.dtype, count);
                let payload = Payload::Lent(memory.clone(), elements);
                drafts.push(Draft::new(tensor, entry, k, header, None, payload));
            }
            memories.push(memory);
        }
        let call = self.complete(drafts, memories, deadline, &mut Patient)?;
        // If one slice reports that the batch is over, other failures do not matter.
        refused_as(&call, Kind::StalePush)?;
        first_error(&self.shared, &call)?;
        let is_new = |(_, outcome): &(_, Outcome)| matches!(outcome, Outcome::Answered(answer) if !answer.applied.duplicate);
        Ok(call.outcomes().iter().any(is_new))
    }

    fn batch(
        &self,
        space: SpaceId,
        term: u64,
        task: &BatchTask,
        wait: Duration,
        timeout: Duration,
    ) -> Result<BatchReport> {
        self.ask_for_batch((space, term), task, wait, after(timeout))
    }

    fn batch_portion(
        &self,
        request: &ReplicaRequest,
        wait: Duration,
        timeout: Duration,
    ) -> Result<ReplicaAnswer> {
        self.ask_for_batch_portion(request, wait, after(timeout))
    }
}
