//! The caller's side of sparse pushes and pulls: a [`Plan`] sorts the indices of a call once and splits them
//! by slice. Each row occurs once and in ascending order, however the caller lists it.

use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use crate::kernel::finite;
use crate::kernel::rows::Indices;
use crate::tensor::TensorSpec;
use std::ops::Range;

/// The rows that a call names, each once and ascending. Their elements are gathered and sent in this order.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Elements of a row.
    width: usize,
    /// Bytes of a pulled element.
    size: usize,
    /// Every index as (row, position in the caller's list), sorted.
    order: Vec<(u64, u32)>,
    /// Start of each row in `order`, followed by the length of `order`.
    starts: Vec<u32>,
    /// The part of each slice.
    parts: Vec<RowPart>,
    /// Row numbers relative to the slices, for all parts.
    indices: Vec<u8>,
}

/// The rows of one slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPart {
    /// Index of the slice in the tensor.
    pub slice: usize,
    /// Range of its elements among those gathered.
    pub elements: Range<usize>,
    /// Range of its bytes in the plan's `indices`.
    indices: Range<usize>,
}

/// Most indices of one call.
const MAX_INDICES: usize = u32::MAX as usize;

/// Fails if an index names no row of the tensor; returns the number of rows.
pub fn check_indices(spec: &TensorSpec, indices: &[i64]) -> Result<u64> {
    spec.need_float32("a push or pull of rows")?;
    let name = |error: Error| error.tensor(spec.name.clone());
    let Some(&rows) = spec.shape.first() else {
        return Err(name(Error::new(Kind::Shape, "a scalar has no rows to be indexed")));
    };
    if indices.len() > MAX_INDICES {
        let error = Error::new(Kind::Shape, "too many indices");
        return Err(name(error.expected(format!("at most {MAX_INDICES}"), indices.len())));
    }
    if let Some(i) = indices.iter().position(|&row| row < 0 || row as u64 >= rows) {
        let expected =
            if rows == 0 { "none, as there are no rows".into() } else { format!("0 to {}", rows - 1) };
        let error = Error::new(Kind::Shape, format!("index {i} is out of range"));
        return Err(name(error.expected(expected, indices[i])));
    }
    Ok(rows)
}

impl Plan {
    /// Plans a call with these indices, in any order and possibly with repeats; fails if one names no row.
    pub fn new(spec: &TensorSpec, indices: &[i64]) -> Result<Self> {
        let rows = check_indices(spec, indices)?;
        let order = sorted(indices, rows);
        let mut plan = Self {
            width: spec.row_width(),
            size: spec.dtype.size(),
            starts: Vec::with_capacity(order.len() + 1),
            parts: Vec::new(),
            indices: Vec::with_capacity(4 * order.len()),
            order,
        };
        plan.cut(spec);
        Ok(plan)
    }

    /// Finds the rows, and splits them by slice.
    fn cut(&mut self, spec: &TensorSpec) {
        let (width, len) = (self.width, spec.dtype.slice_len());
        let mut gathered = 0;
        for (i, &(row, _)) in self.order.iter().enumerate() {
            if i > 0 && self.order[i - 1].0 == row {
                continue;
            }
            self.starts.push(i as u32);
            let (start, end) = (row as usize * width, (row as usize + 1) * width);
            let mut from = start;
            while from < end {
                let slice = from / len;
                let to = end.min((slice + 1) * len);
                if self.parts.last().is_none_or(|part| part.slice != slice) {
                    let at = self.indices.len();
                    self.parts.push(RowPart { slice, elements: gathered..gathered, indices: at..at });
                }
                // A slice counts rows from the row of its first element.
                let row = (row as usize - slice * len / width) as u32;
                self.indices.extend_from_slice(&row.to_le_bytes());
                gathered += to - from;
                if let Some(part) = self.parts.last_mut() {
                    (part.elements.end, part.indices.end) = (gathered, self.indices.len());
                }
                from = to;
            }
        }
        self.starts.push(self.order.len() as u32);
    }

    /// Adds an empty part for every slice of the tensor without any of the rows.
    fn for_every_slice(mut self, slices: usize) -> Self {
        let mut parts = std::mem::take(&mut self.parts).into_iter().peekable();
        let (mut gathered, mut at) = (0, 0);
        for slice in 0..slices {
            let none = RowPart { slice, elements: gathered..gathered, indices: at..at };
            let part = parts.next_if(|part| part.slice == slice).unwrap_or(none);
            (gathered, at) = (part.elements.end, part.indices.end);
            self.parts.push(part);
        }
        self
    }

    /// The part of each slice, in order.
    pub fn parts(&self) -> &[RowPart] {
        &self.parts
    }

    /// The rows of a part.
    pub fn indices(&self, part: &RowPart) -> Indices<'_> {
        Indices::new(&self.indices[part.indices.clone()])
    }

    /// Number of elements of all rows, each counted once.
    pub fn elements(&self) -> usize {
        self.width * (self.starts.len() - 1)
    }

    /// Positions of the k-th row in the caller's list.
    fn places(&self, k: usize) -> impl Iterator<Item = usize> {
        let places = &self.order[self.starts[k] as usize..self.starts[k + 1] as usize];
        places.iter().map(|(_, place)| *place as usize)
    }

    /// Gathers the caller's values in row order. Values of the same row are summed in the order given.
    pub fn gather(&self, values: &[f32]) -> Vec<f32> {
        let mut gathered = Vec::with_capacity(self.elements());
        for k in 0..self.starts.len() - 1 {
            let at = gathered.len();
            for (i, place) in self.places(k).enumerate() {
                let row = &values[place * self.width..(place + 1) * self.width];
                if i == 0 {
                    gathered.extend_from_slice(row);
                } else {
                    gathered[at..].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                }
            }
        }
        gathered
    }

    /// Gathers the caller's values in row order. Of values of the same row, the last in the order given
    /// remains.
    pub fn gather_last(&self, values: &[f32]) -> Vec<f32> {
        let mut gathered = Vec::with_capacity(self.elements());
        for place in (0..self.starts.len() - 1).filter_map(|k| self.places(k).last()) {
            gathered.extend_from_slice(&values[place * self.width..(place + 1) * self.width]);
        }
        gathered
    }

    /// Returns whether a row is named more than once.
    pub fn has_repeats(&self) -> bool {
        self.starts.len() - 1 < self.order.len()
    }

    /// Passes gathered elements from `first` on, as bytes, to `put` for each of their positions in the
    /// caller's list: (element there, bytes).
    pub fn scatter(&self, first: usize, bytes: &[u8], mut put: impl FnMut(usize, &[u8])) {
        let end = first + bytes.len() / self.size;
        let mut at = first;
        while at < end {
            let (row, within) = (at / self.width, at % self.width);
            let to = end.min(at - within + self.width);
            let bytes = &bytes[self.size * (at - first)..self.size * (to - first)];
            for place in self.places(row) {
                put(place * self.width + within, bytes);
            }
            at = to;
        }
    }
}

/// Checked indices as (row, position), sorted.
fn sorted(indices: &[i64], rows: u64) -> Vec<(u64, u32)> {
    let each = indices.iter().map(|row| *row as u64).zip(0_u32..);
    if indices.is_sorted() || rows > 1 << 32 {
        let mut order: Vec<_> = each.collect();
        order.sort_unstable();
        return order;
    }
    // Packing both into one number halves the time to sort.
    let mut order: Vec<_> = each.map(|(row, place)| row << 32 | u64::from(place)).collect();
    order.sort_unstable();
    order.into_iter().map(|both| (both >> 32, both as u32)).collect()
}

/// A sparse gradient or assignment, gathered for its slices.
#[derive(Clone, Debug)]
pub struct Gathered {
    /// The rows.
    pub plan: Plan,
    /// The values of the rows.
    pub values: Vec<f32>,
}

impl Gathered {
    /// Gathers checked values. With `check_finite`, fails if a sum is not finite; with `every_slice`, slices
    /// without any of the rows get an empty part instead of none.
    pub fn new(
        isa: Isa,
        spec: &TensorSpec,
        (indices, values): (&[i64], &[f32]),
        check_finite: bool,
        every_slice: bool,
    ) -> Result<Self> {
        let mut plan = Plan::new(spec, indices)?;
        if every_slice {
            plan = plan.for_every_slice(spec.slice_count());
        }
        let values = plan.gather(values);
        if check_finite && plan.has_repeats() {
            finite::check(isa, &values, None).map_err(|mut error| {
                error.message = "the sum of the values of a repeated index is not finite".into();
                error.tensor(spec.name.clone())
            })?;
        }
        Ok(Self { plan, values })
    }

    /// Gathers checked values that replace those of the rows.
    pub fn assigned(spec: &TensorSpec, indices: &[i64], values: &[f32]) -> Result<Self> {
        let plan = Plan::new(spec, indices)?;
        let values = plan.gather_last(values);
        Ok(Self { plan, values })
    }
}
