//! Sparse messages: many parts, one per slice, and the outcome of each.

use super::error::brief_refusal;
use super::fields::{codec_to_wire, dtype_to_wire, malformed};
use super::header::UNKNOWN;
use bytes::Bytes;
use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Result};
use fastps_core::frame::{Action, Applied, Base, Push};
use fastps_core::rows::Indices;
use fastps_core::tensor::SliceId;
use fastps_core::verbs::SliceVersion;
use fastps_proto::v1 as pb;
use std::collections::HashSet;

/// Most parts of one message.
pub const MAX_PARTS: usize = 4096;
/// Refusals reported in full; the others are brief, so that any answer fits a message.
const MAX_FULL_REFUSALS: usize = 16;
/// Bytes of an index.
const INDEX_BYTES: usize = 4;

/// The parts of a well-formed request, as long as its payload.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    list: &'a [pb::Part],
    table: Option<&'a pb::PartTable>,
    /// Fields shared by all parts; the body is the payload.
    push: Option<Push<'a>>,
    payload: &'a [u8],
}

/// One part of a request.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The slice.
    pub slice: SliceId,
    /// The rows.
    pub indices: Indices<'a>,
    /// Element count claimed by the sender, and the start of a push's body.
    elements: usize,
    body: &'a [u8],
}

/// The parts of a gradient or assignment.
pub(super) fn of_push<'a>(h: &'a pb::Header, push: Push<'a>) -> Result<Parts<'a>> {
    let table = h.table.as_deref();
    if let Some(table) = table {
        let pb::PartTable { base_versions, base_owns, versions, owns, stalenesses, duplicates, refusals } =
            table;
        let answers = versions.len() + owns.len() + stalenesses.len() + duplicates.len() + refusals.len();
        let fit = |list: &[u64]| list.is_empty() || list.len() == h.parts.len();
        if answers > 0 || !fit(base_versions) || !fit(base_owns) || base_owns.len() > base_versions.len() {
            return Err(malformed("the table does not fit the parts"));
        }
    }
    check(Parts { list: &h.parts, table, payload: push.body, push: Some(push) })
}

/// The parts of a pull.
pub(super) fn of_pull<'a>(h: &'a pb::Header, payload: &'a [u8]) -> Result<Parts<'a>> {
    if h.parts.iter().any(|part| part.elements != 0) {
        return Err(malformed("KIND_PULL does not use elements").expected("the field unset", "a value"));
    }
    check(Parts { list: &h.parts, table: None, push: None, payload })
}

/// The slices of a question about their versions.
pub(super) fn of_versions(h: &pb::Header) -> Result<Parts<'_>> {
    if h.parts.iter().any(|part| part.elements != 0 || part.count != 0) {
        return Err(malformed("KIND_PULL_VERSION uses only the slice of a part")
            .expected("the other fields unset", "a value"));
    }
    check(Parts { list: &h.parts, table: None, push: None, payload: &[] })
}

/// Checks the number of parts, that their slices differ, and the payload's length.
fn check(parts: Parts<'_>) -> Result<Parts<'_>> {
    let (all, payload) = (parts.list, parts.payload);
    if all.len() > MAX_PARTS {
        return Err(malformed("too many parts").expected(format!("at most {MAX_PARTS}"), all.len()));
    }
    let of_part = |part: &pb::Part| {
        let fits = part.count <= payload.len() as u64 && part.elements as usize <= 8 * payload.len();
        fits.then(|| INDEX_BYTES * part.count as usize + parts.body_len(part))
    };
    let expected = all.iter().try_fold(0, |sum, part| Some(sum + of_part(part)?));
    if expected != Some(payload.len()) {
        let expected = expected.map_or("less".to_owned(), |bytes| format!("{bytes} bytes"));
        return Err(malformed("the payload differs in length from its parts")
            .expected(expected, format!("{} bytes", payload.len())));
    }
    let ascend = all.is_sorted_by(|a, b| a.slice < b.slice);
    if !ascend && all.iter().map(|part| part.slice).collect::<HashSet<_>>().len() < all.len() {
        return Err(malformed("a slice has two parts in one message"));
    }
    Ok(parts)
}

impl<'a> Parts<'a> {
    fn body_len(&self, part: &pb::Part) -> usize {
        self.push.map_or(0, |push| push.codec.body_len(part.elements as usize))
    }

    /// Returns whether the parts are of a gradient.
    pub(super) fn are_of_gradient(&self) -> bool {
        self.push.is_some_and(|push| push.action == Action::Gradient)
    }

    /// The number of parts.
    #[allow(clippy::len_without_is_empty, reason = "a sparse message has parts")]
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// The parts, in order.
    pub fn iter(self) -> impl Iterator<Item = Part<'a>> {
        let mut rest = self.payload;
        self.list.iter().map(move |part| {
            let (indices, after) = rest.split_at(INDEX_BYTES * part.count as usize);
            let (body, after) = after.split_at(self.body_len(part));
            rest = after;
            let elements = part.elements as usize;
            Part { slice: SliceId(part.slice), indices: Indices::new(indices), elements, body }
        })
    }

    /// The gradient in the k-th part.
    pub fn push(&self, k: usize, part: Part<'a>) -> Option<Push<'a>> {
        let known = |list: &[u64]| list.get(k).copied().filter(|value| *value != UNKNOWN);
        let base = self.table.and_then(|table| {
            Some(Base { version: known(&table.base_versions)?, own: known(&table.base_owns) })
        });
        let Part { slice, indices, elements, body } = part;
        self.push.map(|push| Push {
            slice,
            base,
            count: elements as u64,
            indices: Some(indices),
            body,
            ..push
        })
    }
}

fn table<T>(outcomes: &[Result<T>], version: impl Fn(&T) -> (u64, u64)) -> pb::PartTable {
    let each = |outcome: &Result<T>| outcome.as_ref().map_or((0, 0), &version);
    pb::PartTable {
        versions: outcomes.iter().map(|outcome| each(outcome).0).collect(),
        owns: outcomes.iter().map(|outcome| each(outcome).1).collect(),
        refusals: refusals(outcomes),
        ..Default::default()
    }
}

/// The parts that were refused.
pub(super) fn refusals<T>(outcomes: &[Result<T>]) -> Vec<pb::PartRefusal> {
    let errors =
        outcomes.iter().enumerate().filter_map(|(part, outcome)| Some((part, outcome.as_ref().err()?)));
    let refusal = |(n, (part, error)): (usize, (usize, &Error))| {
        let refusal = if n < MAX_FULL_REFUSALS { super::refusal(error) } else { brief_refusal(error) };
        pb::PartRefusal { part: part as u32, refusal: Some(Box::new(refusal)) }
    };
    errors.enumerate().map(refusal).collect()
}

/// The answer to a sparse gradient.
pub fn receipts(tag: u64, outcomes: &[Result<Applied>]) -> pb::Frame {
    let applied = || outcomes.iter().flatten();
    let mut table = table(outcomes, |applied| (applied.version, applied.own));
    if applied().any(|applied| applied.staleness.is_some()) {
        let staleness =
            |outcome: &Result<Applied>| outcome.as_ref().map_or(UNKNOWN, |a| a.staleness.unwrap_or(UNKNOWN));
        table.stalenesses = outcomes.iter().map(staleness).collect();
    }
    let again = |(part, outcome): (usize, &Result<Applied>)| {
        outcome.as_ref().is_ok_and(|applied| applied.duplicate).then_some(part as u32)
    };
    table.duplicates = outcomes.iter().enumerate().filter_map(again).collect();
    let scale = applied().map(|applied| applied.scale).fold(f32::INFINITY, f32::min);
    let header = pb::Header {
        kind: pb::Kind::Receipt.into(),
        tag,
        scale: Some(if scale.is_finite() { scale } else { 1.0 }),
        table: Some(Box::new(table)),
        ..Default::default()
    };
    pb::Frame { header: Some(header), payload: Bytes::new() }
}

/// The header of the answer to a pull of rows; the payload holds the values of the parts not refused.
pub fn rows_header(tag: u64, dtype: DType, elements: usize, outcomes: &[Result<SliceVersion>]) -> pb::Header {
    pb::Header {
        kind: pb::Kind::Values.into(),
        tag,
        count: elements as u64,
        codec: codec_to_wire(CodecId::plain(dtype)),
        dtype: dtype_to_wire(dtype).into(),
        table: Some(Box::new(table(outcomes, |at| (at.version, at.own)))),
        ..Default::default()
    }
}

/// The answer to a question about the versions of many slices.
pub fn versions(tag: u64, outcomes: &[Result<SliceVersion>]) -> pb::Frame {
    let header = pb::Header {
        kind: pb::Kind::Version.into(),
        tag,
        table: Some(Box::new(table(outcomes, |at| (at.version, at.own)))),
        ..Default::default()
    };
    pb::Frame { header: Some(header), payload: Bytes::new() }
}

/// Outcome of each part, as a client reads it.
pub(super) fn outcomes(table: pb::PartTable, scale: f32) -> Result<Vec<Result<Applied>>> {
    let pb::PartTable { versions, owns, stalenesses, duplicates, refusals, .. } = table;
    let unfit = || malformed("the answer's table does not fit its parts");
    if owns.len() != versions.len() || !(stalenesses.is_empty() || stalenesses.len() == versions.len()) {
        return Err(unfit());
    }
    let applied = |(k, (version, own))| {
        let staleness = stalenesses.get(k).copied().filter(|staleness| *staleness != UNKNOWN);
        Ok(Applied { version, own, staleness, scale, momentum: None, duplicate: false })
    };
    let mut outcomes: Vec<_> = versions.into_iter().zip(owns).enumerate().map(applied).collect();
    for k in duplicates {
        match outcomes.get_mut(k as usize) {
            Some(Ok(applied)) => applied.duplicate = true,
            _ => return Err(unfit()),
        }
    }
    for pb::PartRefusal { part, refusal } in refusals {
        let outcome = outcomes.get_mut(part as usize).ok_or_else(unfit)?;
        *outcome = Err(super::error_from_refusal(*refusal.ok_or_else(unfit)?));
    }
    Ok(outcomes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastps_core::error::Kind;
    use prost::Message;

    #[test]
    fn refusals_of_all_parts_fit_a_message() {
        let long = || "x".repeat(2000);
        let error = || Error::new(Kind::Capacity, long()).tensor(long()).shard(3).expected(long(), long());
        let outcomes: Vec<Result<Applied>> = (0..MAX_PARTS).map(|_| Err(error())).collect();
        let answer = receipts(7, &outcomes);
        assert!(answer.encoded_len() < 1 << 20, "{}", answer.encoded_len());
        let read = super::outcomes(*answer.header.unwrap().table.unwrap(), 1.0).unwrap();
        assert_eq!(read.len(), MAX_PARTS);
        for (k, outcome) in read.into_iter().enumerate() {
            let error = outcome.unwrap_err();
            assert_eq!((error.kind, error.shard), (Kind::Capacity, Some(3)));
            assert_eq!(
                (error.tensor.is_some(), error.message.len()),
                if k < MAX_FULL_REFUSALS { (true, 512) } else { (false, 64) }
            );
        }
    }
}
