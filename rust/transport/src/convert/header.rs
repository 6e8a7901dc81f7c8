//! Headers of requests: drafted for a slice, and completed by [`complete`] when the frame is sent.

use super::fields::{Read, codec_to_wire, correction_to_wire, dtype_to_wire};
use fastps_core::codec::CodecId;
use fastps_core::correction::Correction;
use fastps_core::dtype::DType;
use fastps_core::frame::Base;
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;

/// Unknown value in a table of parts.
pub(super) const UNKNOWN: u64 = u64::MAX;

/// Destination of a frame, without its sender.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The slice; 0 for a message in parts, which name theirs.
    pub slice: SliceId,
    /// The tensor's group.
    pub group: u32,
    /// Epoch of the map that the client used.
    pub epoch: u64,
}

/// Settings shared by all gradients of one push to a tensor.
#[derive(Clone, Copy, Debug)]
pub struct GradientSettings<'a> {
    /// The tensor's element type.
    pub dtype: DType,
    /// Coding of the bodies.
    pub codec: CodecId,
    /// Learning rate instead of the optimizer's.
    pub lr: Option<f64>,
    /// Factor on the gradient.
    pub scale: Option<f32>,
    /// Weight in the mean that makes a version.
    pub weight: Option<f32>,
    /// Correction for staleness.
    pub correction: Option<Correction>,
    /// What the gradients came from; may be empty.
    pub note: &'a str,
}

/// Sender of a frame, and its number there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Completion {
    /// Repeated in the answer.
    pub tag: u64,
    /// The client's incarnation.
    pub client: u64,
    /// The number of the push; 0 for a read.
    pub sequence: u64,
    /// The number up to which all pushes of the client are answered.
    pub acknowledged: u64,
    /// Set if the base's own changes were counted for this incarnation.
    pub counts_own: bool,
    /// Checksum of the payload, if one is sent.
    pub crc32c: Option<u32>,
}

/// The header of a frame as sent: a draft completed with the sender's fields.
pub fn complete(draft: &pb::Header, completion: Completion) -> pb::Header {
    let Completion { tag, client, sequence, acknowledged, counts_own, crc32c } = completion;
    let mut header = pb::Header { tag, client, sequence, acknowledged, crc32c, ..draft.clone() };
    if !counts_own {
        header.base_own = None;
        header.table.iter_mut().for_each(|table| table.base_owns.clear());
    }
    header
}

pub(super) fn draft(kind: pb::Kind, target: Target) -> pb::Header {
    let Target { slice, group, epoch } = target;
    pb::Header { kind: kind.into(), slice: slice.0, group, epoch, ..Default::default() }
}

impl GradientSettings<'_> {
    fn draft(&self, target: Target) -> pb::Header {
        pb::Header {
            codec: codec_to_wire(self.codec),
            dtype: dtype_to_wire(self.dtype).into(),
            lr: self.lr,
            scale: self.scale,
            weight: self.weight,
            correction: self.correction.map(correction_to_wire),
            note: self.note.to_owned(),
            ..draft(pb::Kind::Gradient, target)
        }
    }
}

/// A gradient of `count` elements.
pub fn gradient(
    target: Target,
    settings: &GradientSettings<'_>,
    count: u64,
    base: Option<Base>,
    want_values: bool,
) -> pb::Header {
    pb::Header {
        count,
        base_version: base.map(|base| base.version),
        base_own: base.and_then(|base| base.own),
        want_values,
        ..settings.draft(target)
    }
}

/// Sparse gradients of one push, each with its base.
pub fn gradient_parts(
    target: Target,
    settings: &GradientSettings<'_>,
    parts: Vec<pb::Part>,
    bases: &[Option<Base>],
) -> pb::Header {
    let table = bases.iter().any(Option::is_some).then(|| {
        let known = |value: Option<u64>| value.unwrap_or(UNKNOWN);
        Box::new(pb::PartTable {
            base_versions: bases.iter().map(|base| known(base.map(|base| base.version))).collect(),
            base_owns: bases.iter().map(|base| known(base.and_then(|base| base.own))).collect(),
            ..Default::default()
        })
    });
    pb::Header { parts, table, ..settings.draft(target) }
}

/// Gradients of whole slices, each with its base.
pub fn whole_gradients(
    target: Target,
    settings: &GradientSettings,
    parts: Vec<pb::Part>,
    bases: &[Option<Base>],
    want_values: bool,
) -> pb::Header {
    let mut header = gradient_parts(target, settings, parts, bases);
    header.table.get_or_insert_default().whole = true;
    header.want_values = want_values;
    header
}

/// A pull of whole slices: of the values, or of their average.
pub fn whole_pulls(target: Target, what: Read, parts: Vec<pb::Part>) -> pb::Header {
    let table = Some(Box::new(pb::PartTable { whole: true, ..Default::default() }));
    pb::Header { parts, table, ..read(target, what) }
}

/// The header of each part of a message of whole slices, as of a frame of its own.
pub fn separate(header: &pb::Header) -> impl Iterator<Item = pb::Header> + '_ {
    let (pushes, table) = (header.kind() != pb::Kind::Pull, header.table.as_deref());
    let shared = pb::Header { parts: Vec::new(), table: None, ..header.clone() };
    header.parts.iter().enumerate().map(move |(k, part)| {
        let known = |list: &[u64]| list.get(k).copied().filter(|value| *value != UNKNOWN);
        pb::Header {
            slice: part.slice,
            count: if pushes { u64::from(part.elements) } else { 0 },
            base_version: table.and_then(|table| known(&table.base_versions)),
            base_own: table.and_then(|table| known(&table.base_owns)),
            reservation: table.and_then(|table| table.reservations.get(k).copied()).unwrap_or(0),
            ..shared.clone()
        }
    })
}

/// An assignment of `count` elements, uncompressed. `step`: the step count, for the optimizer's state.
/// `reservation`: the registration that initial values belong to; 0 for none.
pub fn assignment(
    target: Target,
    dtype: DType,
    count: u64,
    step: Option<u64>,
    reservation: u64,
) -> pb::Header {
    let (kind, of) = match step {
        Some(_) => (pb::Kind::AssignState, dtype.computed()),
        None => (pb::Kind::Assign, dtype),
    };
    pb::Header {
        count,
        codec: codec_to_wire(CodecId::plain(of)),
        dtype: dtype_to_wire(dtype).into(),
        step,
        reservation,
        ..draft(kind, target)
    }
}

/// Assignments of rows.
pub fn assignment_parts(target: Target, dtype: DType, parts: Vec<pb::Part>) -> pb::Header {
    pb::Header { parts, ..assignment(target, dtype, 0, None, 0) }
}

/// Assignments of whole slices.
pub fn whole_assignments(target: Target, dtype: DType, parts: Vec<pb::Part>) -> pb::Header {
    let table = Some(Box::new(pb::PartTable { whole: true, ..Default::default() }));
    pb::Header { table, ..assignment_parts(target, dtype, parts) }
}

/// A pull of the values, of their average, of the state, or of the version.
pub fn read(target: Target, what: Read) -> pb::Header {
    let kind = match what {
        Read::Values | Read::Average => pb::Kind::Pull,
        Read::State => pb::Kind::PullState,
        Read::Version => pb::Kind::PullVersion,
    };
    let view = if what == Read::Average { pb::View::Average } else { pb::View::Unspecified };
    pb::Header { view: view.into(), ..draft(kind, target) }
}

/// A pull in bfloat16, rounded to nearest even.
pub fn in_bfloat16(pull: pb::Header) -> pb::Header {
    pb::Header { codec: codec_to_wire(CodecId::BFloat16), ..pull }
}

/// A question about the versions of several slices.
pub fn versions(target: Target, slices: impl Iterator<Item = u64>) -> pb::Header {
    let parts = slices.map(|slice| pb::Part { slice, ..Default::default() }).collect();
    pb::Header { parts, ..draft(pb::Kind::PullVersion, target) }
}

/// A pull of rows.
pub fn pull_parts(target: Target, parts: Vec<pb::Part>) -> pb::Header {
    pb::Header { parts, ..draft(pb::Kind::Pull, target) }
}

/// A question about the outcome of a push.
pub fn resolve(target: Target) -> pb::Header {
    draft(pb::Kind::Resolve, target)
}
