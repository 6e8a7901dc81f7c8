//! Frames for vectors: programs and their results, pulls of a vector, and portions of a sum.

use super::fields::{codec_to_wire, dtype_to_wire, malformed};
use super::header::{Target, draft};
use super::parts::{MAX_PARTS, refusals};
use bytes::{Buf, Bytes};
use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::Applied;
use fastps_core::program::{Command, MAX_OPS, Op, OpParts, Program};
use fastps_core::tensor::{SliceId, SpaceId};
use fastps_proto::v1 as pb;
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};

/// Most bytes of results in one answer. With the refusals of the most parts possible, it fits 1 MiB.
pub const MAX_SCALAR_BYTES: usize = 512 << 10;
/// Most bytes of one operation: a linear combination of all vectors takes less.
const MAX_OP_BYTES: usize = 2 << 10;

/// A program for some slices, not yet decoded.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// The space, the coordinator's term and the program's number.
    pub command: Command,
    parts: &'a [pb::Part],
    program: &'a [u8],
}

/// A pull of one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorRead {
    /// The space.
    pub space: SpaceId,
    /// The vector; 0: the tensor itself.
    pub index: u32,
    /// The batch whose sum must be open.
    pub batch: Option<u64>,
}

/// The sum that a portion belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortionOf {
    /// The space.
    pub space: SpaceId,
    /// The batch.
    pub batch: u64,
    /// The portion.
    pub portion: u32,
}

impl<'a> Run<'a> {
    /// The number of slices that it is for.
    #[allow(clippy::len_without_is_empty, reason = "it is for one slice at least")]
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// The slices, in order.
    pub fn slices(self) -> impl Iterator<Item = SliceId> + 'a {
        self.parts.iter().map(|part| SliceId(part.slice))
    }

    /// The program; fails if it is malformed, or if its results do not fit one answer.
    pub fn program(&self) -> Result<Program> {
        let program = program_from_wire(self.program)?;
        let bytes = program.results() * size_of::<f64>() * self.parts.len();
        if bytes > MAX_SCALAR_BYTES {
            let error = malformed("a program has too many results for its slices");
            return Err(error.expected(format!("at most {MAX_SCALAR_BYTES} bytes of results"), bytes));
        }
        Ok(program)
    }
}

pub(super) fn run_from_header<'a>(h: &'a pb::Header, payload: &'a [u8]) -> Result<Run<'a>> {
    let missing = |what: &str| malformed(format!("KIND_VECTOR without {what}"));
    let vector = h.vector.as_deref().ok_or_else(|| missing("vector"))?;
    let parts = &h.parts[..];
    if parts.is_empty() {
        return Err(missing("parts"));
    }
    if parts.len() > MAX_PARTS {
        return Err(malformed("too many parts").expected(format!("at most {MAX_PARTS}"), parts.len()));
    }
    if parts.iter().any(|part| part.count != 0 || part.elements != 0) {
        let error = malformed("a part of KIND_VECTOR uses neither count nor elements");
        return Err(error.expected("the fields unset", "a value"));
    }
    if vector.index.is_some() || vector.batch != 0 {
        let error = malformed("KIND_VECTOR uses neither vector.index nor vector.batch");
        return Err(error.expected("the fields unset", "a value"));
    }
    if vector.number == 0 {
        return Err(malformed("the program has no number").expected("1 or more", 0));
    }
    let command = Command { space: SpaceId(vector.space), term: vector.term, number: vector.number };
    Ok(Run { command, parts, program: payload })
}

pub(super) fn read_from_header(vector: &pb::VectorHead) -> Result<VectorRead> {
    let pb::VectorHead { space, term, number, index, batch } = *vector;
    if term != 0 || number != 0 {
        let error = malformed("KIND_PULL uses neither vector.term nor vector.number");
        return Err(error.expected("the fields unset", "a value"));
    }
    let index = index.ok_or_else(|| malformed("a pull of a vector without vector.index"))?;
    Ok(VectorRead { space: SpaceId(space), index, batch: (batch != 0).then_some(batch) })
}

pub(super) fn portion_from_header(h: &pb::Header) -> Result<PortionOf> {
    let head = h.portion.as_deref().ok_or_else(|| malformed("KIND_PORTION without portion"))?;
    let pb::PortionHead { space, batch, portion } = *head;
    Ok(PortionOf { space: SpaceId(space), batch, portion })
}

/// Reads operations one by one: no memory is taken for operations that a program may not have.
fn program_from_wire(mut bytes: &[u8]) -> Result<Program> {
    let cut = |_| malformed("the payload is no program");
    let mut ops = Vec::new();
    while bytes.has_remaining() {
        let (tag, wire) = decode_key(&mut bytes).map_err(cut)?;
        if (tag, wire) != (1, WireType::LengthDelimited) {
            return Err(malformed("the payload is no program").expected("operations", format!("field {tag}")));
        }
        let length = decode_varint(&mut bytes).map_err(cut)?;
        if ops.len() == MAX_OPS || length > MAX_OP_BYTES as u64 {
            let error = Error::new(Kind::Config, "a program has too many operations, or too long ones");
            return Err(error.expected(
                format!("at most {MAX_OPS} of at most {MAX_OP_BYTES} bytes"),
                format!("operation {} of {length} bytes", ops.len()),
            ));
        }
        let op = bytes.split_off(..length as usize).ok_or_else(|| malformed("a program is cut short"))?;
        let pb::Op { code, to, from, by, batch } =
            pb::Op::decode(op).map_err(|_| malformed("the payload is no program"))?;
        let code = u32::try_from(code).unwrap_or(0);
        ops.push(Op::from_parts(OpParts { code, to, from, by, batch })?);
    }
    Program::new(ops)
}

/// A program in wire form.
pub fn program_to_wire(program: &Program) -> Bytes {
    let op = |op: &Op| {
        let OpParts { code, to, from, by, batch } = op.to_parts();
        pb::Op { code: code as i32, to, from, by, batch }
    };
    pb::Program { ops: program.ops().iter().map(op).collect() }.encode_to_vec().into()
}

/// The header of a program for these slices.
pub fn run_header(target: Target, command: Command, slices: &[SliceId]) -> pb::Header {
    let Command { space, term, number } = command;
    let part = |slice: &SliceId| pb::Part { slice: slice.0, ..Default::default() };
    pb::Header {
        parts: slices.iter().map(part).collect(),
        vector: Some(Box::new(pb::VectorHead { space: space.0, term, number, ..Default::default() })),
        ..draft(pb::Kind::Vector, target)
    }
}

/// The header of a pull of a vector.
pub fn vector_read_header(target: Target, read: VectorRead) -> pb::Header {
    let VectorRead { space, index, batch } = read;
    let vector = pb::VectorHead {
        space: space.0,
        index: Some(index),
        batch: batch.unwrap_or(0),
        ..Default::default()
    };
    pb::Header { vector: Some(Box::new(vector)), ..draft(pb::Kind::Pull, target) }
}

/// The header of a portion of `count` elements.
pub fn portion_header(target: Target, of: PortionOf, dtype: DType, count: u64) -> pb::Header {
    let PortionOf { space, batch, portion } = of;
    pb::Header {
        count,
        codec: codec_to_wire(CodecId::plain(dtype)),
        dtype: dtype_to_wire(dtype).into(),
        portion: Some(Box::new(pb::PortionHead { space: space.0, batch, portion })),
        ..draft(pb::Kind::Portion, target)
    }
}

/// The answer to a program: the results of the parts that were not refused, part by part.
pub fn scalars(tag: u64, outcomes: &[Result<Vec<f64>>]) -> pb::Frame {
    let results = outcomes.iter().flatten().flatten();
    let payload: Vec<u8> = results.flat_map(|result| result.to_le_bytes()).collect();
    let refusals = refusals(outcomes);
    let table = pb::PartTable { refusals, ..Default::default() };
    let header = pb::Header {
        kind: pb::Kind::Scalars.into(),
        tag,
        table: (!table.refusals.is_empty()).then(|| Box::new(table)),
        ..Default::default()
    };
    pb::Frame { header: Some(header), payload: payload.into() }
}

/// The answer to a portion, which changes no version.
pub fn portion_receipt(tag: u64, is_new: bool) -> pb::Frame {
    super::receipt(
        tag,
        &Applied { version: 0, own: 0, staleness: None, scale: 1.0, momentum: None, duplicate: !is_new },
    )
}

/// The parts of a program that were refused, as a client reads them.
pub(super) fn refused_parts(table: Option<pb::PartTable>) -> Result<Vec<(usize, Error)>> {
    let refused = |pb::PartRefusal { part, refusal }| {
        let refusal = refusal.ok_or_else(|| malformed("a refusal of a part says nothing"))?;
        Ok((part as usize, super::error_from_refusal(*refusal)))
    };
    table.map_or_else(Vec::new, |table| table.refusals).into_iter().map(refused).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Answer, Verb, answer_from_frame, request_from_frame};
    use super::*;

    const TARGET: Target = Target { slice: SliceId(0), group: 1, epoch: 1 };
    const COMMAND: Command = Command { space: SpaceId(7), term: 2, number: 3 };

    fn golden(name: &str) -> Vec<u8> {
        let all = include_str!("../../../../tests/vectors/vectors.hex");
        let line = all.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap();
        let byte = |k| u8::from_str_radix(&line[k..k + 2], 16).unwrap();
        (0..line.len()).step_by(2).map(byte).collect()
    }

    fn framed(header: pb::Header, payload: Bytes) -> pb::Frame {
        pb::Frame { header: Some(pb::Header { tag: 5, client: 9, ..header }), payload }
    }

    fn program() -> Program {
        Program::new(vec![
            Op::Axpy { to: 1, by: -0.5, x: 2 },
            Op::EndSum { to: 2 },
            Op::Block { rows: vec![0], columns: vec![1, 2] },
            Op::BeginSum { batch: 4, portions: 64, largest: 1.5, coarser: 1 },
        ])
        .unwrap()
    }

    fn run() -> pb::Frame {
        let header = run_header(TARGET, COMMAND, &[SliceId(11), SliceId(12)]);
        framed(header, program_to_wire(&program()))
    }

    #[test]
    fn frames_have_the_golden_bytes() {
        let refused = Error::new(Kind::StalePush, "late").shard(0);
        let target = Target { slice: SliceId(11), ..TARGET };
        let read = VectorRead { space: SpaceId(7), index: 2, batch: Some(4) };
        let portion = PortionOf { space: SpaceId(7), batch: 4, portion: 3 };
        let values: Bytes = [1.0_f32, -2.0].map(f32::to_le_bytes).concat().into();
        for (name, frame) in [
            ("program", run()),
            ("scalars", scalars(5, &[Ok(vec![1.5, -2.0]), Err(refused)])),
            ("pull", framed(vector_read_header(target, read), Bytes::new())),
            ("portion", framed(portion_header(target, portion, DType::Float32, 2), values)),
            ("receipt", portion_receipt(5, false)),
        ] {
            assert_eq!(frame.encode_to_vec(), golden(name), "{name}");
        }
    }

    #[test]
    fn requests_and_answers_survive_both_ways() {
        let frame = run();
        let Verb::Run(got) = request_from_frame(&frame).unwrap().verb else { panic!("no program") };
        assert_eq!((got.command, got.len(), got.program().unwrap()), (COMMAND, 2, program()));
        assert_eq!(got.slices().collect::<Vec<_>>(), [SliceId(11), SliceId(12)]);
        let read = VectorRead { space: SpaceId(7), index: 0, batch: None };
        let frame = framed(vector_read_header(TARGET, read), Bytes::new());
        assert!(matches!(request_from_frame(&frame).unwrap().verb, Verb::PullVector(got) if got == read));
        let portion = PortionOf { space: SpaceId(7), batch: 4, portion: 3 };
        let frame = framed(portion_header(TARGET, portion, DType::Float64, 1), Bytes::from_static(&[0; 8]));
        let verb = request_from_frame(&frame).unwrap().verb;
        let Verb::Portion { of, dtype: DType::Float64, count: 1, body } = verb else { panic!("{verb:?}") };
        assert_eq!((of, body.len()), (portion, 8));
        let refused = Error::new(Kind::StalePush, "late").shard(0);
        let outcomes = [Ok(vec![1.5]), Err(refused.clone()), Ok(vec![2.5])];
        let payload = [1.5_f64, 2.5].map(f64::to_le_bytes).concat().into();
        let answer = Answer::Scalars { refusals: vec![(1, refused)], payload };
        assert_eq!(answer_from_frame(scalars(5, &outcomes)).unwrap(), (5, answer));
    }

    fn vector(frame: &mut pb::Frame) -> &mut pb::VectorHead {
        frame.header.as_mut().unwrap().vector.as_mut().unwrap()
    }

    #[test]
    fn what_no_program_is_takes_no_memory() {
        let spoiled = |spoil: fn(&mut pb::Frame)| {
            let mut frame = run();
            spoil(&mut frame);
            let request = request_from_frame(&frame)?;
            let Verb::Run(run) = request.verb else { panic!("no program") };
            run.program()
        };
        for spoil in [
            (|f| f.payload = Bytes::from_static(&[0xFF; 40])) as fn(&mut pb::Frame),
            |f| f.payload = Bytes::from_static(&[0x0A, 100, 1]),
            |f| f.payload = Bytes::from_static(&[0x12, 0]),
            |f| f.payload = Bytes::from_static(&[0x0A, 0]),
            |f| f.payload = f.payload.slice(..f.payload.len() - 1),
            |f| f.header.as_mut().unwrap().parts.clear(),
            |f| f.header.as_mut().unwrap().parts[0].count = 1,
            |f| f.header.as_mut().unwrap().parts[0].elements = 1,
            |f| f.header.as_mut().unwrap().parts = vec![pb::Part::default(); MAX_PARTS + 1],
            |f| f.header.as_mut().unwrap().vector = None,
            |f| f.header.as_mut().unwrap().slice = 1,
            |f| f.header.as_mut().unwrap().sequence = 1,
            |f| vector(f).index = Some(0),
            |f| vector(f).batch = 1,
            |f| vector(f).number = 0,
        ] {
            assert_eq!(spoiled(spoil).unwrap_err().kind, Kind::Frame);
        }
        // 5,000 empty operations in 10,000 bytes, and an operation that claims more than the payload has.
        for bytes in [[0x0A, 0].repeat(5_000), vec![0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0x07]] {
            let frame = pb::Frame { payload: bytes.into(), ..run() };
            let Verb::Run(run) = request_from_frame(&frame).unwrap().verb else { panic!("no program") };
            assert!(run.program().is_err());
        }
        let many = Program::new(vec![Op::Block { rows: vec![0; 64], columns: vec![0; 64] }]).unwrap();
        let slices: Vec<_> = (0..17).map(SliceId).collect();
        for (count, fits) in [(16, true), (17, false)] {
            let frame = framed(run_header(TARGET, COMMAND, &slices[..count]), program_to_wire(&many));
            let Verb::Run(run) = request_from_frame(&frame).unwrap().verb else { panic!("no program") };
            assert_eq!(run.program().is_ok(), fits);
        }
    }

    #[test]
    fn the_largest_answer_fits_a_message() {
        let long = || Error::new(Kind::Capacity, "x".repeat(2000)).tensor("y".repeat(2000)).shard(3);
        let mut outcomes: Vec<_> = (0..MAX_PARTS).map(|_| Err(long())).collect();
        assert!(scalars(7, &outcomes).encoded_len() < 1 << 20);
        outcomes[..2048].fill(Ok(vec![1.0; 16]));
        assert!(scalars(7, &outcomes).encoded_len() < 1 << 20);
        outcomes.fill(Ok(vec![1.0; 16]));
        assert!(scalars(7, &outcomes).encoded_len() < 1 << 20);
    }
}
