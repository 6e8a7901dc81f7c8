//! Answers: built for a server, read for a client.

use super::fields::{codec_to_wire, dtype_to_wire, malformed};
use bytes::Bytes;
use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Result};
use fastps_core::frame::Applied;
use fastps_core::slice::Snapshot;
use fastps_proto::v1 as pb;

fn answer(kind: pb::Kind, tag: u64) -> pb::Header {
    pb::Header { kind: kind.into(), tag, ..Default::default() }
}

fn applied_header(kind: pb::Kind, tag: u64, applied: &Applied) -> pb::Header {
    pb::Header {
        version: Some(applied.version),
        own: Some(applied.own),
        staleness: applied.staleness,
        scale: Some(applied.scale),
        momentum: applied.momentum,
        duplicate: applied.duplicate,
        ..answer(kind, tag)
    }
}

/// The answer to a push that was applied.
pub fn receipt(tag: u64, applied: &Applied) -> pb::Frame {
    pb::Frame { header: Some(applied_header(pb::Kind::Receipt, tag, applied)), payload: Bytes::new() }
}

/// Values or state in this coding, of fixed width, with the slice's version, own changes and step; with its
/// receipt after a push that wanted them.
pub fn values(
    tag: u64,
    (dtype, codec): (DType, CodecId),
    (version, own, step): (u64, u64, u64),
    applied: Option<&Applied>,
    payload: Bytes,
) -> pb::Frame {
    let header = pb::Header {
        count: (payload.len() / codec.body_len(1)) as u64,
        codec: codec_to_wire(codec),
        dtype: dtype_to_wire(dtype).into(),
        version: Some(version),
        own: Some(own),
        step: Some(step),
        ..applied.map_or_else(
            || answer(pb::Kind::Values, tag),
            |applied| applied_header(pb::Kind::Values, tag, applied),
        )
    };
    pb::Frame { header: Some(header), payload }
}

/// Values from a snapshot, which lives, with everything that it keeps, until the payload is sent or copied.
pub fn snapshot(
    tag: u64,
    applied: Option<&Applied>,
    snapshot: Snapshot,
    keep: impl Send + 'static,
) -> pb::Frame {
    let (coding, state) = described(&snapshot);
    values(tag, coding, state, applied, keeping(snapshot, keep))
}

/// Type and coding of the values; version, own changes and step.
fn described(snapshot: &Snapshot) -> ((DType, CodecId), (u64, u64, u64)) {
    let Snapshot { dtype, codec, version, own, step, .. } = *snapshot;
    ((dtype, codec), (version, own, step))
}

/// Values without a payload, for a client that reads them in the server's memory.
pub fn lent(tag: u64, applied: Option<&Applied>, snapshot: &Snapshot, lent: pb::Lent) -> pb::Frame {
    let (coding, state) = described(snapshot);
    let mut frame = values(tag, coding, state, applied, Bytes::new());
    if let Some(header) = &mut frame.header {
        header.count = snapshot.elements() as u64;
        header.lent = Some(lent);
    }
    frame
}

/// Bytes, and an object that lives as long as they do.
pub fn keeping(bytes: impl AsRef<[u8]> + Send + 'static, keep: impl Send + 'static) -> Bytes {
    struct Kept<B, T>(B, #[allow(dead_code, reason = "it is dropped")] T);
    impl<B: AsRef<[u8]>, T> AsRef<[u8]> for Kept<B, T> {
        fn as_ref(&self) -> &[u8] {
            self.0.as_ref()
        }
    }
    Bytes::from_owner(Kept(bytes, keep))
}

/// The version of a slice, and the number of its changes that are the asker's.
pub fn version(tag: u64, (version, own): (u64, u64)) -> pb::Frame {
    let header = pb::Header { version: Some(version), own: Some(own), ..answer(pb::Kind::Version, tag) };
    pb::Frame { header: Some(header), payload: Bytes::new() }
}

/// The answer to a frame that changed nothing.
pub fn refused(tag: u64, error: &Error) -> pb::Frame {
    let header = pb::Header { refusal: Some(super::refusal(error)), ..answer(pb::Kind::Refused, tag) };
    pb::Frame { header: Some(header), payload: Bytes::new() }
}

/// The answer to a resolve: not applied, and never will be.
pub fn fenced(tag: u64) -> pb::Frame {
    pb::Frame { header: Some(answer(pb::Kind::Fenced, tag)), payload: Bytes::new() }
}

/// A server's answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The push was applied.
    Receipt(Applied),
    /// Values or state.
    Values {
        /// The slice's version.
        version: u64,
        /// Number of its changes that are the asker's.
        own: u64,
        /// Optimizer steps.
        step: u64,
        /// The receipt of the push that wanted them; its version and own are those of the values.
        applied: Option<Applied>,
        /// Little-endian values of the tensor's type.
        payload: Bytes,
    },
    /// Answer to a sparse message.
    Parts {
        /// Outcome of each part; of a pull, only `version` and `own` are meaningful.
        outcomes: Vec<Result<Applied>>,
        /// For a pull, the values of the parts that were not refused.
        payload: Bytes,
    },
    /// Answer to a program.
    Scalars {
        /// The refused parts, counted from 0, and their errors.
        refusals: Vec<(usize, Error)>,
        /// The results of the other parts.
        payload: Bytes,
    },
    /// Only the version.
    Version {
        /// The slice's version.
        version: u64,
        /// Number of its changes that are the asker's.
        own: u64,
    },
    /// Nothing was changed.
    Refused(Error),
    /// It was not applied and never will be.
    Fenced,
}

/// Reads an answer and the tag of its request.
pub fn answer_from_frame(frame: pb::Frame) -> Result<(u64, Answer)> {
    let h = frame.header.ok_or_else(|| malformed("the answer has no header"))?;
    let missing = |field: &str| malformed(format!("the answer has no {field}"));
    let applied = |scale| -> Result<Applied> {
        Ok(Applied {
            version: h.version.ok_or_else(|| missing("version"))?,
            own: h.own.ok_or_else(|| missing("own"))?,
            staleness: h.staleness,
            scale,
            momentum: h.momentum,
            duplicate: h.duplicate,
        })
    };
    let kind = pb::Kind::try_from(h.kind);
    if kind == Ok(pb::Kind::Scalars) {
        let refusals = super::vector::refused_parts(h.table.map(|table| *table))?;
        return Ok((h.tag, Answer::Scalars { refusals, payload: frame.payload }));
    }
    if let (Ok(pb::Kind::Receipt | pb::Kind::Values | pb::Kind::Version), Some(table)) = (kind, h.table) {
        let outcomes = super::parts::outcomes(*table, h.scale.unwrap_or(1.0))?;
        return Ok((h.tag, Answer::Parts { outcomes, payload: frame.payload }));
    }
    let answer = match kind {
        Ok(pb::Kind::Receipt) => Answer::Receipt(applied(h.scale.ok_or_else(|| missing("scale"))?)?),
        Ok(pb::Kind::Values) => Answer::Values {
            version: h.version.ok_or_else(|| missing("version"))?,
            own: h.own.ok_or_else(|| missing("own"))?,
            step: h.step.ok_or_else(|| missing("step"))?,
            applied: h.scale.map(applied).transpose()?,
            payload: frame.payload,
        },
        Ok(pb::Kind::Version) => Answer::Version {
            version: h.version.ok_or_else(|| missing("version"))?,
            own: h.own.ok_or_else(|| missing("own"))?,
        },
        Ok(pb::Kind::Refused) => {
            Answer::Refused(super::error_from_refusal(h.refusal.ok_or_else(|| missing("refusal"))?))
        }
        Ok(pb::Kind::Fenced) => Answer::Fenced,
        _ => return Err(malformed("this frame is not an answer").expected("an answer", h.kind)),
    };
    Ok((h.tag, answer))
}

#[cfg(test)]
mod tests {
    use super::super::{Route, resolve_frame};
    use super::*;
    use fastps_core::error::Kind;
    use fastps_core::tensor::SliceId;
    use fastps_core::verbs::SliceVersion;
    use prost::Message;

    const ROUTE: Route = Route { group: 1, epoch: 1, client: 9 };

    #[test]
    fn answers_survive_both_ways() {
        let applied = Applied {
            version: 4,
            own: 0,
            staleness: Some(0),
            scale: 0.5,
            momentum: Some(0.9),
            duplicate: true,
        };
        let payload = Bytes::from_static(&[1; 8]);
        let error = Error::new(Kind::Shape, "no").shard(0);
        for (frame, expected) in [
            (receipt(6, &applied), Answer::Receipt(applied)),
            (
                values(6, (DType::Float32, CodecId::Float32), (4, 0, 2), None, payload.clone()),
                Answer::Values { version: 4, own: 0, step: 2, applied: None, payload: payload.clone() },
            ),
            (
                values(6, (DType::Float32, CodecId::Float32), (4, 0, 2), Some(&applied), payload.clone()),
                Answer::Values { version: 4, own: 0, step: 2, applied: Some(applied), payload },
            ),
            (version(6, (4, 1)), Answer::Version { version: 4, own: 1 }),
            (refused(6, &error), Answer::Refused(error.clone())),
            (fenced(6), Answer::Fenced),
        ] {
            let frame = pb::Frame::decode(frame.encode_to_vec().as_slice()).unwrap();
            assert_eq!(answer_from_frame(frame).unwrap(), (6, expected));
        }
        let known = [Ok(SliceVersion { slice: SliceId(5), version: 4, own: 1 }), Err(error)];
        let (tag, answer) = answer_from_frame(super::super::versions(6, &known)).unwrap();
        let Answer::Parts { outcomes, .. } = answer else { panic!("{answer:?}") };
        assert!(tag == 6 && outcomes[0].as_ref().is_ok_and(|at| (at.version, at.own) == (4, 1)));
        assert!(outcomes.len() == 2 && outcomes[1].as_ref().is_err_and(|error| error.kind == Kind::Shape));
        assert!(answer_from_frame(resolve_frame(6, ROUTE, SliceId(5), 1)).is_err());
        assert!(answer_from_frame(pb::Frame::default()).is_err());
    }
}
