//! The vectors of a space in an `exact` slice. They are stored beside the optimizer state under the slice's
//! lock; while the space is open, only its programs change the slice.
//!
//! Programs of a space have numbers. A slice answers its last program again with the results that it
//! remembers, and refuses earlier ones, so a program takes effect once, however often it is sent.

mod run;
mod sum;

use crate::base::dtype::DType;
use crate::base::error::{Error, Kind, Result};
use crate::base::lock::SliceGuard;
use crate::base::sync::{Arc, Counted};
use crate::base::text;
use crate::kernel::grid::{Grid, GridSum};
use crate::memory::{Buffer, Charge, Pieces, Purpose};
use crate::slice::context::SliceContext;
use crate::slice::exact::ExactMemory;
use crate::slice::round::{Why, tell};
use crate::slice::slice::{Slice, SliceMemory};
use crate::slice::snapshot::{Bytes, Snapshot};
use crate::tensor::program::{Command, MAX_COUNT, MAX_RESULTS, TENSOR};
use crate::tensor::{Space, SpaceId};
use sum::OpenSum;

/// Memory of a vector's name beside its text, with the object that is its array.
const NAME_BYTES: usize = 128;

/// A slice's knowledge of a space, without the arrays.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VectorsStanding {
    /// The largest term of a coordinator that has sent a program.
    pub term: u64,
    /// Number of the last program.
    pub number: u64,
    /// Its results.
    pub results: Vec<f64>,
    /// Number of the last batch whose sum began; 0 if none has.
    pub batch: u64,
    /// Set until the sum ends.
    pub open: bool,
    /// The largest magnitude among the portions of the last sum that ended.
    pub largest: f64,
    /// Number of the grid of the sums until the next commit; `None` if the slice has seen no magnitude yet.
    pub grid: Option<i32>,
}

/// The vectors of a slice in an image: pinned, not copied.
#[derive(Clone, Debug)]
pub struct VectorsImage {
    /// The space.
    pub space: Arc<Space>,
    /// Everything except the arrays.
    pub standing: VectorsStanding,
    /// The vectors, in the space's order.
    pub vectors: Vec<Snapshot>,
}

/// The state of a space in one slice.
#[derive(Debug)]
pub(in crate::slice) struct Vectors {
    space: Arc<Space>,
    arrays: Vec<Counted<Buffer>>,
    standing: VectorsStanding,
    /// The sum of the batch; `None` if none is open, or if a restart has lost it.
    sum: Option<OpenSum>,
    /// The lanes of the last sum; their pages are warm when the next one begins.
    lanes: Option<GridSum>,
    charge: Charge,
}

impl Vectors {
    /// Bytes of memory for a space: its vectors, their names, and the most results that it remembers.
    fn memory_for(dtype: DType, len: usize, space: &Space) -> u64 {
        let names =
            space.vectors.iter().map(|name| name.len() + NAME_BYTES).sum::<usize>() + space.name.len();
        let beside = (MAX_RESULTS * size_of::<f64>() + names) as u64;
        Buffer::bytes_for(dtype, len).saturating_mul(space.vectors.len() as u64).saturating_add(beside)
    }

    fn new(slice: &SliceContext, space: &Arc<Space>) -> Result<Self> {
        let (dtype, count) = (slice.spec.dtype, space.vectors.len());
        let charge = slice.meter.take(Purpose::Vectors, Self::memory_for(dtype, slice.len, space))?;
        let array = |k| Buffer::filled(dtype, slice.len, 0.0, k, &mut Pieces::none());
        Ok(Self {
            space: space.clone(),
            arrays: (1..=count).map(|k| Counted::new(array(k))).collect(),
            standing: VectorsStanding::default(),
            sum: None,
            lanes: None,
            charge,
        })
    }

    /// Fails for a coordinator whose term is over, and for a term or number that an image may not have.
    /// `true`: the program is new; `false`: it is the last one. Only a program that runs changes what the
    /// slice knows.
    fn admit(&self, command: Command) -> Result<bool> {
        for (what, count) in [("term", command.term), ("number of a program", command.number)] {
            if count > MAX_COUNT {
                return Err(
                    Error::new(Kind::Config, format!("invalid {what}")).expected("at most 2^62", count)
                );
            }
        }
        let standing = &self.standing;
        if command.term < standing.term {
            let message = format!("another coordinator has taken over space {:?}", self.space.name);
            return Err(Error::new(Kind::Fenced, message)
                .expected(format!("term {} or later", standing.term), format!("term {}", command.term)));
        }
        if command.number < standing.number {
            let message = format!("a later program of space {:?} has run", self.space.name);
            return Err(Error::new(Kind::StalePush, message)
                .expected(format!("program {} or later", standing.number), command.number));
        }
        Ok(command.number > standing.number)
    }

    /// The grid of the slice's sums, if it has seen a magnitude.
    fn grid(&self) -> Option<Grid> {
        self.standing.grid.and_then(Grid::of_number)
    }

    /// Leaves the arrays that readers pin to them, each with its own part of the charge.
    pub(in crate::slice) fn leave_to_readers(&mut self, slice_bytes: u64) {
        for array in &self.arrays {
            if Counted::strong_count(array) > 1 {
                array.leave_to_readers(self.charge.split(slice_bytes));
            }
        }
    }

    /// Error for a push or an assignment while the space is open.
    pub(in crate::slice) fn occupied(&self) -> Error {
        let message = format!("space {:?} is open: only its programs change the tensor", self.space.name);
        Error::new(Kind::Precondition, message).expected("a closed space", "a push or an assignment")
    }

    pub(in crate::slice) fn image(&self, snapshot: impl Fn(Bytes) -> Snapshot) -> VectorsImage {
        let number = self.standing.number;
        let pinned = |array: &Counted<Buffer>| Snapshot {
            version: number,
            own: 0,
            step: 0,
            ..snapshot(Bytes::Pinned(array.clone()))
        };
        VectorsImage {
            space: self.space.clone(),
            standing: self.standing.clone(),
            vectors: self.arrays.iter().map(pinned).collect(),
        }
    }
}

impl Slice {
    /// The memory of an `exact` slice; other slices have no vectors.
    pub(in crate::slice) fn exact(&self) -> Result<SliceGuard<'_, ExactMemory>> {
        match &self.memory {
            SliceMemory::Exact(memory) => Ok(memory.lock()),
            SliceMemory::Hogwild(_) => {
                let error = Error::new(Kind::Config, "a hogwild tensor has no vectors");
                Err(self.name(error.expected("a tensor with apply=\"exact\"", "apply=\"hogwild\"")))
            }
        }
    }

    /// Opens a space: its vectors are 0. Does nothing if it is open already. Returns the slice's knowledge of
    /// it. Fails if another space is open, or if there is no memory; then nothing has changed.
    pub fn open_space(&self, space: &Arc<Space>) -> Result<VectorsStanding> {
        space.check()?;
        let mut memory = self.exact()?;
        if let Some(open) = &memory.vectors {
            if *open.space == **space {
                return Ok(open.standing.clone());
            }
            let message = format!("space {:?} is open over the tensor", open.space.name);
            let vectors = |space: &Space| {
                let names = text::names(space.vectors.iter().map(|name| &**name));
                format!("space {:?} of vectors {names}", space.name)
            };
            let (expected, got) = (vectors(&open.space), vectors(space));
            return Err(self.name(Error::new(Kind::Precondition, message).expected(expected, got)));
        }
        memory.meet_cut(self);
        let vectors = Vectors::new(self, space).map_err(|error| self.name(error))?;
        let standing = vectors.standing.clone();
        memory.vectors = Some(Box::new(vectors));
        if let Some(sink) = &self.sink {
            sink.space_opened(self.id, space);
        }
        let completions = memory.give_up_round(self, Why::Changed);
        drop(memory);
        tell(completions);
        Ok(standing)
    }

    /// Closes a space and frees its vectors. Pulls that are being sent keep theirs. False: it is not open.
    pub fn close_space(&self, space: SpaceId) -> bool {
        let Ok(mut memory) = self.exact() else { return false };
        memory.meet_cut(self);
        let Some(mut vectors) = memory.vectors.take_if(|vectors| vectors.space.id == space) else {
            return false;
        };
        vectors.leave_to_readers(Buffer::bytes_for(self.spec.dtype, self.len));
        if let Some(sink) = &self.sink {
            sink.space_closed(self.id, space);
        }
        true
    }

    /// The space that is open over the slice, and the slice's knowledge of it.
    pub fn space(&self) -> Option<(Arc<Space>, VectorsStanding)> {
        let memory = self.exact().ok()?;
        memory.vectors.as_ref().map(|vectors| (vectors.space.clone(), vectors.standing.clone()))
    }

    /// Pins a vector: 0 is the tensor itself. Given a batch, fails with [`Kind::StalePush`] unless its sum is
    /// open.
    pub fn pull_vector(
        &self,
        client: u64,
        space: SpaceId,
        index: u32,
        batch: Option<u64>,
    ) -> Result<Snapshot> {
        let memory = self.exact()?;
        memory.pull_vector(self, client, space, (index, batch)).map_err(|error| self.name(error))
    }
}

impl ExactMemory {
    /// The space, if it is open.
    fn space(&mut self, space: SpaceId) -> Result<&mut Vectors> {
        match &mut self.vectors {
            Some(vectors) if vectors.space.id == space => Ok(vectors),
            _ => Err(no_space()),
        }
    }

    fn pull_vector(
        &self,
        slice: &SliceContext,
        client: u64,
        space: SpaceId,
        (index, batch): (u32, Option<u64>),
    ) -> Result<Snapshot> {
        let vectors = self.vectors.as_ref().filter(|open| open.space.id == space).ok_or_else(no_space)?;
        let standing = &vectors.standing;
        if let Some(batch) = batch
            && (batch != standing.batch || !standing.open)
        {
            return Err(sum::other_batch(standing, batch));
        }
        if index == TENSOR {
            return self.pull(slice, client);
        }
        let array = vectors.arrays.get(index as usize - 1).ok_or_else(|| {
            let error = Error::new(Kind::Config, "the space has no such vector");
            error.expected(format!("an index up to {}", vectors.arrays.len()), index)
        })?;
        let pinned = self.snapshot(slice.spec.dtype, client, Bytes::Pinned(array.clone()));
        Ok(Snapshot { version: standing.number, own: 0, step: 0, ..pinned })
    }

    /// Restores a space from an image.
    pub(in crate::slice) fn restore_space(
        &mut self,
        slice: &SliceContext,
        (space, standing): (&Arc<Space>, &VectorsStanding),
        values: &[&[u8]],
    ) -> Result<()> {
        space.check()?;
        let valid = values.len() == space.vectors.len()
            && values.iter().all(|values| values.len() == slice.bytes())
            && standing.results.len() <= MAX_RESULTS
            && standing.grid.is_none_or(|number| Grid::of_number(number).is_some());
        if !valid {
            return Err(Error::new(Kind::Shape, "the image has the vectors of another slice"));
        }
        let mut vectors = Vectors::new(slice, space)?;
        vectors.standing = standing.clone();
        for (array, values) in vectors.arrays.iter_mut().zip(values) {
            if let Some(array) = Counted::get_mut(array) {
                array.values_mut().copy_from_slice(values);
            }
        }
        self.vectors = Some(Box::new(vectors));
        Ok(())
    }
}

fn no_space() -> Error {
    let error =
        Error::new(Kind::Config, "no such space is open over the tensor: it was closed, or never opened");
    error.expected("an open space", "another one, or none")
}
