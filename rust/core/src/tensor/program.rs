//! A program: operations on the vectors of a space, which a slice runs whole or not at all.
//!
//! Vectors are named by their index: 0 is the tensor itself, 1 the space's first vector. Linear combinations
//! and products are computed in float64 and rounded once.

use super::space::{MAX_VECTORS, SpaceId};
use crate::base::error::{Error, Kind, Result};
use crate::base::fault::fault;
use crate::kernel::grid;

/// Index of the tensor itself among the vectors of a space.
pub const TENSOR: u32 = 0;
/// Most operations of a program.
pub const MAX_OPS: usize = 256;
/// Most results of a program.
pub const MAX_RESULTS: usize = 4096;
/// Most vectors that the operations of a program read or write, counted with repeats: a block reads one for
/// each of its results. Together with the length of a slice this bounds how long a program holds it.
pub const MAX_INPUTS: usize = MAX_RESULTS + MAX_OPS;
/// Most portions of a sum.
pub const MAX_PORTIONS: u32 = grid::MAX_TERMS;
/// Largest count that an image of a slice may have. A count that starts at what a push may claim
/// ([`MAX_STEP`](crate::slice::frame::MAX_STEP)) never reaches it, and a count that starts at this maximum
/// never overflows. Terms, programs and batches are numbered by their senders, who may not exceed it.
pub(crate) const MAX_COUNT: u64 = 1 << 62;
/// Most steps by which a sum's grid is coarser: with this many, every float fits.
const MAX_COARSER: u32 = 128;

/// One operation. `to`, `x` and the like are indices of vectors.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `to <- from`
    Copy {
        /// The target.
        to: u32,
        /// The source.
        from: u32,
    },
    /// `to <- 0`
    Zero {
        /// The target.
        to: u32,
    },
    /// `to <- by to`
    Scale {
        /// The target.
        to: u32,
        /// The factor.
        by: f64,
    },
    /// `to <- to + by x`
    Axpy {
        /// The target.
        to: u32,
        /// The factor.
        by: f64,
        /// The vector to add.
        x: u32,
    },
    /// `to <- by_0 x_0 + by_1 x_1 + ...`, in this order; the target may be among the sources.
    Combine {
        /// The target.
        to: u32,
        /// Factors and sources.
        terms: Vec<(f64, u32)>,
    },
    /// `to <- x y`, by element
    Multiply {
        /// The target.
        to: u32,
        /// One factor.
        x: u32,
        /// The other one.
        y: u32,
    },
    /// The inner product of two vectors: one result.
    Dot {
        /// One vector.
        x: u32,
        /// The other one.
        y: u32,
    },
    /// The largest magnitude among the elements: one result, NaN if an element is.
    MaxAbs {
        /// The vector.
        x: u32,
    },
    /// The inner products of all rows with all columns, computed in one pass: their results, row by row.
    Block {
        /// The vectors of the rows.
        rows: Vec<u32>,
        /// The vectors of the columns.
        columns: Vec<u32>,
    },
    /// Begins the sum of a batch's portions at 0; a sum that is open ends without a result.
    BeginSum {
        /// Number of the batch; those of a space increase.
        batch: u64,
        /// The sum is of portions 0 to this.
        portions: u32,
        /// The largest magnitude that a slice expects which has not seen one itself; 0: such a slice takes
        /// its magnitude from portion 0, and the sum must be of that portion only.
        largest: f64,
        /// By how many steps of 2^20 the grid reaches further than the last commit's portions say.
        coarser: u32,
    },
    /// `to <-` the sum of the open batch, which must have all its portions; ends the sum.
    EndSum {
        /// The target.
        to: u32,
    },
}

/// An operation as messages and logs carry it: protobuf's `Op`. Fields that the operation does not use are
/// empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpParts {
    /// Which operation: its place in the list of [`Op`], from 1.
    pub code: u32,
    /// The target; of a block, the number of rows.
    pub to: u32,
    /// The sources; of a block, rows and then columns; of the begin of a sum, the number of portions and the
    /// steps by which its grid is coarser.
    pub from: Vec<u32>,
    /// The factors; of the begin of a sum, the largest magnitude.
    pub by: Vec<f64>,
    /// Number of the batch, of the begin of a sum.
    pub batch: u64,
}

impl Op {
    /// The operation in parts.
    pub fn to_parts(&self) -> OpParts {
        let parts = |code, to: u32, from: &[u32], by: &[f64]| {
            let (from, by) = (from.to_vec(), by.to_vec());
            OpParts { code, to, from, by, batch: 0 }
        };
        match self {
            Self::Copy { to, from } => parts(1, *to, &[*from], &[]),
            Self::Zero { to } => parts(2, *to, &[], &[]),
            Self::Scale { to, by } => parts(3, *to, &[], &[*by]),
            Self::Axpy { to, by, x } => parts(4, *to, &[*x], &[*by]),
            Self::Combine { to, terms } => {
                let (by, from): (Vec<_>, Vec<_>) = terms.iter().copied().unzip();
                OpParts { code: 5, to: *to, from, by, batch: 0 }
            }
            Self::Multiply { to, x, y } => parts(6, *to, &[*x, *y], &[]),
            Self::Dot { x, y } => parts(7, 0, &[*x, *y], &[]),
            Self::MaxAbs { x } => parts(8, 0, &[*x], &[]),
            Self::Block { rows, columns } => {
                OpParts { from: [&rows[..], columns].concat(), ..parts(9, rows.len() as u32, &[], &[]) }
            }
            Self::BeginSum { batch, portions, largest, coarser } => {
                OpParts { batch: *batch, ..parts(10, 0, &[*portions, *coarser], &[*largest]) }
            }
            Self::EndSum { to } => parts(11, *to, &[], &[]),
        }
    }

    /// The operation of these parts; fails if the code is unknown, or a field is missing or of another
    /// operation.
    pub fn from_parts(parts: OpParts) -> Result<Self> {
        let OpParts { code, to, from, by, batch } = parts;
        let op = match (code, to, &from[..], &by[..], batch) {
            (1, to, [from], [], 0) => Self::Copy { to, from: *from },
            (2, to, [], [], 0) => Self::Zero { to },
            (3, to, [], [by], 0) => Self::Scale { to, by: *by },
            (4, to, [x], [by], 0) => Self::Axpy { to, by: *by, x: *x },
            (5, to, _, _, 0) if from.len() == by.len() => {
                Self::Combine { to, terms: by.into_iter().zip(from).collect() }
            }
            (6, to, [x, y], [], 0) => Self::Multiply { to, x: *x, y: *y },
            (7, 0, [x, y], [], 0) => Self::Dot { x: *x, y: *y },
            (8, 0, [x], [], 0) => Self::MaxAbs { x: *x },
            (9, rows, _, [], 0) if rows as usize <= from.len() => {
                let (rows, columns) = from.split_at(rows as usize);
                Self::Block { rows: rows.to_vec(), columns: columns.to_vec() }
            }
            (10, 0, [portions, coarser], [largest], batch) => {
                Self::BeginSum { batch, portions: *portions, largest: *largest, coarser: *coarser }
            }
            (11, to, [], [], 0) => Self::EndSum { to },
            _ => {
                let message = format!("malformed operation of a program: code {code}");
                return Err(Error::new(Kind::Frame, message).expected(
                    "an operation with exactly its own fields",
                    format!("{} sources, {} factors", from.len(), by.len()),
                ));
            }
        };
        Ok(op)
    }

    /// The vector that it changes.
    pub(crate) fn target(&self) -> Option<u32> {
        match self {
            Self::Copy { to, .. }
            | Self::Zero { to }
            | Self::Scale { to, .. }
            | Self::Axpy { to, .. }
            | Self::Combine { to, .. }
            | Self::Multiply { to, .. }
            | Self::EndSum { to } => Some(*to),
            Self::Dot { .. } | Self::MaxAbs { .. } | Self::Block { .. } | Self::BeginSum { .. } => None,
        }
    }

    /// Number of its results.
    pub fn results(&self) -> usize {
        match self {
            Self::Dot { .. } | Self::MaxAbs { .. } => 1,
            Self::Block { rows, columns } => rows.len().saturating_mul(columns.len()),
            _ => 0,
        }
    }

    /// Number of vectors that it reads or writes, counted with repeats.
    fn inputs(&self) -> usize {
        match self {
            Self::Block { .. } => self.results(),
            Self::Combine { terms, .. } => 1 + terms.len(),
            Self::Multiply { .. } => 3,
            Self::Copy { .. } | Self::Axpy { .. } | Self::Dot { .. } => 2,
            Self::Zero { .. }
            | Self::Scale { .. }
            | Self::MaxAbs { .. }
            | Self::BeginSum { .. }
            | Self::EndSum { .. } => 1,
        }
    }

    /// Fails unless its vectors are below `vectors` and its numbers are valid.
    fn check(&self, vectors: usize) -> Result<()> {
        let parts = self.to_parts();
        let (indices, mut factors): (Vec<u32>, _) = match self {
            Self::BeginSum { .. } => (Vec::new(), parts.by.iter()),
            Self::Dot { .. } | Self::MaxAbs { .. } | Self::Block { .. } => (parts.from, parts.by.iter()),
            _ => (parts.from.into_iter().chain([parts.to]).collect(), parts.by.iter()),
        };
        if let Some(index) = indices.iter().find(|index| **index as usize >= vectors) {
            let error = Error::new(Kind::Config, "the space has no such vector");
            return Err(error.expected(format!("an index below {vectors}"), index));
        }
        if let Some(by) = factors.find(|by| !by.is_finite()) {
            let error = Error::new(Kind::Config, "invalid factor of an operation");
            return Err(error.expected("a finite number", by));
        }
        match self {
            Self::Combine { terms, .. } if terms.len() > MAX_VECTORS + 1 => {
                Err(too_many("terms of a linear combination", MAX_VECTORS + 1, terms.len()))
            }
            Self::Block { rows, columns } if rows.len().max(columns.len()) > MAX_VECTORS + 1 => {
                Err(too_many("rows or columns of a block", MAX_VECTORS + 1, rows.len().max(columns.len())))
            }
            Self::BeginSum { batch, .. } if !(1..=MAX_COUNT).contains(batch) => {
                Err(Error::new(Kind::Config, "invalid batch of a sum").expected("1 to 2^62", batch))
            }
            Self::BeginSum { portions, .. } if !(1..=MAX_PORTIONS).contains(portions) => {
                let error = Error::new(Kind::Config, "invalid number of portions of a sum");
                Err(error.expected(format!("1 to {MAX_PORTIONS}"), portions))
            }
            Self::BeginSum { largest, .. } if *largest < 0.0 => {
                Err(Error::new(Kind::Config, "invalid largest magnitude of a sum").expected(">= 0", largest))
            }
            Self::BeginSum { coarser, .. } if *coarser > MAX_COARSER => {
                Err(too_many("steps by which the grid of a sum is coarser", MAX_COARSER as usize, *coarser))
            }
            _ => Ok(()),
        }
    }
}

fn too_many(what: &str, most: usize, got: impl std::fmt::Display) -> Error {
    Error::new(Kind::Config, format!("too many {what}")).expected(format!("at most {most}"), got)
}

/// The sender of a program, and the program's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The space.
    pub space: SpaceId,
    /// The coordinator's term: a slice that has seen a larger one refuses the program.
    pub term: u64,
    /// The program's number, from 1; those of a space increase.
    pub number: u64,
}

/// Operations that run in order, whole or not at all.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    ops: Vec<Op>,
    results: usize,
}

impl Program {
    /// A program of these operations; fails if they are too many, or have too many results, or it begins or
    /// ends more than one sum, or ends one after it has begun one.
    pub fn new(ops: Vec<Op>) -> Result<Self> {
        if ops.len() > MAX_OPS {
            return Err(too_many("operations in a program", MAX_OPS, ops.len()));
        }
        let results = ops.iter().fold(0, |sum: usize, op| sum.saturating_add(op.results()));
        if results > MAX_RESULTS {
            return Err(too_many("results of a program", MAX_RESULTS, results));
        }
        let sums = ops.iter().filter(|op| matches!(op, Op::BeginSum { .. } | Op::EndSum { .. }));
        match &sums.collect::<Vec<_>>()[..] {
            [] | [_] | [Op::EndSum { .. }, Op::BeginSum { .. }] => Ok(Self { ops, results }),
            _ => Err(Error::new(Kind::Config, "sums that a program cannot keep apart")
                .expected("at most the end of one sum, and then the begin of one", "others")),
        }
    }

    /// Its operations.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// Number of its results.
    pub fn results(&self) -> usize {
        self.results
    }

    /// Returns whether it changes the tensor itself, not only its vectors.
    pub fn commits(&self) -> bool {
        self.ops.iter().any(|op| op.target() == Some(TENSOR))
    }

    /// Fails if the program is too much work for a slice, whose other frames wait meanwhile. A log may have
    /// larger ones.
    pub fn check_work(&self) -> Result<()> {
        let inputs = self.ops.iter().fold(0, |sum: usize, op| sum.saturating_add(op.inputs()));
        if inputs <= MAX_INPUTS || fault("work_unbounded") {
            return Ok(());
        }
        Err(too_many("inputs of the operations of a program: divide it into several", MAX_INPUTS, inputs))
    }

    /// Fails unless it can run in a space with `vectors` vectors.
    pub fn check(&self, vectors: usize) -> Result<()> {
        self.ops.iter().enumerate().try_for_each(|(k, op)| {
            op.check(vectors + 1).map_err(|mut error| {
                error.message = format!("{} (operation {k})", error.message);
                error
            })
        })
    }

    /// The program as a log keeps it: each operation's code (u32), target (u32), number of sources (u32),
    /// number of factors (u32), batch (u64), sources (u32) and factors (float64), little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for op in &self.ops {
            let OpParts { code, to, from, by, batch } = op.to_parts();
            for number in [code, to, from.len() as u32, by.len() as u32] {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
            bytes.extend_from_slice(&batch.to_le_bytes());
            bytes.extend(from.iter().flat_map(|from| from.to_le_bytes()));
            bytes.extend(by.iter().flat_map(|by| by.to_le_bytes()));
        }
        bytes
    }

    /// The program of these bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader(bytes);
        let mut ops = Vec::new();
        while !reader.0.is_empty() {
            if ops.len() == MAX_OPS {
                return Err(too_many("operations in a program", MAX_OPS, "more"));
            }
            let parts = reader.op().ok_or_else(|| Error::new(Kind::Frame, "a program is cut short"))?;
            ops.push(Op::from_parts(parts)?);
        }
        Self::new(ops)
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// `count` numbers; checks the length before it takes memory for them.
    fn many<const N: usize, T>(&mut self, count: u32, read: impl Fn([u8; N]) -> T) -> Option<Vec<T>> {
        let bytes = self.0.split_off(..(count as usize).checked_mul(N)?)?;
        Some(bytes.as_chunks().0.iter().map(|chunk| read(*chunk)).collect())
    }

    fn op(&mut self) -> Option<OpParts> {
        let (code, to) = (self.u32()?, self.u32()?);
        let (sources, factors) = (self.u32()?, self.u32()?);
        let batch = u64::from_le_bytes(self.take()?);
        let from = self.many(sources, u32::from_le_bytes)?;
        Some(OpParts { code, to, from, by: self.many(factors, f64::from_le_bytes)?, batch })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Op> {
        vec![
            Op::Copy { to: 1, from: 0 },
            Op::Zero { to: 2 },
            Op::Scale { to: 1, by: -0.5 },
            Op::Axpy { to: 0, by: 2.0, x: 2 },
            Op::Combine { to: 1, terms: vec![(1.0, 1), (-3.0, 2), (0.1, 0)] },
            Op::Multiply { to: 1, x: 1, y: 2 },
            Op::Dot { x: 0, y: 2 },
            Op::MaxAbs { x: 1 },
            Op::Block { rows: vec![0, 1], columns: vec![2] },
            Op::EndSum { to: 2 },
            Op::BeginSum { batch: 7, portions: 64, largest: 1.5, coarser: 1 },
        ]
    }

    #[test]
    fn programs_survive_their_bytes() {
        let program = Program::new(all()).unwrap();
        program.check(2).unwrap();
        assert_eq!((program.results(), program.commits()), (4, true));
        let bytes = program.to_bytes();
        assert_eq!(Program::from_bytes(&bytes).unwrap(), program);
        for cut in 1..bytes.len() {
            // A cut between two operations leaves a shorter program.
            if let Ok(shorter) = Program::from_bytes(&bytes[..cut]) {
                assert!(program.ops().starts_with(shorter.ops()));
            }
        }
        assert_eq!(Program::from_bytes(&[0xFF; 64]).unwrap_err().kind, Kind::Frame);
    }

    #[test]
    fn fields_of_other_operations_are_refused() {
        for op in all() {
            let parts = op.to_parts();
            assert_eq!(Op::from_parts(parts.clone()).unwrap(), op);
            for bad in [
                OpParts { code: 0, ..parts.clone() },
                OpParts { code: 12, ..parts.clone() },
                OpParts { by: [&parts.by[..], &[1.0]].concat(), ..parts.clone() },
            ] {
                assert_eq!(Op::from_parts(bad).unwrap_err().kind, Kind::Frame, "{op:?}");
            }
            if parts.code != 10 {
                assert_eq!(Op::from_parts(OpParts { batch: 1, ..parts }).unwrap_err().kind, Kind::Frame);
            }
        }
        let rows = OpParts { code: 9, to: 3, from: vec![1, 2], ..OpParts::default() };
        assert_eq!(Op::from_parts(rows).unwrap_err().kind, Kind::Frame);
    }

    #[test]
    fn the_work_of_a_program_is_bounded() {
        let work = |ops: Vec<Op>| Program::new(ops).unwrap().check_work();
        let combine = Op::Combine { to: 1, terms: vec![(1.0, 2); 65] };
        // Any block that has few enough results, with some operations beside it.
        let block = Op::Block { rows: vec![0; 64], columns: vec![1; 64] };
        work(vec![block, combine.clone()]).unwrap();
        let error = work(vec![combine; MAX_OPS]).unwrap_err();
        assert_eq!((error.kind, error.got.as_deref()), (Kind::Config, Some("16896")));
        assert_eq!(error.expected.as_deref(), Some("at most 4352"));
        work(vec![Op::Multiply { to: 1, x: 1, y: 2 }; MAX_OPS]).unwrap();
    }

    #[test]
    fn what_no_slice_could_run_is_refused() {
        let begin = |batch, portions, largest, coarser| Op::BeginSum { batch, portions, largest, coarser };
        for bad in [
            Op::Copy { to: 3, from: 1 },
            Op::Copy { to: 1, from: 3 },
            Op::Dot { x: 0, y: 3 },
            Op::Block { rows: vec![0], columns: vec![1, 9] },
            Op::Scale { to: 1, by: f64::NAN },
            Op::Combine { to: 1, terms: vec![(f64::INFINITY, 0)] },
            Op::Combine { to: 1, terms: vec![(1.0, 0); 66] },
            Op::Block { rows: vec![0; 66], columns: vec![1] },
            begin(0, 1, 0.0, 0),
            begin(1, 0, 0.0, 0),
            begin(1, MAX_PORTIONS + 1, 0.0, 0),
            begin(1, 1, -1.0, 0),
            begin(1, 1, f64::NAN, 0),
            begin(1, 1, 0.0, 1000),
        ] {
            let error = Program::new(vec![bad.clone()]).unwrap().check(2).unwrap_err();
            assert_eq!(error.kind, Kind::Config, "{bad:?}");
            assert!(error.message.contains("operation 0"));
        }
        let (sum, end) = (begin(1, 1, 0.0, 0), Op::EndSum { to: 1 });
        for ops in [
            vec![Op::Zero { to: 1 }; MAX_OPS + 1],
            vec![Op::Block { rows: vec![0; 64], columns: vec![0; 64] }, Op::MaxAbs { x: 0 }],
            vec![sum.clone(), sum.clone()],
            vec![end.clone(), end.clone()],
            vec![sum, end],
        ] {
            assert_eq!(Program::new(ops).unwrap_err().kind, Kind::Config);
        }
    }
}
