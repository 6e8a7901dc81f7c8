//! The client's half of sparse access: the caller's indices, sorted once, and what each slice gets of them.

use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use crate::kernel::finite;
use crate::kernel::rows::Indices;
use crate::tensor::TensorSpec;
use std::ops::Range;

/// The rows that a call names, each once and ascending: the order in which their elements are gathered and
/// travel.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Elements of a row.
    width: usize,
    /// Every index as (row, place in the caller's list), sorted.
    order: Vec<(u64, u32)>,
    /// Where each row begins in `order`; then its length.
    starts: Vec<u32>,
    /// What each slice gets.
    parts: Vec<RowPart>,
    /// Numbers of rows as the slices count them, for all parts.
    indices: Vec<u8>,
}

/// The rows of one slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPart {
    /// Which slice of the tensor.
    pub slice: usize,
    /// Its elements among those gathered.
    pub elements: Range<usize>,
    /// Its bytes of all numbers.
    indices: Range<usize>,
}

/// Most indices of one call.
const MAX_INDICES: usize = u32::MAX as usize;

/// Fails if an index names no row of the tensor; gives the number of rows.
pub fn check_indices(spec: &TensorSpec, indices: &[i64]) -> Result<u64> {
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
    /// Of the indices of a call, in any order, perhaps with repeats; fails for one that names no row.
    pub fn new(spec: &TensorSpec, indices: &[i64]) -> Result<Self> {
        let rows = check_indices(spec, indices)?;
        let order = sorted(indices, rows);
        let mut plan = Self {
            width: spec.row_width(),
            starts: Vec::with_capacity(order.len() + 1),
            parts: Vec::new(),
            indices: Vec::with_capacity(4 * order.len()),
            order,
        };
        plan.cut(spec);
        Ok(plan)
    }

    /// Finds the rows and what each slice has of them.
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
                // In the slice rows count from the one of its first element.
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

    /// The same with a part of no rows for every slice of the tensor that has none of them.
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

    /// What each slice gets, in order.
    pub fn parts(&self) -> &[RowPart] {
        &self.parts
    }

    /// The rows of a part.
    pub fn indices(&self, part: &RowPart) -> Indices<'_> {
        Indices::new(&self.indices[part.indices.clone()])
    }

    /// Elements of all rows, each once.
    pub fn elements(&self) -> usize {
        self.width * (self.starts.len() - 1)
    }

    /// The places in the caller's list of the k-th row.
    fn places(&self, k: usize) -> impl Iterator<Item = usize> {
        let places = &self.order[self.starts[k] as usize..self.starts[k + 1] as usize];
        places.iter().map(|(_, place)| *place as usize)
    }

    /// The rows of the caller's list, one after the other; those of the same row are summed in the order
    /// given.
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

    /// Whether a row is named more than once.
    pub fn has_repeats(&self) -> bool {
        self.starts.len() - 1 < self.order.len()
    }

    /// Hands gathered elements from `first` on, as bytes, to their places in the caller's list: (element
    /// there, bytes).
    pub fn scatter(&self, first: usize, bytes: &[u8], mut put: impl FnMut(usize, &[u8])) {
        let end = first + bytes.len() / size_of::<f32>();
        let mut at = first;
        while at < end {
            let (row, within) = (at / self.width, at % self.width);
            let to = end.min(at - within + self.width);
            let bytes = &bytes[size_of::<f32>() * (at - first)..size_of::<f32>() * (to - first)];
            for place in self.places(row) {
                put(place * self.width + within, bytes);
            }
            at = to;
        }
    }
}

/// Checked indices as (row, place), sorted.
fn sorted(indices: &[i64], rows: u64) -> Vec<(u64, u32)> {
    let each = indices.iter().map(|row| *row as u64).zip(0_u32..);
    if indices.is_sorted() || rows > 1 << 32 {
        let mut order: Vec<_> = each.collect();
        order.sort_unstable();
        return order;
    }
    // Both in one number are sorted in half the time.
    let mut order: Vec<_> = each.map(|(row, place)| row << 32 | u64::from(place)).collect();
    order.sort_unstable();
    order.into_iter().map(|both| (both >> 32, both as u32)).collect()
}

/// A sparse gradient as its slices get it.
#[derive(Clone, Debug)]
pub struct Gathered {
    /// The rows.
    pub plan: Plan,
    /// Their values.
    pub values: Vec<f32>,
}

impl Gathered {
    /// Of checked values; sums that are not finite are refused if that is asked for. Slices without such rows
    /// get nothing, or an empty part.
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
}
