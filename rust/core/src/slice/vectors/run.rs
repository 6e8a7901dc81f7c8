//! Runs programs on the vectors of a slice, whole or not at all.
//!
//! Everything that can be refused beforehand is: a term, a number, an index, a sum that lacks portions, a
//! lack of memory. What remains is a tensor that is not finite afterwards. So what a program changes up to
//! its last change of the tensor is changed in copies, and the originals return if the tensor is not finite.

use super::Vectors;
use super::sum::{OpenSum, aligned};
use crate::base::dtype::DType;
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Counted;
use crate::kernel::combine::{Term, combine, multiply};
use crate::kernel::grid::Grid;
use crate::kernel::real::Real;
use crate::kernel::sums::{dot, max_abs, products};
use crate::memory::{Buffer, Charge, Pieces, Purpose};
use crate::slice::context::SliceContext;
use crate::slice::exact::{ExactMemory, set_aside};
use crate::slice::record::{ProgramRecord, SumRecord};
use crate::slice::slice::Slice;
use crate::tensor::program::{Command, Op, Program, TENSOR};

/// Source of the sum that a program ends.
#[derive(Clone, Copy)]
enum Ended<'a> {
    /// The portions.
    Open,
    /// The record of the program.
    Recorded(Option<SumRecord<'a>>),
}

impl Slice {
    /// Runs a program, and returns its results in the order of its operations. The slice answers its last
    /// program with the results that it remembers, and refuses earlier ones ([`Kind::StalePush`]) and former
    /// coordinators ([`Kind::Fenced`]). On an error, nothing has changed.
    pub fn run_program(&self, command: Command, program: &Program) -> Result<Vec<f64>> {
        program.check_work().map_err(|error| self.name(error))?;
        let mut memory = self.exact()?;
        let ran = memory.run_program(self, command, program, Ended::Open);
        ran.map_err(|error| self.name(error))?;
        Ok(memory.space(command.space)?.standing.results.clone())
    }

    /// Repeats a program from its record, without recording it again. False: the slice has run it already,
    /// or has closed the space since.
    pub fn replay_program(&self, record: &ProgramRecord<'_>) -> Result<bool> {
        let mut memory = self.exact()?;
        let next = memory.version + 1;
        let Ok(vectors) = memory.space(record.command.space) else { return Ok(false) };
        if record.command.number <= vectors.standing.number {
            // The image already has it. The term of its coordinator may have ended before the image.
            return Ok(false);
        }
        if record.program.commits() && record.version < next {
            // The tensor has the program's change: it comes from a later image.
            vectors.standing.number = record.command.number;
            return Ok(false);
        }
        if record.program.commits() && record.version > next {
            let error = Error::new(Kind::Internal, "records of changes are missing");
            let error = error.expected(format!("version {next}"), format!("version {}", record.version));
            return Err(self.name(error));
        }
        let ended = Ended::Recorded(record.sum);
        let ran = memory.run_program(self, record.command, record.program, ended);
        ran.map_err(|error| self.name(error))
    }
}

/// The arrays of a slice while a program runs: 0 is the tensor.
struct Arrays<'a> {
    arrays: Vec<&'a mut Counted<Buffer>>,
    /// The originals of vectors that the program changes in copies.
    originals: Vec<(usize, Counted<Buffer>, Charge)>,
}

impl Arrays<'_> {
    /// Replaces a vector by a copy, and keeps the original.
    fn set_aside(&mut self, slice: &SliceContext, k: usize) -> Result<()> {
        let (dtype, len) = (slice.spec.dtype, slice.len);
        let charge = slice.meter.take(Purpose::Copies, Buffer::bytes_for(dtype, len))?;
        let array = &mut *self.arrays[k];
        let mut copy = Buffer::filled(dtype, len, 0.0, k, &mut Pieces::none());
        copy.copy_from(array);
        let original = std::mem::replace(array, Counted::new(copy));
        self.originals.push((k, original, charge));
        Ok(())
    }

    /// Sets aside the vectors that the program changes before its tensor is known to be finite, and those
    /// that readers pin.
    fn protect(&mut self, slice: &SliceContext, program: &Program) -> Result<()> {
        let targets: Vec<_> = program.ops().iter().map(Op::target).collect();
        let last = targets.iter().rposition(|to| *to == Some(TENSOR));
        let vectors = |to: &Option<u32>| to.filter(|to| *to != TENSOR);
        for (at, to) in targets.iter().enumerate().filter_map(|(at, to)| Some((at, vectors(to)?))) {
            let first_change = !targets[..at].contains(&Some(to));
            let may_return = last.is_some_and(|last| at <= last);
            if first_change && (may_return || Counted::strong_count(self.arrays[to as usize]) > 1) {
                self.set_aside(slice, to as usize)?;
            }
        }
        Ok(())
    }

    /// Puts the originals back.
    fn restore(self) {
        let Self { mut arrays, originals } = self;
        for (k, original, _charge) in originals {
            *arrays[k] = original;
        }
    }

    /// Drops the originals, except what readers still pin.
    fn keep(self) {
        for (_, original, charge) in self.originals {
            if Counted::strong_count(&original) > 1 {
                original.leave_to_readers(charge);
            }
        }
    }

    fn values<T: Real>(&self, k: u32) -> &[T] {
        bytemuck::cast_slice(self.arrays[k as usize].bytes())
    }

    /// Changes an array, given the other ones: `None` is the array itself.
    fn change<'s, T: Real>(
        &'s mut self,
        to: u32,
        change: impl FnOnce(&mut [T], &dyn Fn(u32) -> Option<&'s [T]>),
    ) -> Result<()> {
        let (before, rest) = self.arrays.split_at_mut(to as usize);
        let Some((array, after)) = rest.split_first_mut() else { return Err(no_vector()) };
        let (before, after): (&'s [&mut Counted<Buffer>], &'s [&mut Counted<Buffer>]) = (before, after);
        let source = |k: u32| {
            let array = if k < to {
                before.get(k as usize)
            } else {
                after.get((k as usize).checked_sub(to as usize + 1)?)
            };
            array.map(|array| bytemuck::cast_slice(array.bytes()))
        };
        let array = Counted::get_mut(array)
            .ok_or_else(|| Error::new(Kind::Internal, "a vector that is being changed has readers"))?;
        change(array.values_mut(), &source);
        Ok(())
    }
}

fn no_vector() -> Error {
    Error::new(Kind::Internal, "a checked program names a missing vector")
}

/// Results of a program beside the arrays.
#[derive(Default)]
struct Ran {
    results: Vec<f64>,
    /// The sum that it ended, for the record.
    sum: Option<(Vec<u8>, f64)>,
}

impl ExactMemory {
    /// Runs a program and records it, unless it repeats one. False: it is the last program again.
    fn run_program(
        &mut self,
        slice: &SliceContext,
        command: Command,
        program: &Program,
        ended: Ended<'_>,
    ) -> Result<bool> {
        let vectors = self.space(command.space)?;
        if !vectors.admit(command)? {
            vectors.standing.term = command.term;
            return Ok(false);
        }
        program.check(vectors.arrays.len())?;
        vectors.check_sums(program, ended)?;
        let begins = program.ops().iter().any(|op| matches!(op, Op::BeginSum { .. }));
        if begins && matches!(ended, Ended::Open) {
            vectors.make_lanes(slice)?;
        }
        self.meet_cut(slice);
        let ran = match slice.spec.dtype {
            DType::Float32 => self.run_ops::<f32>(slice, program, ended)?,
            DType::Float64 => self.run_ops::<f64>(slice, program, ended)?,
            DType::BFloat16 => return Err(super::no_space()),
        };
        self.space(command.space)?.note(command, program, &ran, ended);
        self.version += u64::from(program.commits());
        self.assigns += u64::from(program.commits());
        if program.commits() {
            self.restart_average(slice);
        }
        if let (Some(sink), Ended::Open) = (&slice.sink, ended) {
            let sum = ran.sum.as_ref().map(|(values, largest)| SumRecord { values, largest: *largest });
            sink.program(&ProgramRecord { slice: slice.id, version: self.version, command, program, sum });
        }
        Ok(true)
    }

    fn run_ops<T: Real>(&mut self, slice: &SliceContext, program: &Program, ended: Ended<'_>) -> Result<Ran> {
        let Some(vectors) = &mut self.vectors else { return Err(super::no_space()) };
        if program.commits() {
            set_aside(slice, &mut self.params, &mut self.spare)?;
        }
        let arrays = std::iter::once(&mut self.params).chain(&mut vectors.arrays).collect();
        let mut arrays = Arrays { arrays, originals: Vec::new() };
        let mut ran = Ran { results: Vec::with_capacity(program.results()), sum: None };
        let done = arrays.protect(slice, program).and_then(|()| {
            program.ops().iter().try_for_each(|op| {
                run_op::<T>(slice, &mut arrays, op, (vectors.sum.as_ref(), ended), &mut ran)?;
                if op.target() == Some(TENSOR) { check_tensor::<T>(slice, &arrays) } else { Ok(()) }
            })
        });
        if let Err(error) = done {
            arrays.restore();
            if program.commits()
                && let Some(original) = &mut self.spare
            {
                std::mem::swap(original, &mut self.params);
            }
            return Err(error);
        }
        arrays.keep();
        Ok(ran)
    }
}

/// Fails unless the tensor is finite.
fn check_tensor<T: Real>(slice: &SliceContext, arrays: &Arrays<'_>) -> Result<()> {
    let largest = max_abs(slice.isa, arrays.values::<T>(TENSOR));
    if largest.is_finite() {
        return Ok(());
    }
    let error =
        Error::new(Kind::NonFinite, "the program would make the tensor not finite; it changed nothing");
    Err(error.expected("finite values", largest))
}

fn run_op<T: Real>(
    slice: &SliceContext,
    arrays: &mut Arrays<'_>,
    op: &Op,
    (sum, ended): (Option<&OpenSum>, Ended<'_>),
    ran: &mut Ran,
) -> Result<()> {
    let isa = slice.isa;
    match op {
        Op::Copy { to, from } => arrays.change::<T>(*to, |to, source| {
            if let Some(from) = source(*from) {
                to.copy_from_slice(from);
            }
        })?,
        Op::Zero { to } => arrays.change::<T>(*to, |to, _| to.fill(T::ZERO))?,
        Op::Scale { to, by } => arrays.change::<T>(*to, |to, _| combine(isa, to, &[(*by, None)]))?,
        Op::Axpy { to, by, x } => {
            arrays.change::<T>(*to, |to, source| combine(isa, to, &[(1.0, None), (*by, source(*x))]))?;
        }
        Op::Combine { to, terms } => arrays.change::<T>(*to, |to, source| {
            let terms: Vec<Term<'_, T>> = terms.iter().map(|(by, x)| (*by, source(*x))).collect();
            combine(isa, to, &terms);
        })?,
        Op::Multiply { to, x, y } => {
            arrays.change::<T>(*to, |to, source| multiply(isa, to, source(*x), source(*y)))?;
        }
        Op::Dot { x, y } => ran.results.push(dot::<T>(isa, arrays.values(*x), arrays.values(*y))),
        Op::MaxAbs { x } => ran.results.push(max_abs::<T>(isa, arrays.values(*x))),
        Op::Block { rows, columns } => {
            let values = |list: &[u32]| list.iter().map(|k| arrays.values::<T>(*k)).collect::<Vec<_>>();
            ran.results.extend(products(isa, &values(rows), &values(columns)));
        }
        Op::BeginSum { .. } => {}
        Op::EndSum { to } => {
            let largest = match (ended, sum) {
                (Ended::Open, Some(sum)) => {
                    arrays.change::<T>(*to, |to, _| sum.write(isa, to))?;
                    sum.largest
                }
                (Ended::Recorded(Some(sum)), _) => {
                    arrays.change::<T>(*to, |to, _| to.copy_from_slice(&aligned(sum.values)))?;
                    sum.largest
                }
                _ => {
                    return Err(Error::new(Kind::Internal, "a checked program ends a missing sum"));
                }
            };
            let recorded = slice.sink.is_some();
            let values = if recorded { arrays.arrays[*to as usize].bytes().to_vec() } else { Vec::new() };
            ran.sum = Some((values, largest));
        }
    }
    Ok(())
}

impl Vectors {
    /// Fails unless the sum that the program ends is open and complete, and the one that it begins is later.
    fn check_sums(&self, program: &Program, ended: Ended<'_>) -> Result<()> {
        for op in program.ops() {
            match (op, ended, &self.sum) {
                (Op::EndSum { .. }, Ended::Open, Some(sum)) if !sum.is_complete() => {
                    let message = format!("the sum of batch {} lacks portions", self.standing.batch);
                    let error = Error::new(Kind::Precondition, message);
                    return Err(error.expected("all portions", format!("{} missing", sum.unfinished())));
                }
                (Op::EndSum { .. }, Ended::Open, None) if self.standing.open => {
                    let message = format!(
                        "the server was restarted and has lost the sum of batch {}",
                        self.standing.batch
                    );
                    return Err(Error::new(Kind::UnknownOutcome, message));
                }
                (Op::EndSum { .. }, Ended::Open, None) => {
                    let error = Error::new(Kind::Precondition, "no sum is open");
                    return Err(error.expected("a sum that begins before it ends", "none"));
                }
                (Op::EndSum { .. }, Ended::Recorded(None), _) => {
                    return Err(Error::new(
                        Kind::Internal,
                        "the record of a program lacks the sum that it ended",
                    ));
                }
                (Op::BeginSum { batch, .. }, ..) if *batch <= self.standing.batch => {
                    let error = Error::new(Kind::StalePush, "a later batch has begun");
                    return Err(error.expected(format!("a batch after {}", self.standing.batch), batch));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Records the effects of a program beside the changed arrays.
    fn note(&mut self, command: Command, program: &Program, ran: &Ran, ended: Ended<'_>) {
        (self.standing.term, self.standing.number) = (command.term, command.number);
        self.standing.results.clone_from(&ran.results);
        if let Some((_, largest)) = ran.sum {
            (self.standing.open, self.standing.largest) = (false, largest);
            self.end_sum();
            // Before the first commit, the first portion that shows a magnitude sets the grid.
            self.standing.grid = self.standing.grid.or_else(|| Grid::for_largest(largest).map(Grid::number));
        }
        if program.commits()
            && let Some(grid) = Grid::for_largest(self.standing.largest)
        {
            self.standing.grid = Some(grid.number());
        }
        let begins = |op: &&Op| matches!(op, Op::BeginSum { .. });
        if let Some(op @ Op::BeginSum { batch, .. }) = program.ops().iter().find(begins) {
            (self.standing.batch, self.standing.open) = (*batch, true);
            self.end_sum();
            if let (Ended::Open, Some(lanes)) = (ended, self.lanes.take()) {
                self.sum = OpenSum::begin(op, self.grid(), lanes);
            }
        }
    }
}
