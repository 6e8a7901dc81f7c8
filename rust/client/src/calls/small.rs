//! Small slices of one call: those for the same shard share a message, with one header and one answer.

use crate::calls::submit::Draft;
use crate::client::Client;
use crate::link::call::CallPart;
use crate::link::call::payload::Payload;
use crate::state::map::Entry;
use bytes::Bytes;
use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::frame::Base;
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use fastps_transport::convert::MAX_PARTS;
use fastps_transport::convert::header::{Target, separate};
use std::sync::atomic::Ordering;

/// Largest payload, sent or answered, of a slice that shares a message. A larger slice has a frame of its own, so
/// that it is applied while the next is sent.
const MAX_SMALL_BYTES: usize = 8 << 10;
/// Limit on a message and on its answer: each is one HTTP/2 frame.
pub(crate) const MAX_MESSAGE_BYTES: usize = fastps_transport::wire::MAX_FRAME as usize - 4096;
/// Most header bytes per part.
pub(crate) const PART_HEADER_BYTES: usize = 64;

/// What the slices of one message have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kinship {
    pub(crate) shard: usize,
    pub(crate) group: u32,
    pub(crate) dtype: DType,
    /// Of a push.
    pub(crate) codec: Option<CodecId>,
    /// Of a pull: whether its values come in bfloat16.
    pub(crate) bfloat16: bool,
}

impl Kinship {
    /// The target of a message to such slices.
    pub(crate) fn target(&self, epoch: u64) -> Target {
        Target { slice: SliceId(0), group: self.group, epoch }
    }
}

/// A slice of a call, and what is sent of it.
pub(crate) struct SmallSlice<'a> {
    pub(crate) tensor: usize,
    pub(crate) entry: &'a Entry,
    /// Index in the tensor.
    pub(crate) k: usize,
    /// Of a push.
    pub(crate) codec: Option<CodecId>,
    /// Of a pull: whether its values come in bfloat16.
    pub(crate) bfloat16: bool,
    pub(crate) base: Option<Base>,
    /// The reservation of initial values; 0: there is none.
    pub(crate) reservation: u64,
    pub(crate) body: Body<'a>,
    pub(crate) answer_bytes: Option<usize>,
}

/// The payload of a slice.
#[derive(Clone, Copy)]
pub(crate) enum Body<'a> {
    Ready(&'a [u8]),
    /// Number of bytes that are encoded later.
    Later(usize),
}

impl Body<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Ready(bytes) => bytes.len(),
            Self::Later(bytes) => *bytes,
        }
    }
}

/// A message being filled.
#[derive(Default)]
struct Message {
    parts: Vec<CallPart>,
    on_wire: Vec<pb::Part>,
    bases: Vec<Option<Base>>,
    reservations: Vec<u64>,
    payload: Vec<u8>,
    later: bool,
    /// Sizes of the message and of its answer, and the elements of all parts.
    bytes: usize,
    elements: usize,
}

/// The messages of one call. `header` makes a header from what the slices have in common, their parts and their
/// bases.
pub(crate) struct SmallSlices<F> {
    header: F,
    open: Vec<(Kinship, Message)>,
}

impl<F: Fn(Kinship, Vec<pb::Part>, &[Option<Base>]) -> pb::Header> SmallSlices<F> {
    pub(crate) fn new(header: F) -> Self {
        Self { header, open: Vec::new() }
    }

    /// Adds a slice. Returns the message before it, if that has no room for it.
    pub(crate) fn add(&mut self, slice: SmallSlice<'_>) -> Option<Draft> {
        let SmallSlice { tensor, entry, k, codec, bfloat16, base, reservation, body, answer_bytes } = slice;
        let (id, shard) = entry.slices[k];
        let kinship = Kinship { shard, group: entry.group, dtype: entry.spec.dtype, codec, bfloat16 };
        let range = entry.spec.slice_range(k);
        let elements = range.len();
        let bytes = PART_HEADER_BYTES + body.len().max(answer_bytes.unwrap_or(0));
        let at = self.open.iter().position(|(open, _)| *open == kinship).unwrap_or_else(|| {
            self.open.push((kinship, Message::default()));
            self.open.len() - 1
        });
        let message = &mut self.open[at].1;
        // As few elements as a large slice has: the next message is encoded while this one is applied.
        let fits = message.bytes + bytes <= MAX_MESSAGE_BYTES
            && message.elements + elements <= entry.spec.dtype.slice_len()
            && message.parts.len() < MAX_PARTS;
        let full = if fits { None } else { drafted(&self.header, kinship, std::mem::take(message)) };
        message.parts.push(CallPart::new(tensor, entry, k, range, body.len(), answer_bytes));
        let on_wire = if codec.is_some() { elements as u32 } else { 0 };
        message.on_wire.push(pb::Part { slice: id.0, count: 0, elements: on_wire });
        message.bases.push(base);
        message.reservations.extend((reservation > 0).then_some(reservation));
        match body {
            Body::Ready(bytes) => message.payload.extend_from_slice(bytes),
            Body::Later(_) => message.later = true,
        }
        message.bytes += bytes;
        message.elements += elements;
        full
    }

    /// The messages that are not full.
    pub(crate) fn finish(self) -> impl Iterator<Item = Draft> {
        let Self { header, open } = self;
        open.into_iter().filter_map(move |(kinship, message)| drafted(&header, kinship, message))
    }
}

/// A message as a draft. A single slice has a frame without parts.
fn drafted(
    header: impl Fn(Kinship, Vec<pb::Part>, &[Option<Base>]) -> pb::Header,
    kinship: Kinship,
    message: Message,
) -> Option<Draft> {
    let Message { mut parts, on_wire, bases, reservations, payload, later, .. } = message;
    let payload = if later {
        Payload::Later(parts.iter().map(|part| part.sent_bytes).sum())
    } else {
        Payload::Owned(Bytes::from(payload))
    };
    let mut header = header(kinship, on_wire, &bases);
    if !reservations.is_empty() {
        header.table.get_or_insert_default().reservations = reservations;
    }
    let more = parts.split_off(1.min(parts.len()));
    let part = parts.pop()?;
    let header = if more.is_empty() { separate(&header).next()? } else { header };
    Some(Draft { part, more, header, payload })
}

impl Client {
    /// Returns whether a slice shares a message: it is small, both ways, and its server takes such messages.
    pub(crate) fn is_small(&self, entry: &Entry, k: usize, sent: usize, answered: Option<usize>) -> bool {
        let (_, shard) = entry.slices[k];
        sent.max(answered.unwrap_or(0)) <= MAX_SMALL_BYTES && self.links[shard].parts.load(Ordering::Relaxed)
    }
}
