//! Sparse pushes and pulls of rows: messages of many parts, one per slice of a shard.

use crate::calls::push::settings;
use crate::calls::small::{MAX_MESSAGE_BYTES, PART_HEADER_BYTES};
use crate::calls::submit::Draft;
use crate::client::Client;
use crate::link::call::CallPart;
use crate::link::call::payload::Payload;
use crate::link::wait::CallHandle;
use crate::state::map::Entry;
use crate::state::stats;
use bytes::Bytes;
use fastps_core::codec::{Codec, Position};
use fastps_core::dtype::{DType, View};
use fastps_core::isa::Isa;
use fastps_core::sparse::{Gathered, Plan, RowPart};
use fastps_core::tensor::SliceId;
use fastps_core::verbs::{Caller, PushOptions, Rows, Versions};
use fastps_proto::v1 as pb;
use fastps_transport::convert::MAX_PARTS;
use fastps_transport::convert::header::{self, Target};
use std::sync::Arc;
use std::time::Instant;

/// A message being filled: parts by their number in the plan.
#[derive(Default)]
struct Message {
    parts: Vec<usize>,
    bytes: usize,
}

impl Client {
    /// The messages of one sparse gradient.
    pub(crate) fn sparse_push(
        &self,
        isa: Isa,
        (tensor, entry): (usize, &Entry),
        gathered: &Gathered,
        options: &PushOptions,
        (epoch, sequence): (u64, u64),
    ) -> Vec<Draft> {
        let plan = &gathered.plan;
        let settings = settings(entry.spec.dtype, options.codec_of(entry.spec.dtype), options);
        let target = Target { slice: SliceId(0), group: entry.group, epoch };
        let header = |numbers: &[usize], on_wire| {
            let base = |j: &usize| self.base(options, entry, (plan.parts()[*j].slice, *j));
            let bases: Vec<_> = numbers.iter().map(base).collect();
            header::gradient_parts(target, &settings, on_wire, &bases)
        };
        Self::row_drafts(isa, (tensor, entry), gathered, (options.encoder(), sequence), header)
    }

    /// The messages of an assignment of rows.
    pub(crate) fn row_assignment(
        isa: Isa,
        (tensor, entry): (usize, &Entry),
        gathered: &Gathered,
        epoch: u64,
    ) -> Vec<Draft> {
        let target = Target { slice: SliceId(0), group: entry.group, epoch };
        let header = |_: &[usize], on_wire| header::assignment_parts(target, entry.spec.dtype, on_wire);
        let codec = if entry.spec.dtype == DType::BFloat16 { Codec::BFloat16 } else { Codec::Float32 };
        Self::row_drafts(isa, (tensor, entry), gathered, (codec, 0), header)
    }

    /// The messages that carry these rows; `header` makes a header from the numbers of a message's parts.
    fn row_drafts(
        isa: Isa,
        (tensor, entry): (usize, &Entry),
        Gathered { plan, values }: &Gathered,
        (codec, sequence): (Codec, u64),
        header: impl Fn(&[usize], Vec<pb::Part>) -> pb::Header,
    ) -> Vec<Draft> {
        let bytes =
            |part: &RowPart| plan.indices(part).bytes().len() + codec.id().body_len(part.elements.len());
        let draft = |message: Message| {
            let mut payload = Vec::with_capacity(message.bytes);
            let (mut parts, mut on_wire) = (Vec::new(), Vec::new());
            for j in &message.parts {
                let (part, before) = (&plan.parts()[*j], payload.len());
                let elements = entry.spec.slice_range(part.slice);
                let position = Position { first_element: elements.start as u64, sequence };
                payload.extend_from_slice(plan.indices(part).bytes());
                append(isa, codec, &values[part.elements.clone()], position, &mut payload);
                on_wire.push(on_the_wire(entry, plan, part, part.elements.len()));
                let bytes = payload.len() - before;
                parts.push(CallPart::new(tensor, entry, part.slice, elements, bytes, None));
            }
            drafted(parts, header(&message.parts, on_wire), payload)
        };
        messages(entry, plan, bytes).into_iter().filter_map(draft).collect()
    }

    /// Queues pulls of rows.
    pub(crate) fn start_pull_rows(
        &self,
        entries: &[Arc<Entry>],
        plans: &[Plan],
        epoch: u64,
        deadline: Instant,
    ) -> CallHandle {
        stats::count(&self.shared.counters.pulls, 1);
        let mut drafts = Vec::new();
        for (tensor, (entry, plan)) in entries.iter().zip(plans).enumerate() {
            let size = entry.spec.dtype.size();
            let bytes = |part: &RowPart| (size * part.elements.len()).max(plan.indices(part).bytes().len());
            let target = Target { slice: SliceId(0), group: entry.group, epoch };
            let draft = |message: Message| {
                let (mut payload, mut parts, mut on_wire) = (Vec::new(), Vec::new(), Vec::new());
                for part in message.parts.iter().map(|j| &plan.parts()[*j]) {
                    payload.extend_from_slice(plan.indices(part).bytes());
                    on_wire.push(on_the_wire(entry, plan, part, 0));
                    let answer = Some(size * part.elements.len());
                    parts.push(CallPart::new(tensor, entry, part.slice, part.elements.clone(), 0, answer));
                }
                drafted(parts, header::pull_parts(target, on_wire), payload)
            };
            drafts.extend(messages(entry, plan, bytes).into_iter().filter_map(draft));
        }
        let _in_order = self.lock_sequence();
        self.submit(drafts, Vec::new(), deadline, None)
    }
}

/// Distributes the parts of a plan over messages, each for one shard; `bytes` is the size of a part, sent
/// or answered.
fn messages(entry: &Entry, plan: &Plan, bytes: impl Fn(&RowPart) -> usize) -> Vec<Message> {
    let mut full = Vec::new();
    let shards = entry.slices.iter().map(|(_, shard)| shard + 1).max().unwrap_or(0);
    let mut open: Vec<_> = (0..shards).map(|_| Message::default()).collect();
    for (j, part) in plan.parts().iter().enumerate() {
        let message = &mut open[entry.slices[part.slice].1];
        let bytes = PART_HEADER_BYTES + bytes(part);
        // A larger part gets a separate message.
        let fits = message.bytes + bytes <= MAX_MESSAGE_BYTES && message.parts.len() < MAX_PARTS;
        if !fits && !message.parts.is_empty() {
            full.push(std::mem::take(message));
        }
        message.parts.push(j);
        message.bytes += bytes;
    }
    full.extend(open.into_iter().filter(|message| !message.parts.is_empty()));
    full
}

fn on_the_wire(entry: &Entry, plan: &Plan, part: &RowPart, elements: usize) -> pb::Part {
    let (slice, _) = entry.slices[part.slice];
    pb::Part { slice: slice.0, count: plan.indices(part).len() as u64, elements: elements as u32 }
}

/// Appends a part's values to the payload.
fn append(isa: Isa, codec: Codec, values: &[f32], position: Position, payload: &mut Vec<u8>) {
    if codec == Codec::Float32 && cfg!(target_endian = "little") {
        payload.extend_from_slice(View::Float32(values).bytes());
    } else {
        codec.encode(isa, values, None, position, payload);
    }
}

fn drafted(mut parts: Vec<CallPart>, header: pb::Header, payload: Vec<u8>) -> Option<Draft> {
    let more = parts.split_off(1.min(parts.len()));
    Some(Draft { part: parts.pop()?, more, header, payload: Payload::Owned(Bytes::from(payload)) })
}

/// The versions of a pull of rows: one list per tensor, even without slices, each in slice order.
pub(crate) fn in_order(versions: Versions, rows: &[Rows]) -> Versions {
    let of = |rows: &Rows| {
        let mut slices = versions.tensor(&rows.name).unwrap_or_default().to_vec();
        slices.sort_unstable_by_key(|version| version.slice);
        (rows.name.clone(), slices)
    };
    Versions::new(versions.client, rows.iter().map(of).collect())
}

/// Copies rows to the caller's destination.
pub(crate) struct Scatter<'a> {
    pub(crate) plans: &'a [Plan],
    pub(crate) caller: &'a mut dyn Caller,
}

impl Caller for Scatter<'_> {
    fn take(&mut self, tensor: usize, first_element: usize, values: &[u8]) {
        self.plans[tensor].scatter(first_element, values, |at, values| self.caller.take(tensor, at, values));
    }

    fn leaves(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        self.caller.leaves()
    }
}
