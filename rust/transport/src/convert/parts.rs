//! Messages about several slices: their parts, of some rows (sparse) or of whole slices, and the outcome of each.

use super::error::brief_refusal;
use super::fields::{codec_to_wire, dtype_to_wire, malformed};
use super::header::UNKNOWN;
use bytes::Bytes;
use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Result};
use fastps_core::frame::{Action, Applied, Base, Push};
use fastps_core::rows::Indices;
use fastps_core::slice::Snapshot;
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
    /// Set for whole slices, which have no indices.
    whole: bool,
    want_values: bool,
    /// Of a pull: whether of the averages, and in bfloat16.
    pulls: (bool, bool),
}

/// One part of a request.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The slice.
    pub slice: SliceId,
    /// The rows; `None`: the whole slice.
    pub indices: Option<Indices<'a>>,
    /// Element count claimed by the sender, and the start of a push's body.
    elements: usize,
    body: &'a [u8],
}

/// The parts of a gradient or assignment.
pub(super) fn of_push<'a>(h: &'a pb::Header, push: Push<'a>) -> Result<Parts<'a>> {
    let table = h.table.as_deref();
    if let Some(table) = table {
        let pb::PartTable { base_versions, base_owns, .. } = table;
        let fit = |list: &[u64]| list.is_empty() || list.len() == h.parts.len();
        let gradient = push.action == Action::Gradient;
        let based = !base_versions.is_empty() || !base_owns.is_empty();
        if !fit(base_versions)
            || !fit(base_owns)
            || base_owns.len() > base_versions.len()
            || based && !gradient
        {
            return Err(unfit_table());
        }
        let initial = table.reservations.len();
        let may_be_initial = push.action == Action::Assign && table.whole && initial == h.parts.len();
        if initial > 0 && (!may_be_initial || table.reservations.contains(&0)) {
            return Err(unfit_table());
        }
        check_no_answers(table)?;
    }
    let (whole, want_values) = (are_whole(h), h.want_values);
    let parts = Parts {
        list: &h.parts,
        table,
        payload: push.body,
        push: Some(push),
        whole,
        want_values,
        pulls: (false, false),
    };
    check(&parts)
}

/// Returns whether the parts of a message are whole slices.
pub fn are_whole(h: &pb::Header) -> bool {
    h.table.as_ref().is_some_and(|table| table.whole)
}

fn unfit_table() -> Error {
    malformed("the table does not fit the parts")
}

/// Returns whether the parts of a message are initial values of slices.
pub fn are_initial(h: &pb::Header) -> bool {
    h.table.as_ref().is_some_and(|table| !table.reservations.is_empty())
}

/// Fails if the table of a request has fields of answers.
fn check_no_answers(table: &pb::PartTable) -> Result<()> {
    let pb::PartTable { versions, owns, stalenesses, duplicates, refusals, scales, momenta, .. } = table;
    let answers = versions.len() + owns.len() + stalenesses.len() + duplicates.len() + refusals.len();
    if answers + scales.len() + momenta.len() > 0 { Err(unfit_table()) } else { Ok(()) }
}

/// The parts of a pull: of the averages, and in bfloat16.
pub(super) fn of_pull<'a>(h: &'a pb::Header, payload: &'a [u8], pulls: (bool, bool)) -> Result<Parts<'a>> {
    if h.parts.iter().any(|part| part.elements != 0) {
        return Err(malformed("KIND_PULL does not use elements").expected("the field unset", "a value"));
    }
    if let Some(table) = h.table.as_deref() {
        check_no_answers(table)?;
        if !table.base_versions.is_empty() || !table.base_owns.is_empty() || !table.reservations.is_empty() {
            return Err(unfit_table());
        }
    }
    let whole = are_whole(h);
    let list = &h.parts;
    check(&Parts { list, table: None, push: None, payload, whole, want_values: false, pulls })
}

/// The slices of a question about their versions.
pub(super) fn of_versions(h: &pb::Header) -> Result<Parts<'_>> {
    if h.parts.iter().any(|part| part.elements != 0 || part.count != 0) {
        return Err(malformed("KIND_PULL_VERSION uses only the slice of a part")
            .expected("the other fields unset", "a value"));
    }
    let list = &h.parts;
    check(&Parts {
        list,
        table: None,
        push: None,
        payload: &[],
        whole: false,
        want_values: false,
        pulls: (false, false),
    })
}

/// Checks the number of parts, that their slices differ, and the payload's length.
fn check<'a>(parts: &Parts<'a>) -> Result<Parts<'a>> {
    let (all, payload) = (parts.list, parts.payload);
    if all.len() > MAX_PARTS {
        return Err(malformed("too many parts").expected(format!("at most {MAX_PARTS}"), all.len()));
    }
    if parts.whole
        && let Some(part) = all.iter().find(|part| part.count != 0)
    {
        return Err(
            malformed("a part that is a whole slice has no indices").expected("count unset", part.count)
        );
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
    Ok(*parts)
}

impl<'a> Parts<'a> {
    fn body_len(&self, part: &pb::Part) -> usize {
        self.push.map_or(0, |push| push.codec.body_len(part.elements as usize))
    }

    /// Returns whether the parts are of a gradient.
    pub(super) fn are_of_gradient(&self) -> bool {
        self.push.is_some_and(|push| push.action == Action::Gradient)
    }

    /// Returns whether the parts are initial values of slices.
    pub fn are_initial(&self) -> bool {
        self.table.is_some_and(|table| !table.reservations.is_empty())
    }

    /// The reservation that the k-th part's initial values belong to.
    pub fn reservation(&self, k: usize) -> Option<u64> {
        self.table.and_then(|table| table.reservations.get(k).copied())
    }

    /// The number of parts.
    #[allow(clippy::len_without_is_empty, reason = "such a message has parts")]
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns whether the parts are whole slices.
    pub fn are_whole(&self) -> bool {
        self.whole
    }

    /// Returns whether a push is to be answered with the new values.
    pub fn want_values(&self) -> bool {
        self.want_values
    }

    /// Returns whether a pull asks for the averages.
    pub fn of_averages(&self) -> bool {
        self.pulls.0
    }

    /// Returns whether a pull asks for bfloat16.
    pub fn in_bfloat16(&self) -> bool {
        self.pulls.1
    }

    /// Number of elements of all parts of a push, as claimed by the sender.
    pub fn elements(&self) -> usize {
        self.list.iter().map(|part| part.elements as usize).sum()
    }

    /// The parts, in order.
    pub fn iter(self) -> impl Iterator<Item = Part<'a>> {
        let mut rest = self.payload;
        self.list.iter().map(move |part| {
            let (indices, after) = rest.split_at(INDEX_BYTES * part.count as usize);
            let (body, after) = after.split_at(self.body_len(part));
            rest = after;
            let elements = part.elements as usize;
            let indices = (!self.whole).then(|| Indices::new(indices));
            Part { slice: SliceId(part.slice), indices, elements, body }
        })
    }

    /// The gradient or assignment in the k-th part.
    pub fn push(&self, k: usize, part: Part<'a>) -> Option<Push<'a>> {
        let known = |list: &[u64]| list.get(k).copied().filter(|value| *value != UNKNOWN);
        let base = self.table.and_then(|table| {
            Some(Base { version: known(&table.base_versions)?, own: known(&table.base_owns) })
        });
        let Part { slice, indices, elements, body } = part;
        self.push.map(|push| Push { slice, base, count: elements as u64, indices, body, ..push })
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

/// The answer to a push in parts, of `whole` slices or of rows.
pub fn receipts(tag: u64, outcomes: &[Result<Applied>], whole: bool) -> pb::Frame {
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
    if whole {
        let scale_of = |outcome: &Result<Applied>| outcome.as_ref().map_or(scale, |applied| applied.scale);
        if applied().any(|applied| applied.scale != scale) {
            table.scales = outcomes.iter().map(scale_of).collect();
        }
        let momentum =
            |outcome: &Result<Applied>| outcome.as_ref().ok().and_then(|a| a.momentum).unwrap_or(f64::NAN);
        if applied().any(|applied| applied.momentum.is_some()) {
            table.momenta = outcomes.iter().map(momentum).collect();
        }
    }
    let header = pb::Header {
        kind: pb::Kind::Receipt.into(),
        tag,
        scale: Some(if scale.is_finite() { scale } else { 1.0 }),
        table: Some(Box::new(table)),
        ..Default::default()
    };
    pb::Frame { header: Some(header), payload: Bytes::new() }
}

/// The header of the answer to a push of whole slices that wants their values; the payload holds those of the
/// parts not refused.
pub fn values_header(tag: u64, dtype: DType, elements: usize, outcomes: &[Result<Applied>]) -> pb::Header {
    pb::Header {
        kind: pb::Kind::Values.into(),
        count: elements as u64,
        codec: codec_to_wire(CodecId::plain(dtype)),
        dtype: dtype_to_wire(dtype).into(),
        ..receipts(tag, outcomes, true).header.unwrap_or_default()
    }
}

/// The header of the answer to a pull of parts; the payload holds the values of the parts not refused.
pub fn rows_header(tag: u64, values: &Snapshot, outcomes: &[Result<SliceVersion>]) -> pb::Header {
    pb::Header {
        kind: pb::Kind::Values.into(),
        tag,
        count: values.elements() as u64,
        codec: codec_to_wire(values.codec),
        dtype: dtype_to_wire(values.dtype).into(),
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
    let pb::PartTable { versions, owns, stalenesses, duplicates, refusals, scales, momenta, .. } = table;
    let unfit = || malformed("the answer's table does not fit its parts");
    let fit = |len: usize| len == 0 || len == versions.len();
    if owns.len() != versions.len() || ![stalenesses.len(), scales.len(), momenta.len()].into_iter().all(fit)
    {
        return Err(unfit());
    }
    let applied = |(k, (version, own))| {
        let staleness = stalenesses.get(k).copied().filter(|staleness| *staleness != UNKNOWN);
        let scale = scales.get(k).copied().unwrap_or(scale);
        let momentum = momenta.get(k).copied().filter(|momentum: &f64| !momentum.is_nan());
        Ok(Applied { version, own, staleness, scale, momentum, duplicate: false })
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
    use super::super::header::{self, Completion, GradientSettings, Target};
    use super::super::{Answer, Read, Verb, request_from_frame};
    use super::*;
    use fastps_core::error::Kind;
    use proptest::prelude::*;
    use prost::Message;

    fn settings() -> GradientSettings<'static> {
        let (dtype, codec) = (DType::Float32, CodecId::Int8);
        GradientSettings {
            dtype,
            codec,
            lr: Some(0.5),
            scale: Some(2.0),
            weight: Some(3.0),
            correction: None,
            note: "batch 8131",
        }
    }

    /// Spoils the header of a good message.
    type Spoil = fn(&mut pb::Header);

    const TARGET: Target = Target { slice: SliceId(0), group: 1, epoch: 3 };

    fn sent(header: &pb::Header, payload: &[u8]) -> pb::Frame {
        let completion =
            Completion { tag: 5, client: 9, sequence: 3, counts_own: true, ..Completion::default() };
        let sequence = if header.kind() == pb::Kind::Pull { 0 } else { 3 };
        let header = header::complete(header, Completion { sequence, ..completion });
        let bytes = pb::Frame { header: Some(header), payload: payload.to_vec().into() }.encode_to_vec();
        pb::Frame::decode(bytes.as_slice()).unwrap()
    }

    fn pushes(frame: &pb::Frame) -> Vec<String> {
        match request_from_frame(frame).unwrap().verb {
            Verb::PushParts(parts, _) => {
                let push = |(k, part)| format!("{:?}", parts.push(k, part).unwrap());
                parts.iter().enumerate().map(push).collect()
            }
            Verb::Push { push, .. } => vec![format!("{push:?}")],
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn whole_slices_are_read_as_from_frames_of_their_own(
            slices in prop::collection::vec((0..300_u32, any::<Option<(u64, Option<u64>)>>()), 1..40),
        ) {
            let part = |(k, (elements, _)): (usize, &(u32, _))| {
                pb::Part { slice: 7 * k as u64, count: 0, elements: *elements }
            };
            let parts: Vec<_> = slices.iter().enumerate().map(part).collect();
            let known = |value: u64| value.min(UNKNOWN - 1);
            let base = |(_, base): &(u32, Option<(u64, Option<u64>)>)| {
                base.map(|(version, own)| Base { version: known(version), own: own.map(known) })
            };
            let bases: Vec<_> = slices.iter().map(base).collect();
            let body = |(k, (elements, _)): (usize, &(u32, _))| {
                vec![k as u8; CodecId::Int8.body_len(*elements as usize)]
            };
            let bodies: Vec<_> = slices.iter().enumerate().map(body).collect();
            let header = header::whole_gradients(TARGET, &settings(), parts, &bases, false);
            let together = pushes(&sent(&header, &bodies.concat()));
            let alone = header::separate(&header).zip(&bodies);
            let alone: Vec<_> = alone.flat_map(|(header, body)| pushes(&sent(&header, body))).collect();
            prop_assert_eq!(together, alone);
        }
    }

    #[test]
    fn whole_slices_are_refused_before_they_are_looked_up() {
        let part = |slice, elements| pb::Part { slice, count: 0, elements };
        let parts = || vec![part(4, 64), part(7, 1), part(5, 0)];
        let gradient = || header::whole_gradients(TARGET, &settings(), parts(), &[None; 3], true);
        let good = sent(&gradient(), &[0; 67]);
        let Verb::PushParts(read, _) = request_from_frame(&good).unwrap().verb else { panic!("{good:?}") };
        assert!(read.are_whole() && read.want_values() && read.iter().all(|part| part.indices.is_none()));
        assert_eq!((read.len(), read.elements()), (3, 65));
        let table = |h: &mut pb::Header, spoil: fn(&mut pb::PartTable)| spoil(h.table.as_mut().unwrap());
        let spoils: [(&str, Spoil); 13] = [
            ("no indices", |h| h.parts[1].count = 1),
            ("differs in length", |h| h.parts[1].elements = 2),
            ("differs in length", |h| h.parts[1].elements = u32::MAX),
            ("differs in length", |h| h.parts.truncate(1)),
            ("two parts", |h| h.parts[1].slice = 4),
            ("two parts", |h| h.parts[2].slice = 7),
            ("beside parts", |h| h.slice = 4),
            ("count", |h| h.count = 66),
            ("base_version", |h| h.base_version = Some(1)),
            ("reservation", |h| h.reservation = 1),
            ("view", |h| h.view = 1),
            ("too many parts", |h| h.parts = vec![pb::Part::default(); MAX_PARTS + 1]),
            ("want_values", |h| h.kind = pb::Kind::Assign.into()),
        ];
        let refused = |what: &str, header: &pb::Header, payload: &[u8]| {
            let error = request_from_frame(&sent(header, payload)).unwrap_err();
            assert_eq!(error.kind, Kind::Frame, "{what}");
            assert!(error.message.contains(what), "{what}: {error}");
        };
        for (what, spoil) in spoils {
            let mut header = gradient();
            if what == "want_values" {
                (header.lr, header.scale, header.weight) = (None, None, None);
            }
            spoil(&mut header);
            refused(what, &header, &[0; 67]);
        }
        let unfit: [fn(&mut pb::PartTable); 10] = [
            |t| t.base_versions = vec![1; 2],
            |t| t.base_owns = vec![1; 3],
            |t| t.versions = vec![1; 3],
            |t| t.owns = vec![1; 3],
            |t| t.stalenesses = vec![1; 3],
            |t| t.duplicates = vec![0],
            |t| t.refusals = vec![pb::PartRefusal::default()],
            |t| t.scales = vec![1.0; 3],
            |t| t.momenta = vec![0.5; 3],
            |t| t.reservations = vec![1; 3],
        ];
        for spoil in unfit {
            let mut header = gradient();
            table(&mut header, spoil);
            refused("does not fit the parts", &header, &[0; 67]);
            let mut pull = header::whole_pulls(TARGET, Read::Values, vec![part(4, 0)]);
            table(&mut pull, spoil);
            refused("does not fit the parts", &pull, &[]);
        }
        let mut sparse = gradient();
        table(&mut sparse, |table| table.whole = false);
        sparse.parts = vec![part(4, 0)];
        refused("want_values", &sparse, &[]);
        let assigned = header::assignment_parts(TARGET, DType::Float32, vec![part(4, 1)]);
        let mut assigned = pb::Header { table: gradient().table, ..assigned };
        table(&mut assigned, |table| (table.base_versions, table.base_owns) = (vec![], vec![]));
        assert_eq!(pushes(&sent(&assigned, &[0; 4])).len(), 1);
        table(&mut assigned, |table| table.base_versions = vec![1]);
        refused("does not fit the parts", &assigned, &[0; 4]);
        let mut initial = header::whole_assignments(TARGET, DType::Float32, vec![part(4, 1), part(6, 2)]);
        table(&mut initial, |table| table.reservations = vec![8, 9]);
        let frame = sent(&initial, &[0; 12]);
        let request = request_from_frame(&frame).unwrap();
        let Verb::PushParts(parts, _) = request.verb else { panic!("{request:?}") };
        assert!(request.verb.is_initial() && parts.reservation(1) == Some(9));
        let alone: Vec<_> = header::separate(&initial).map(|one| (one.slice, one.reservation)).collect();
        assert_eq!(alone, [(4, 8), (6, 9)]);
        for reservations in [vec![8], vec![8, 0], vec![8, 9, 9]] {
            let mut wrong = initial.clone();
            wrong.table.as_mut().unwrap().reservations = reservations;
            refused("does not fit the parts", &wrong, &[0; 12]);
        }
        let mut rows = pb::Header { parts: vec![part(4, 1)], ..initial };
        table(&mut rows, |table| (table.whole, table.reservations) = (false, vec![8]));
        refused("does not use table", &rows, &[0; 4]);
        for (what, header, payload) in [
            ("elements", header::whole_pulls(TARGET, Read::Values, vec![part(4, 1)]), &[][..]),
            ("differs in length", header::whole_pulls(TARGET, Read::Values, vec![part(4, 0)]), &[0; 4]),
            ("two parts", header::whole_pulls(TARGET, Read::Average, vec![part(4, 0), part(4, 0)]), &[]),
        ] {
            refused(what, &header, payload);
        }
    }

    #[test]
    fn receipts_of_whole_slices_survive_both_ways() {
        let applied = |scale, momentum| {
            Ok(Applied { version: 4, own: 2, staleness: Some(1), scale, momentum, duplicate: false })
        };
        let refused: Result<Applied> = Err(Error::new(Kind::StalePush, "late").shard(1));
        for outcomes in [
            vec![applied(1.0, None), applied(1.0, None)],
            vec![applied(0.5, Some(0.9)), refused.clone(), applied(1.0, None)],
            vec![refused.clone(), refused],
        ] {
            for wants in [false, true] {
                let header = if wants {
                    values_header(6, DType::Float32, 3, &outcomes)
                } else {
                    receipts(6, &outcomes, true).header.unwrap()
                };
                let frame = pb::Frame { header: Some(header), payload: Bytes::new() };
                let frame = pb::Frame::decode(frame.encode_to_vec().as_slice()).unwrap();
                let read = super::super::answer_from_frame(frame).unwrap();
                let expected = Answer::Parts { outcomes: outcomes.clone(), payload: Bytes::new() };
                assert_eq!(read, (6, expected));
            }
        }
        let short =
            pb::PartTable { versions: vec![1; 2], owns: vec![1; 2], scales: vec![1.0], ..Default::default() };
        assert!(super::outcomes(short, 1.0).is_err());
    }

    #[test]
    fn refusals_of_all_parts_fit_a_message() {
        let long = || "x".repeat(2000);
        let error = || Error::new(Kind::Capacity, long()).tensor(long()).shard(3).expected(long(), long());
        let outcomes: Vec<Result<Applied>> = (0..MAX_PARTS).map(|_| Err(error())).collect();
        let answer = receipts(7, &outcomes, false);
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
