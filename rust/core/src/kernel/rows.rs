//! Rows in a slice: the elements that a sparse push or pull names. A row is one index of a tensor's first
//! dimension. A row may straddle the border of two slices; each slice then has a part of it.

use crate::base::error::{Error, Kind, Result};
use std::ops::Range;

/// Row numbers of one slice in ascending order, in wire format: little-endian u32, counted from the row of
/// the slice's first element.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Indices<'a>(&'a [[u8; 4]]);

impl<'a> Indices<'a> {
    /// Reads whole numbers; trailing bytes are ignored.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes.as_chunks().0)
    }

    /// The number of rows.
    pub fn len(self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no rows.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The wire format.
    pub fn bytes(self) -> &'a [u8] {
        self.0.as_flattened()
    }

    #[inline(always)]
    fn get(self, i: usize) -> usize {
        u32::from_le_bytes(self.0[i]) as usize
    }
}

impl std::fmt::Debug for Indices<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} rows", self.len())
    }
}

/// Layout of a tensor's rows in one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// Elements of a row.
    width: usize,
    /// Elements of the first row before the slice.
    head: usize,
    /// Elements of the slice.
    len: usize,
}

impl RowLayout {
    /// The layout of a slice of `len` elements from `first` on, in a tensor with rows of `width` elements.
    pub fn new(first: usize, len: usize, width: usize) -> Self {
        Self { width, head: first.checked_rem(width).unwrap_or(0), len }
    }

    /// The number of rows that have elements in the slice.
    pub fn rows(self) -> usize {
        if self.len == 0 || self.width == 0 { 0 } else { (self.head + self.len).div_ceil(self.width) }
    }

    /// The elements of consecutive rows.
    #[inline(always)]
    fn piece(self, rows: Range<usize>) -> Range<usize> {
        let start = (rows.start * self.width).saturating_sub(self.head);
        start..(rows.end * self.width - self.head).min(self.len)
    }

    /// How many elements these rows have in the slice; fails unless the rows ascend and are in the slice.
    pub fn elements(self, indices: Indices<'_>) -> Result<usize> {
        let rows = self.rows();
        let mut least = 0;
        for i in 0..indices.len() {
            let row = indices.get(i);
            if row < least || row >= rows {
                let error = Error::new(Kind::Frame, format!("invalid index {i} of a slice's rows"));
                return Err(error.expected(format!("ascending numbers below {rows}"), row));
            }
            least = row + 1;
        }
        let Some(last) = indices.len().checked_sub(1) else { return Ok(0) };
        // Every row is whole, except perhaps the first and the last row of the slice.
        let missing = |row: usize| self.width - self.piece(row..row + 1).len();
        let (first, last) = (indices.get(0), indices.get(last));
        let missing = missing(first) + if first == last { 0 } else { missing(last) };
        Ok(indices.len() * self.width - missing)
    }

    /// The elements of these rows, which [`RowLayout::elements`] has checked, in as few ranges as possible.
    pub(crate) fn runs(self, indices: Indices<'_>) -> Runs<'_> {
        Runs { layout: self, indices, next: 0, rest: 0..0 }
    }
}

/// Ranges of elements of a slice, in ascending order.
pub(crate) struct Runs<'a> {
    layout: RowLayout,
    indices: Indices<'a>,
    next: usize,
    rest: Range<usize>,
}

impl Runs<'_> {
    /// One range.
    pub(crate) fn one(range: Range<usize>) -> Self {
        Self { layout: RowLayout::new(0, 0, 0), indices: Indices(&[]), next: 0, rest: range }
    }

    /// The next range, cut to at most `most` elements; `None` at the end and for an empty range.
    #[inline(always)]
    pub(crate) fn next_of(&mut self, most: usize) -> Option<Range<usize>> {
        if self.rest.is_empty() {
            if self.next == self.indices.len() {
                return None;
            }
            let first = self.indices.get(self.next);
            let mut end = first;
            while self.next < self.indices.len() && self.indices.get(self.next) == end {
                (end, self.next) = (end + 1, self.next + 1);
            }
            self.rest = self.layout.piece(first..end);
        }
        let now = self.rest.start..self.rest.end.min(self.rest.start.saturating_add(most));
        self.rest.start = now.end;
        (!now.is_empty()).then_some(now)
    }
}

/// A set of rows of a slice.
#[derive(Debug)]
pub(crate) struct RowSet {
    /// One bit per row.
    words: Vec<u64>,
}

impl RowSet {
    /// An empty set.
    pub(crate) fn of(layout: RowLayout) -> Self {
        Self { words: vec![0; layout.rows().div_ceil(64)] }
    }

    /// Bytes of memory for a set.
    pub(crate) fn bytes_for(layout: RowLayout) -> u64 {
        8 * layout.rows().div_ceil(64) as u64
    }

    /// Adds rows that [`RowLayout::elements`] has checked.
    pub(crate) fn insert(&mut self, indices: Indices<'_>) {
        for row in (0..indices.len()).map(|i| indices.get(i)) {
            self.words[row / 64] |= 1 << (row % 64);
        }
    }

    /// Removes all rows and returns them in wire format.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        let mut indices = Vec::new();
        for (k, word) in self.words.iter_mut().enumerate() {
            while *word != 0 {
                let row = 64 * k as u32 + word.trailing_zeros();
                indices.extend_from_slice(&row.to_le_bytes());
                *word &= *word - 1;
            }
        }
        indices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_gives_each_of_its_rows_once_and_ascending() {
        let layout = RowLayout::new(0, 600, 3);
        let mut set = RowSet::of(layout);
        for rows in [[3, 64, 199].as_slice(), &[0, 64], &[], &[63, 65]] {
            set.insert(Indices::new(&bytes(rows)));
        }
        assert_eq!(set.take(), bytes(&[0, 3, 63, 64, 65, 199]));
        assert!(set.take().is_empty());
        assert_eq!((RowSet::of(RowLayout::new(0, 0, 0)).take(), RowSet::bytes_for(layout)), (vec![], 32));
    }

    fn bytes(rows: &[u32]) -> Vec<u8> {
        rows.iter().flat_map(|row| row.to_le_bytes()).collect()
    }

    /// Against the definition: element `e` of the slice belongs to row `(first + e) / width - first / width`.
    #[test]
    fn rows_are_what_their_elements_say() {
        for (first, len, width) in
            [(0, 12, 3), (12, 10, 5), (14, 10, 5), (7, 3, 16), (16, 16, 16), (5, 0, 2), (9, 7, 1)]
        {
            let layout = RowLayout::new(first, len, width);
            let row_of = |e: usize| (first + e) / width - first / width;
            assert_eq!(layout.rows(), if len == 0 { 0 } else { row_of(len - 1) + 1 });
            for chosen in 0..1_u32 << layout.rows() {
                let rows: Vec<u32> = (0..layout.rows() as u32).filter(|row| chosen >> row & 1 == 1).collect();
                let expected: Vec<usize> = (0..len).filter(|e| rows.contains(&(row_of(*e) as u32))).collect();
                let bytes = bytes(&rows);
                let indices = Indices::new(&bytes);
                assert_eq!(layout.elements(indices).unwrap(), expected.len());
                for most in [1, 2, 7, usize::MAX] {
                    let mut runs = layout.runs(indices);
                    let got: Vec<usize> = std::iter::from_fn(|| runs.next_of(most)).flatten().collect();
                    assert_eq!(got, expected, "{layout:?} {rows:?}");
                }
            }
        }
    }

    #[test]
    fn what_does_not_ascend_or_lies_outside_is_refused() {
        let layout = RowLayout::new(14, 10, 5);
        for rows in [[0, 0].as_slice(), &[1, 0], &[3], &[0, 1, u32::MAX]] {
            assert_eq!(layout.elements(Indices::new(&bytes(rows))).unwrap_err().kind, Kind::Frame);
        }
        assert!(RowLayout::new(0, 0, 0).elements(Indices::new(&bytes(&[0]))).is_err());
        assert_eq!(RowLayout::new(0, 0, 0).elements(Indices::new(&[])).unwrap(), 0);
    }
}
