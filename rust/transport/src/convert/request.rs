//! Reads requests strictly: a field that a request's kind does not use must be unset.

use super::fields::{
    Read, codec_from_wire, codec_to_wire, correction_from_wire, dtype_from_wire, malformed, unknown,
};
use super::header::{self, Completion, GradientSettings, Target};
use super::parts::{self, Parts, are_whole};
use super::vector::{self, PortionOf, Run, VectorRead};
use bytes::Bytes;
use crc_fast::CrcAlgorithm;
use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::{Action, Base, Identity, Push};
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use std::fmt;

/// Destination and sender of a frame, common to all requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// The tensor's group.
    pub group: u32,
    /// Epoch of the map that the client used.
    pub epoch: u64,
    /// The client's incarnation.
    pub client: u64,
}

/// A well-formed request, before any lookup.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Repeated in the answer.
    pub tag: u64,
    /// Destination and sender.
    pub route: Route,
    /// The slice.
    pub slice: SliceId,
    /// The operation.
    pub verb: Verb<'a>,
}

/// Operation of a request.
#[derive(Clone, Copy, Debug)]
pub enum Verb<'a> {
    /// A gradient or an assignment.
    Push {
        /// The push.
        push: Push<'a>,
        /// Element type of the tensor, as claimed by the client.
        dtype: DType,
        /// Answer with the new values.
        want_values: bool,
        /// The reservation that an initial assignment belongs to.
        reservation: Option<u64>,
    },
    /// Gradients or assignments of whole slices or of rows, one per slice; instead of the request's slice.
    PushParts(Parts<'a>, DType),
    /// The values.
    Pull {
        /// Their average instead.
        average: bool,
        /// In bfloat16, rounded to nearest even.
        bfloat16: bool,
    },
    /// Several slices, or rows of them; instead of the request's slice.
    PullParts(Parts<'a>),
    /// The optimizer state.
    PullState,
    /// Only the version.
    PullVersion,
    /// Only the versions of several slices; instead of the request's slice.
    PullVersions(Parts<'a>),
    /// The outcome of a push.
    Resolve(Identity),
    /// A program on vectors of several slices; instead of the request's slice.
    Run(Run<'a>),
    /// A vector.
    PullVector(VectorRead),
    /// A portion of a sum.
    Portion {
        /// The sum.
        of: PortionOf,
        /// Element type of the tensor, as claimed by the client.
        dtype: DType,
        /// Number of elements.
        count: u64,
        /// The values, in the plain codec of the type.
        body: &'a [u8],
    },
}

impl Verb<'_> {
    /// True if it changes what the server holds, or waits for a change.
    pub fn changes(&self) -> bool {
        match self {
            Self::Pull { .. }
            | Self::PullParts(_)
            | Self::PullState
            | Self::PullVersion
            | Self::PullVersions(_)
            | Self::PullVector(_) => false,
            Self::Push { .. }
            | Self::PushParts(..)
            | Self::Resolve(_)
            | Self::Run(_)
            | Self::Portion { .. } => true,
        }
    }

    /// True for the first values of a slice, which its shard makes durable when their reservation is sealed.
    pub fn is_initial(&self) -> bool {
        match self {
            Self::Push { reservation, .. } => reservation.is_some(),
            Self::PushParts(parts, _) => parts.are_initial(),
            _ => false,
        }
    }

    /// True for a gradient, of one slice or of rows of several.
    pub fn is_gradient(&self) -> bool {
        match self {
            Self::Push { push, .. } => push.action == Action::Gradient,
            Self::PushParts(parts, _) => parts.are_of_gradient(),
            _ => false,
        }
    }
}

/// CRC-32C of a payload.
pub fn crc32c(payload: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, payload) as u32
}

/// The value of a set field, for the error if its kind does not use it.
type Set<'a> = Option<&'a dyn fmt::Display>;

fn unset(used: bool, field: &str, kind: pb::Kind, set: Set<'_>) -> Result<()> {
    match set {
        Some(value) if !used => Err(malformed(format!("{} does not use {field}", kind.as_str_name()))
            .expected("the field unset", value)),
        _ => Ok(()),
    }
}

/// A number or flag that counts as set unless it has its default.
fn plain<T: fmt::Display + Default + PartialEq>(value: &T) -> Set<'_> {
    (*value != T::default()).then_some(value)
}

/// An optional field, which may be set to its default, too.
fn given<T: fmt::Display>(value: Option<&T>) -> Set<'_> {
    value.map(|value| value as &dyn fmt::Display)
}

/// A message, whose contents are not shown.
fn message<T>(value: Option<&T>) -> Set<'_> {
    value.map(|_| &"a message" as &dyn fmt::Display)
}

/// Reads a request. The error names the field; the caller answers it with the tag of the header, if there is
/// one.
pub fn request_from_frame(frame: &pb::Frame) -> Result<Request<'_>> {
    let h = frame.header.as_ref().ok_or_else(|| malformed("the frame has no header"))?;
    let kind = pb::Kind::try_from(h.kind)
        .map_err(|_| unknown("kind", "a request of this protocol version", h.kind))?;
    let (gradient, assign, state) =
        (kind == pb::Kind::Gradient, kind == pb::Kind::Assign, kind == pb::Kind::AssignState);
    let pushes = gradient || assign || state;
    let resolve = kind == pb::Kind::Resolve;
    let reads = matches!(kind, pb::Kind::Pull | pb::Kind::PullState | pb::Kind::PullVersion);
    let (run, portion) = (kind == pb::Kind::Vector, kind == pb::Kind::Portion);
    if !pushes && !resolve && !reads && !run && !portion {
        return Err(malformed("this kind of frame is not a request, or reserved").expected(
            "KIND_GRADIENT, _ASSIGN, _PULL, _PULL_STATE, _PULL_VERSION, _ASSIGN_STATE, _RESOLVE, _VECTOR or _PORTION",
            kind.as_str_name(),
        ));
    }
    let many = !h.parts.is_empty() && (gradient || assign || kind == pb::Kind::Pull);
    let whole = many && are_whole(h);
    let single = gradient && !many;
    let pull = kind == pb::Kind::Pull && !many;
    // The tensor's own values, of whole slices.
    let reads_whole = pull && h.vector.is_none() || kind == pb::Kind::Pull && whole;
    // Requests with elements in the payload.
    let values = pushes || portion;
    let (parts, bytes) = (h.parts.len(), frame.payload.len());
    let versions = kind == pb::Kind::PullVersion && parts > 0;
    for (used, field, set) in [
        (!many && !run && !versions, "slice beside parts", plain(&h.slice)),
        (values && !many, "count", plain(&h.count)),
        (values || reads_whole, "codec", plain(&h.codec)),
        (values, "dtype", plain(&h.dtype)),
        (pushes || resolve, "sequence", plain(&h.sequence)),
        (pushes, "acknowledged", plain(&h.acknowledged)),
        (single, "base_version", given(h.base_version.as_ref())),
        (single, "base_own", given(h.base_own.as_ref())),
        (gradient, "lr", given(h.lr.as_ref())),
        (gradient, "scale", given(h.scale.as_ref())),
        (gradient, "correction", message(h.correction.as_ref())),
        (values || many || run, "crc32c", given(h.crc32c.as_ref())),
        (single || gradient && whole, "want_values", plain(&h.want_values)),
        (state, "step", given(h.step.as_ref())),
        (false, "version", given(h.version.as_ref())),
        (false, "own", given(h.own.as_ref())),
        (false, "staleness", given(h.staleness.as_ref())),
        (false, "duplicate", plain(&h.duplicate)),
        (false, "refusal", message(h.refusal.as_ref())),
        (assign && !many, "reservation", plain(&h.reservation)),
        (gradient, "weight", given(h.weight.as_ref())),
        (false, "have_version", given(h.have_version.as_ref())),
        (false, "min_version", given(h.min_version.as_ref())),
        (false, "lent", message(h.lent.as_ref())),
        (many || run || versions, "parts", plain(&parts)),
        (many && gradient || whole, "table", message(h.table.as_ref())),
        (run || pull, "vector", message(h.vector.as_ref())),
        (reads_whole, "view", plain(&h.view)),
        (gradient, "note", (!h.note.is_empty()).then_some(&h.note as &dyn fmt::Display)),
        (portion, "portion", message(h.portion.as_ref())),
        (values || many || run, "payload", plain(&bytes)),
    ] {
        unset(used, field, kind, set)?;
    }
    if h.client == 0 {
        return Err(malformed("the frame names no client"));
    }
    let identity = Identity { client: h.client, sequence: h.sequence };
    if (pushes || resolve) && h.sequence == 0 {
        return Err(malformed("the push has no sequence number").expected("1 or more", 0));
    }
    if h.acknowledged > 0 && h.acknowledged >= h.sequence {
        return Err(malformed("the push acknowledges what is not answered")
            .expected(format!("acknowledged below {}, its sequence", h.sequence), h.acknowledged));
    }
    if let Some(expected) = h.crc32c {
        let got = crc32c(&frame.payload);
        if got != expected {
            return Err(malformed("the payload's checksum is wrong")
                .expected(format!("CRC-32C {expected:#010x}"), format!("{got:#010x}")));
        }
    }
    let slice = SliceId(h.slice);
    let verb = match kind {
        pb::Kind::Pull if many => {
            let how = (wants_average(h)?, wants_bfloat16(h)?);
            Verb::PullParts(parts::of_pull(h, &frame.payload, how)?)
        }
        pb::Kind::Pull => match h.vector.as_deref() {
            Some(vector) => Verb::PullVector(vector::read_from_header(vector)?),
            None => Verb::Pull { average: wants_average(h)?, bfloat16: wants_bfloat16(h)? },
        },
        pb::Kind::Vector => Verb::Run(vector::run_from_header(h, &frame.payload)?),
        pb::Kind::Portion => portion_from_frame(h, &frame.payload)?,
        pb::Kind::PullState => Verb::PullState,
        pb::Kind::PullVersion if versions => Verb::PullVersions(parts::of_versions(h)?),
        pb::Kind::PullVersion => Verb::PullVersion,
        pb::Kind::Resolve => Verb::Resolve(identity),
        _ => {
            let codec = codec_from_wire(h.codec)?;
            let base = match (h.base_version, h.base_own) {
                (Some(version), own) => Some(Base { version, own }),
                (None, None) => None,
                (None, Some(_)) => return Err(malformed("base_own without base_version")),
            };
            let action = match (kind, h.step) {
                (pb::Kind::Gradient, _) => Action::Gradient,
                (pb::Kind::Assign, _) => Action::Assign,
                (_, Some(step)) => Action::AssignState { step },
                (_, None) => return Err(malformed("KIND_ASSIGN_STATE without step")),
            };
            let push = Push {
                action,
                base,
                lr: h.lr,
                scale: h.scale,
                weight: h.weight,
                acknowledged: h.acknowledged,
                correction: h.correction.as_ref().map(correction_from_wire),
                note: &h.note,
                ..Push::gradient(slice, identity, h.count, codec, &frame.payload)
            };
            if many {
                let parts = parts::of_push(h, push)?;
                let verb = Verb::PushParts(parts, dtype_from_wire(h.dtype)?);
                let route = Route { group: h.group, epoch: h.epoch, client: h.client };
                return Ok(Request { tag: h.tag, route, slice, verb });
            }
            Verb::Push {
                push,
                dtype: dtype_from_wire(h.dtype)?,
                want_values: h.want_values,
                reservation: (h.reservation != 0).then_some(h.reservation),
            }
        }
    };
    let route = Route { group: h.group, epoch: h.epoch, client: h.client };
    Ok(Request { tag: h.tag, route, slice, verb })
}

/// Returns whether a pull asks for the average.
fn wants_average(h: &pb::Header) -> Result<bool> {
    match pb::View::try_from(h.view) {
        Ok(view) => Ok(view == pb::View::Average),
        Err(_) => Err(unknown("view", "0 or 1", h.view)),
    }
}

/// Returns whether a pull asks for bfloat16.
fn wants_bfloat16(h: &pb::Header) -> Result<bool> {
    match h.codec {
        0 => Ok(false),
        codec if codec == codec_to_wire(CodecId::BFloat16) => Ok(true),
        codec => Err(malformed("KIND_PULL has another codec than CODEC_BFLOAT16")
            .expected("CODEC_BFLOAT16, or the field unset", codec)),
    }
}

fn portion_from_frame<'a>(h: &pb::Header, body: &'a [u8]) -> Result<Verb<'a>> {
    let (of, dtype) = (vector::portion_from_header(h)?, dtype_from_wire(h.dtype)?);
    let (codec, plain) = (codec_from_wire(h.codec)?, CodecId::plain(dtype));
    if codec != plain {
        let error = Error::new(Kind::DType, "a portion has the plain codec of its tensor's dtype");
        return Err(error.expected(plain.name(), codec.name()));
    }
    Ok(Verb::Portion { of, dtype, count: h.count, body })
}

/// Bytes of a push's elements uncompressed, and of its indices.
pub fn plain_len(header: &pb::Header) -> u64 {
    let of_parts = || header.parts.iter().map(|part| part.count + u64::from(part.elements)).sum();
    let elements = if header.parts.is_empty() { header.count } else { of_parts() };
    dtype_from_wire(header.dtype).map_or(0, |dtype| dtype.computed().size() as u64 * elements)
}

fn completed(draft: &pb::Header, tag: u64, client: u64, sequence: u64, payload: Bytes) -> pb::Frame {
    let completion = Completion { tag, client, sequence, counts_own: true, ..Completion::default() };
    pb::Frame { header: Some(header::complete(draft, completion)), payload }
}

/// A whole frame with a gradient or assignment; `payload` is the push's body.
pub fn push_frame(
    tag: u64,
    Route { group, epoch, client }: Route,
    push: &Push<'_>,
    dtype: DType,
    want_values: bool,
    payload: Bytes,
) -> pb::Frame {
    let (kind, step) = match push.action {
        Action::Gradient => (pb::Kind::Gradient, None),
        Action::Assign => (pb::Kind::Assign, None),
        Action::AssignState { step } => (pb::Kind::AssignState, Some(step)),
    };
    let &Push { slice, count, base, codec, lr, scale, weight, correction, note, .. } = push;
    let settings = GradientSettings { dtype, codec, lr, scale, weight, correction, note };
    let gradient = header::gradient(Target { slice, group, epoch }, &settings, count, base, want_values);
    let draft = pb::Header { kind: kind.into(), step, ..gradient };
    completed(&draft, tag, client, push.identity.sequence, payload)
}

/// A whole frame that pulls the values, the state, or the version.
pub fn read_frame(tag: u64, Route { group, epoch, client }: Route, slice: SliceId, what: Read) -> pb::Frame {
    completed(&header::read(Target { slice, group, epoch }, what), tag, client, 0, Bytes::new())
}

/// A whole frame that asks for the outcome of a push.
pub fn resolve_frame(
    tag: u64,
    Route { group, epoch, client }: Route,
    slice: SliceId,
    sequence: u64,
) -> pb::Frame {
    completed(&header::resolve(Target { slice, group, epoch }), tag, client, sequence, Bytes::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use prost::Message;

    type SpoilFrame = fn(&mut pb::Header);

    const ROUTE: Route = Route { group: 1, epoch: 1, client: 9 };

    fn push(body: &[u8]) -> Push<'_> {
        Push {
            base: Some(Base { version: 0, own: Some(0) }),
            lr: Some(0.5),
            scale: Some(2.0),
            weight: Some(3.0),
            note: "batch 8131",
            ..Push::gradient(SliceId(5), Identity { client: 9, sequence: 3 }, 2, CodecId::Float32, body)
        }
    }

    fn good() -> pb::Frame {
        let body = Bytes::from_static(&[0; 8]);
        push_frame(77, ROUTE, &push(&body), DType::Float32, true, body.clone())
    }

    #[test]
    fn requests_survive_both_ways() {
        let frame = pb::Frame::decode(good().encode_to_vec().as_slice()).unwrap();
        let request = request_from_frame(&frame).unwrap();
        assert_eq!((request.tag, request.route, request.slice), (77, ROUTE, SliceId(5)));
        let mut acknowledges = frame.clone();
        acknowledges.header.as_mut().unwrap().acknowledged = 2;
        let verb = request_from_frame(&acknowledges).unwrap().verb;
        assert!(matches!(verb, Verb::Push { push, .. } if push.acknowledged == 2));
        let Verb::Push { push: got, want_values: true, reservation: None, .. } = request.verb else {
            panic!("{request:?}");
        };
        assert_eq!(format!("{got:?}"), format!("{:?}", push(&[0; 8])));
        for action in [Action::Assign, Action::AssignState { step: 0 }] {
            let push =
                Push { action, base: None, lr: None, scale: None, weight: None, note: "", ..push(&[0; 8]) };
            let frame = push_frame(1, ROUTE, &push, DType::Float32, false, Bytes::from_static(&[0; 8]));
            let request = request_from_frame(&frame).unwrap();
            assert!(matches!(request.verb, Verb::Push { push, .. } if push.action == action));
        }
        for what in [Read::Values, Read::Average, Read::State, Read::Version] {
            let frame = read_frame(1, ROUTE, SliceId(5), what);
            let read = match request_from_frame(&frame).unwrap().verb {
                Verb::Pull { average: false, bfloat16: false } => Read::Values,
                Verb::Pull { average: true, bfloat16: false } => Read::Average,
                Verb::PullState => Read::State,
                Verb::PullVersion => Read::Version,
                other => panic!("{other:?}"),
            };
            assert_eq!(read, what);
        }
        let frame = resolve_frame(1, ROUTE, SliceId(5), 8);
        let verb = request_from_frame(&frame).unwrap().verb;
        assert!(matches!(verb, Verb::Resolve(Identity { client: 9, sequence: 8 })));
    }

    #[test]
    fn an_assignment_of_rows_has_the_golden_bytes() {
        let hex = include_str!("../../../../tests/vectors/row_assignment.hex").trim();
        let byte = |k| u8::from_str_radix(&hex[k..k + 2], 16).unwrap();
        let golden: Vec<_> = (0..hex.len()).step_by(2).map(byte).collect();
        let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
        let rows = |rows: &[u32]| rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<_>>();
        let payload =
            [rows(&[1, 3]), bytes(&[1.0, -2.0, 0.5, 4.0]), rows(&[0]), bytes(&[8.0, -0.0])].concat();
        let parts =
            vec![pb::Part { slice: 7, count: 2, elements: 4 }, pb::Part { slice: 8, count: 1, elements: 2 }];
        let target = Target { slice: SliceId(0), group: 1, epoch: 1 };
        let draft = header::assignment_parts(target, DType::Float32, parts);
        let frame = completed(&draft, 5, 9, 3, payload.into());
        assert_eq!(frame.encode_to_vec(), golden);
        let Verb::PushParts(parts, DType::Float32) = request_from_frame(&frame).unwrap().verb else {
            panic!("it is not read as a push of parts");
        };
        let pushes: Vec<_> = parts.iter().enumerate().filter_map(|(k, part)| parts.push(k, part)).collect();
        assert!(pushes.iter().all(|push| push.action == Action::Assign && push.indices.is_some()));
        assert_eq!(pushes.iter().map(|push| push.count).collect::<Vec<_>>(), [4, 2]);
        let mut reserved = frame;
        reserved.header.as_mut().unwrap().reservation = 1;
        assert_eq!(request_from_frame(&reserved).unwrap_err().kind, Kind::Frame);
    }

    #[test]
    fn what_a_kind_does_not_use_must_be_unset() {
        let spoils: [(&str, SpoilFrame); 18] = [
            ("version", |h| h.version = Some(0)),
            ("own", |h| h.own = Some(0)),
            ("staleness", |h| h.staleness = Some(0)),
            ("duplicate", |h| h.duplicate = true),
            ("refusal", |h| h.refusal = Some(pb::Refusal::default())),
            ("reservation", |h| h.reservation = 1),
            ("have_version", |h| h.have_version = Some(0)),
            ("min_version", |h| h.min_version = Some(0)),
            ("lent", |h| h.lent = Some(pb::Lent::default())),
            ("parts", |h| h.parts = vec![pb::Part::default()]),
            ("view", |h| h.view = 1),
            ("step", |h| h.step = Some(0)),
            ("kind", |h| h.kind = 99),
            ("request", |h| h.kind = pb::Kind::Receipt.into()),
            ("reserved", |h| h.kind = pb::Kind::Delta.into()),
            ("codec", |h| h.codec = 99),
            ("acknowledges", |h| h.acknowledged = h.sequence),
            ("acknowledges", |h| h.acknowledged = u64::MAX),
        ];
        for (what, spoil) in spoils {
            let mut frame = good();
            spoil(frame.header.as_mut().unwrap());
            let error = request_from_frame(&frame).unwrap_err();
            assert_eq!(error.kind, Kind::Frame, "{what}");
            assert!(error.message.contains(what), "{what}: {error}");
        }
        let mut pull = read_frame(1, ROUTE, SliceId(5), Read::Values);
        pull.header.as_mut().unwrap().acknowledged = 1;
        assert!(request_from_frame(&pull).unwrap_err().message.contains("acknowledged"));
        pull.header.as_mut().unwrap().acknowledged = 0;
        pull.payload = Bytes::from_static(b"x");
        assert!(request_from_frame(&pull).is_err());
        let coded = |codec| {
            let mut pull = read_frame(1, ROUTE, SliceId(5), Read::Average);
            pull.header.as_mut().unwrap().codec = codec;
            pull
        };
        let rounded = coded(CodecId::BFloat16 as i32);
        let verb = request_from_frame(&rounded).unwrap().verb;
        assert!(matches!(verb, Verb::Pull { average: true, bfloat16: true }));
        for codec in [CodecId::Float32 as i32, CodecId::Int8 as i32, CodecId::Float64 as i32, 99, -1] {
            let error = request_from_frame(&coded(codec)).unwrap_err();
            assert!(error.message.contains("CODEC_BFLOAT16") && error.got == Some(codec.to_string()));
        }
        for kind in [pb::Kind::PullState, pb::Kind::PullVersion, pb::Kind::Resolve] {
            let mut frame = read_frame(1, ROUTE, SliceId(5), Read::Values);
            let header = frame.header.as_mut().unwrap();
            (header.kind, header.codec) = (kind.into(), CodecId::BFloat16 as i32);
            assert!(request_from_frame(&frame).unwrap_err().message.contains("codec"));
        }
        let mut view = read_frame(1, ROUTE, SliceId(5), Read::Average);
        view.header.as_mut().unwrap().view = 2;
        assert!(request_from_frame(&view).unwrap_err().message.contains("view"));
    }

    #[test]
    fn a_checksum_is_checked() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        let mut frame = good();
        frame.header.as_mut().unwrap().crc32c = Some(crc32c(&[0; 8]));
        assert!(request_from_frame(&frame).is_ok());
        frame.payload = Bytes::from_static(&[0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(request_from_frame(&frame).unwrap_err().kind, Kind::Frame);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100_000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(frame) = pb::Frame::decode(bytes.as_slice()) {
                let _ = request_from_frame(&frame);
                let _ = super::super::answer_from_frame(frame);
            }
        }

        #[test]
        fn a_damaged_frame_is_read_or_refused(at in 0_usize..200, value in any::<u8>(), cut in 0_usize..200) {
            let mut bytes = good().encode_to_vec();
            let n = bytes.len();
            bytes[at % n] = value;
            bytes.truncate(n - cut % n);
            if let Ok(frame) = pb::Frame::decode(bytes.as_slice()) {
                let _ = request_from_frame(&frame);
            }
        }
    }
}
