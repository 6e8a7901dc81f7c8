//! Examples in the caller's memory: dense rows, or compressed sparse rows (CSR) with 32-bit or 64-bit
//! numbers.

use crate::base::block::{Block, blocks};
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel, prefetch};
use crate::memory::RacyBuffer;

/// Non-zeros whose values fill a cache line.
const PART: usize = 16;

/// An integer type of CSR.
pub trait Number: Copy + Send + Sync + std::fmt::Display + PartialOrd {
    /// The number as an index; a negative one is out of every range.
    fn index(self) -> usize;
}

impl Number for i32 {
    #[inline(always)]
    fn index(self) -> usize {
        self as usize
    }
}

impl Number for i64 {
    #[inline(always)]
    fn index(self) -> usize {
        self as usize
    }
}

/// Compressed sparse rows: row i has the entries `starts[i]..starts[i + 1]` of `values` and `columns`.
#[derive(Clone, Copy, Debug)]
pub struct Csr<'a, I> {
    /// Non-zeros, row by row.
    pub values: &'a [f32],
    /// The column of each non-zero.
    pub columns: &'a [I],
    /// The start of each row, and the end of the last one.
    pub starts: &'a [I],
}

/// A matrix of examples.
#[derive(Clone, Copy, Debug)]
pub enum FeatureRows<'a> {
    /// Row-major values.
    Dense(&'a [f32]),
    /// CSR with 32-bit numbers.
    Csr32(Csr<'a, i32>),
    /// CSR with 64-bit numbers.
    Csr64(Csr<'a, i64>),
}

impl FeatureRows<'_> {
    /// Prefetches the start of row `i`.
    #[inline(always)]
    pub(super) fn fetch_start(&self, i: usize) {
        match self {
            Self::Dense(_) => {}
            Self::Csr32(csr) => prefetch(&csr.starts[i..=i]),
            Self::Csr64(csr) => prefetch(&csr.starts[i..=i]),
        }
    }

    /// Checks every number once, so that training need not: `rows` rows of `columns` columns.
    pub fn check(&self, rows: usize, columns: usize) -> Result<()> {
        match self {
            Self::Dense(values) => {
                let expected = rows.checked_mul(columns);
                if expected == Some(values.len()) {
                    return Ok(());
                }
                let error = Error::new(Kind::Shape, "the matrix has another number of values");
                Err(error.expected(format!("{rows} x {columns}"), values.len()))
            }
            Self::Csr32(csr) => csr.check(rows, columns),
            Self::Csr64(csr) => csr.check(rows, columns),
        }
    }
}

impl<'a, I: Number> Csr<'a, I> {
    fn check(&self, rows: usize, columns: usize) -> Result<()> {
        let malformed = |what: &str, expected: String, got: String| {
            Err(Error::new(Kind::Shape, format!("malformed sparse matrix: {what}")).expected(expected, got))
        };
        if self.starts.len() != rows + 1 {
            let expected = format!("{} starts of rows", rows + 1);
            return malformed("indptr", expected, self.starts.len().to_string());
        }
        let end = self.starts.last().map_or(0, |end| end.index());
        if end > self.values.len() || end > self.columns.len() {
            let got = self.values.len().min(self.columns.len());
            return malformed("indptr", format!("{end} values"), got.to_string());
        }
        // The largest as an unsigned number, because a negative number then exceeds every valid one.
        let largest = self.columns[..end].iter().map(|c| c.index()).max();
        if largest.is_some_and(|c| c >= columns) {
            let wrong = self.columns[..end].iter().find(|c| c.index() >= columns);
            let got = wrong.map(I::to_string).unwrap_or_default();
            return malformed("indices", format!("columns 0 to {}", columns.saturating_sub(1)), got);
        }
        if self.starts.first().is_some_and(|first| first.index() != 0)
            || self.starts.windows(2).any(|pair| pair[0] > pair[1])
        {
            return malformed("indptr", "ascending starts from 0".into(), "others".into());
        }
        Ok(())
    }

    /// Columns and values of a row.
    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> (&'a [I], &'a [f32]) {
        let range = self.starts[i].index()..self.starts[i + 1].index();
        (&self.columns[range.clone()], &self.values[range])
    }
}

/// One example's features.
pub(super) trait FeatureRow {
    /// The dot product with the weights.
    fn dot(&self, isa: Isa, weights: &RacyBuffer) -> f64;
    /// Adds a multiple of the row to the weights.
    fn add(&self, isa: Isa, weights: &RacyBuffer, step: f32) {
        self.add_and_fetch(isa, weights, step, None);
    }
    /// Adds a multiple of the row to the weights, and at the same time prefetches another row. The prefetches
    /// are spread out line by line, because a core stalls when it issues many at once.
    fn add_and_fetch(&self, isa: Isa, weights: &RacyBuffer, step: f32, other: Option<&Self>);
    /// Prefetches the row.
    fn fetch(&self);
    /// Visits the columns with their values.
    fn each(&self, visit: impl FnMut(usize, f32));
}

/// A row stored as its non-zeros.
pub(super) struct Sparse<'a, I> {
    columns: &'a [I],
    values: &'a [f32],
}

impl<'a, I: Number> Sparse<'a, I> {
    #[inline(always)]
    pub(super) fn row(csr: Csr<'a, I>, i: usize) -> Self {
        let (columns, values) = csr.row(i);
        Self { columns, values }
    }
}

impl<I: Number> FeatureRow for Sparse<'_, I> {
    #[inline(always)]
    fn dot(&self, _isa: Isa, weights: &RacyBuffer) -> f64 {
        // Four sums, because each addition to a single sum would wait for the previous one.
        let mut sums = [0.0_f32; 4];
        let (columns, values) = (self.columns.as_chunks::<4>(), self.values.as_chunks::<4>());
        for (columns, values) in columns.0.iter().zip(values.0) {
            for k in 0..4 {
                sums[k] += weights.get(columns[k].index()) * values[k];
            }
        }
        for (column, value) in columns.1.iter().zip(values.1) {
            sums[0] += weights.get(column.index()) * value;
        }
        sums.map(f64::from).iter().sum()
    }

    #[inline(always)]
    fn add_and_fetch(&self, _isa: Isa, weights: &RacyBuffer, step: f32, other: Option<&Self>) {
        let (columns, values) = other.map_or((&[][..], &[][..]), |other| (other.columns, other.values));
        let mut lines = columns.chunks(PART).zip(values.chunks(PART));
        for (columns, values) in self.columns.chunks(PART).zip(self.values.chunks(PART)) {
            if let Some((columns, values)) = lines.next() {
                prefetch(columns);
                prefetch(values);
            }
            for (column, value) in columns.iter().zip(values) {
                let j = column.index();
                weights.set(j, weights.get(j) + step * value);
            }
        }
        for (columns, values) in lines {
            prefetch(columns);
            prefetch(values);
        }
    }

    #[inline(always)]
    fn fetch(&self) {
        prefetch(self.columns);
        prefetch(self.values);
    }

    #[inline(always)]
    fn each(&self, mut visit: impl FnMut(usize, f32)) {
        self.columns.iter().zip(self.values).for_each(|(column, value)| visit(column.index(), *value));
    }
}

/// A row with all features.
pub(super) struct Dense<'a>(&'a [f32]);

impl<'a> Dense<'a> {
    #[inline(always)]
    pub(super) fn row(values: &'a [f32], columns: usize, i: usize) -> Self {
        Self(&values[i * columns..(i + 1) * columns])
    }
}

/// A dot product in 16 partial sums, in the same order for every instruction set.
struct Dot<'a>(&'a [f32], &'a [f32]);

impl Kernel for Dot<'_> {
    type Out = f64;
    #[inline(always)]
    fn run(self) -> f64 {
        let ((a, a_rest), (b, b_rest)) = (self.0.as_chunks::<16>(), self.1.as_chunks::<16>());
        let mut sums = [0.0_f32; 16];
        for (a, b) in a.iter().zip(b) {
            for k in 0..16 {
                sums[k] += a[k] * b[k];
            }
        }
        let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(a * b)).sum();
        sums.map(f64::from).iter().sum::<f64>() + rest
    }
}

/// `x += step * y`.
struct Add<'a>(&'a mut [f32], f32, &'a [f32]);

impl Kernel for Add<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        self.0.iter_mut().zip(self.2).for_each(|(x, y)| *x += self.1 * y);
    }
}

impl FeatureRow for Dense<'_> {
    fn dot(&self, isa: Isa, weights: &RacyBuffer) -> f64 {
        let mut room = Block::ZERO;
        let product = |(at, len): (usize, usize)| {
            let room = &mut room.0[..len];
            weights.load(isa, at, room);
            isa.run(Dot(room, &self.0[at..at + len]))
        };
        blocks(self.0.len()).map(product).sum()
    }

    fn add_and_fetch(&self, isa: Isa, weights: &RacyBuffer, step: f32, other: Option<&Self>) {
        if let Some(other) = other {
            other.fetch();
        }
        let mut room = Block::ZERO;
        for (at, len) in blocks(self.0.len()) {
            let room = &mut room.0[..len];
            weights.load(isa, at, room);
            isa.run(Add(room, step, &self.0[at..at + len]));
            weights.store(isa, at, room);
        }
    }

    /// Prefetches only the start; the hardware prefetches the rest of a long row while it is read.
    #[inline(always)]
    fn fetch(&self) {
        prefetch(&self.0[..self.0.len().min(256)]);
    }

    fn each(&self, mut visit: impl FnMut(usize, f32)) {
        self.0.iter().enumerate().for_each(|(column, value)| visit(column, *value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_matrices_are_refused() {
        let values = &[1.0, 2.0, 3.0][..];
        let good = Csr { values, columns: &[0, 2, 1], starts: &[0, 2, 2, 3] };
        assert_eq!(good.check(3, 3), Ok(()));
        assert_eq!(good.row(0), (&[0, 2][..], &[1.0, 2.0][..]));
        assert_eq!(good.row(1), (&[][..], &[][..]));
        for (columns, starts) in [
            (&[0, 3, 1][..], &[0, 2, 2, 3][..]),
            (&[0, -1, 1], &[0, 2, 2, 3]),
            (&[0, 2], &[0, 2, 2, 3]),
            (&[0, 2, 1], &[0, 2, 3]),
            (&[0, 2, 1], &[1, 2, 2, 3]),
            (&[0, 2, 1], &[0, 3, 2, 3]),
            (&[0, 2, 1], &[0, -1, 2, 3]),
            (&[0, 2, 1], &[0, 2, 2, 4]),
            (&[0, 2, 1], &[0, 2, 2, -3]),
        ] {
            let error = Csr { values, columns, starts }.check(3, 3).unwrap_err();
            assert_eq!(error.kind, Kind::Shape, "{columns:?} {starts:?}");
        }
        assert_eq!(FeatureRows::Dense(values).check(1, 3), Ok(()));
        assert_eq!(FeatureRows::Dense(values).check(2, 2).unwrap_err().kind, Kind::Shape);
        assert_eq!(FeatureRows::Dense(values).check(usize::MAX, 2).unwrap_err().kind, Kind::Shape);
        assert_eq!(FeatureRows::Csr64(Csr { values: &[], columns: &[], starts: &[0] }).check(0, 5), Ok(()));
    }
}
