//! The sum of a batch's portions in one slice. It counts multiples of one quantum, so neither the order of
//! the portions nor repeats change a bit.

use super::{Vectors, VectorsStanding, no_space};
use crate::base::dtype::DType;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use crate::kernel::grid::{Grid, GridSum};
use crate::kernel::real::Real;
use crate::kernel::sums::max_abs;
use crate::slice::context::SliceContext;
use crate::slice::slice::Slice;
use crate::tensor::SpaceId;
use crate::tensor::program::Op;
use std::borrow::Cow;

/// A sum that takes portions.
#[derive(Debug)]
pub(super) struct OpenSum {
    portions: u32,
    /// `None` until portion 0 shows a magnitude.
    grid: Option<Grid>,
    lanes: GridSum,
    /// One bit per portion: whether the sum has it.
    taken: Vec<u64>,
    left: u32,
    pub(super) largest: f64,
}

impl OpenSum {
    /// Bytes of memory, beside the lanes, for the most portions.
    const BYTES: usize = crate::kernel::grid::MAX_TERMS as usize / 8;

    pub(super) fn begin(op: &Op, known: Option<Grid>, lanes: GridSum) -> Option<Self> {
        let Op::BeginSum { portions, largest, coarser, .. } = *op else { return None };
        let grid = known.or_else(|| Grid::for_largest(largest)).map(|grid| grid.coarser(coarser));
        let taken = vec![0; portions.div_ceil(u64::BITS) as usize];
        Some(Self { portions, grid, lanes, taken, left: portions, largest: 0.0 })
    }

    pub(super) fn is_complete(&self) -> bool {
        self.left == 0
    }

    pub(super) fn unfinished(&self) -> u32 {
        self.left
    }

    /// Writes the sum to `to`.
    pub(super) fn write<T: Real>(&self, isa: Isa, to: &mut [T]) {
        match self.grid {
            Some(grid) => self.lanes.write(isa, grid, to),
            None => to.fill(T::ZERO),
        }
    }

    /// Adds a portion; `false`: the sum has it already. On an error, nothing has changed.
    fn add<T: Real>(&mut self, isa: Isa, portion: u32, values: &[T]) -> Result<bool> {
        let (word, bit) = (portion / u64::BITS, 1 << (portion % u64::BITS));
        let Some(word) = self.taken.get_mut(word as usize).filter(|_| portion < self.portions) else {
            let error = Error::new(Kind::Config, "the batch has no such portion");
            return Err(error.expected(format!("a portion below {}", self.portions), portion));
        };
        if *word & bit != 0 {
            return Ok(false);
        }
        let largest = max_abs(isa, values);
        if !largest.is_finite() {
            let error =
                Error::new(Kind::NonFinite, format!("portion {portion} has a value that is not finite"));
            return Err(error.expected("finite values", largest));
        }
        let grid = match self.grid {
            None if portion != 0 => {
                let message = "a slice that knows no magnitude yet takes portion 0 only";
                return Err(Error::new(Kind::Config, message).expected("portion 0", portion));
            }
            None => Grid::for_largest(largest),
            grid => grid,
        };
        if let Some(grid) = grid {
            if largest > grid.limit() {
                let message = format!("portion {portion} has a value outside the grid of its sum");
                let error = Error::new(Kind::Precondition, message);
                return Err(error.expected(format!("magnitudes up to {:e}", grid.limit()), largest));
            }
            self.lanes.add(isa, grid, values);
        }
        *word |= bit;
        (self.grid, self.left, self.largest) = (grid, self.left - 1, self.largest.max(largest));
        Ok(true)
    }
}

impl Vectors {
    /// Takes the memory for sums, which is charged with the vectors and kept until the space is closed.
    pub(super) fn make_lanes(&mut self, slice: &SliceContext) -> Result<()> {
        if self.lanes.is_none() && self.sum.is_none() {
            let vectors = Self::memory_for(slice.spec.dtype, slice.len, &self.space);
            self.charge.grow_to(vectors + (OpenSum::BYTES + GridSum::BYTES * slice.len) as u64)?;
            self.lanes = Some(GridSum::zeros(slice.len));
        }
        Ok(())
    }

    /// Ends the open sum, and clears its lanes for the next one.
    pub(super) fn end_sum(&mut self) {
        if let Some(OpenSum { mut lanes, .. }) = self.sum.take() {
            lanes.clear();
            self.lanes = Some(lanes);
        }
    }
}

/// The refusal of what belongs to a batch that is not the open one.
pub(super) fn other_batch(standing: &VectorsStanding, batch: u64) -> Error {
    let open = if standing.open { format!("batch {}", standing.batch) } else { "no open batch".to_owned() };
    Error::new(Kind::StalePush, "the batch is over, or has not begun")
        .expected(open, format!("batch {batch}"))
}

impl Slice {
    /// Adds a portion's gradient, in the plain codec of the slice's type, to the sum of a batch. `false`: the
    /// sum has the portion already. Kinds of refusals: [`Kind::StalePush`], the batch is not the open one;
    /// [`Kind::NonFinite`]; [`Kind::Precondition`], a value is outside the sum's grid;
    /// [`Kind::UnknownOutcome`], a restart has lost the sum. Nothing has changed then.
    pub fn push_portion(&self, space: SpaceId, batch: u64, portion: u32, body: &[u8]) -> Result<bool> {
        self.add_portion(space, batch, portion, body).map_err(|error| self.name(error))
    }

    fn add_portion(&self, space: SpaceId, batch: u64, portion: u32, body: &[u8]) -> Result<bool> {
        if body.len() != self.bytes() {
            return Err(Error::new(Kind::Shape, "the portion's length is not the slice's")
                .expected(format!("{} bytes", self.bytes()), format!("{} bytes", body.len())));
        }
        let mut memory = self.exact()?;
        let Some(vectors) = memory.vectors.as_mut().filter(|open| open.space.id == space) else {
            return Err(no_space());
        };
        let standing = &vectors.standing;
        if standing.batch != batch || !standing.open {
            return Err(other_batch(standing, batch));
        }
        let Some(sum) = &mut vectors.sum else {
            let message = format!("the server was restarted and has lost the sum of batch {batch}");
            return Err(Error::new(Kind::UnknownOutcome, message));
        };
        match self.spec.dtype {
            DType::Float32 => sum.add::<f32>(self.isa, portion, &aligned(body)),
            DType::Float64 => sum.add::<f64>(self.isa, portion, &aligned(body)),
            DType::BFloat16 => Err(no_space()),
        }
    }
}

/// The elements of a body, copied if they are not aligned.
pub(super) fn aligned<T: Real>(body: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(body) {
        Ok(values) => Cow::Borrowed(values),
        Err(_) => Cow::Owned(body.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()),
    }
}
