//! Rows in a slice: which elements a sparse push or pull means. A row is what one index of a tensor's first
//! dimension names; it may straddle the border of two slices, and then each slice has its part of it.

use crate::base::error::{Error, Kind, Result};
use std::ops::Range;

/// Numbers of rows of one slice, ascending, as they travel: little-endian u32, counted from the row that the
/// slice's first element belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Indices<'a>(&'a [[u8; 4]]);

impl<'a> Indices<'a> {
    /// Whole numbers; a rest of less is left out.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes.as_chunks().0)
    }

    /// How many there are.
    pub fn len(self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// As they travel.
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

/// How the rows of a tensor lie in one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Elements of a row.
    width: usize,
    /// Elements of the first row that lie before the slice.
    head: usize,
    /// Elements of the slice.
    len: usize,
}

impl Layout {
    /// Of a slice of `len` elements from `first` on, in a tensor whose rows have `width`.
    pub fn new(first: usize, len: usize, width: usize) -> Self {
        Self { width, head: first.checked_rem(width).unwrap_or(0), len }
    }

    /// Rows that have elements in the slice.
    pub fn rows(self) -> usize {
        if self.len == 0 || self.width == 0 { 0 } else { (self.head + self.len).div_ceil(self.width) }
    }

    /// The elements of rows `rows`, which follow one another.
    #[inline(always)]
    fn piece(self, rows: Range<usize>) -> Range<usize> {
        let start = (rows.start * self.width).saturating_sub(self.head);
        start..(rows.end * self.width - self.head).min(self.len)
    }

    /// How many elements these rows have in the slice; fails unless they ascend and lie there.
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
        // All rows are whole but, perhaps, the first and the last of the slice.
        let missing = |row: usize| self.width - self.piece(row..row + 1).len();
        let (first, last) = (indices.get(0), indices.get(last));
        let missing = missing(first) + if first == last { 0 } else { missing(last) };
        Ok(indices.len() * self.width - missing)
    }

    /// The elements of these rows, which [`Layout::elements`] has checked, as few ranges as there can be.
    pub(crate) fn runs(self, indices: Indices<'_>) -> Runs<'_> {
        Runs { layout: self, indices, next: 0, rest: 0..0 }
    }
}

/// Ranges of elements of a slice, in ascending order.
pub(crate) struct Runs<'a> {
    layout: Layout,
    indices: Indices<'a>,
    next: usize,
    rest: Range<usize>,
}

impl Runs<'_> {
    /// The next range, or as much of it as `most`; `None` at the end and for none.
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

/// Rows of a slice, each once.
#[derive(Debug)]
pub(crate) struct RowSet {
    /// A bit for each row.
    words: Vec<u64>,
}

impl RowSet {
    /// None yet.
    pub(crate) fn of(layout: Layout) -> Self {
        Self { words: vec![0; layout.rows().div_ceil(64)] }
    }

    /// What it takes.
    pub(crate) fn bytes_for(layout: Layout) -> u64 {
        8 * layout.rows().div_ceil(64) as u64
    }

    /// With these, which [`Layout::elements`] has checked.
    pub(crate) fn insert(&mut self, indices: Indices<'_>) {
        for row in (0..indices.len()).map(|i| indices.get(i)) {
            self.words[row / 64] |= 1 << (row % 64);
        }
    }

    /// Takes all of them out.
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
        let layout = Layout::new(0, 600, 3);
        let mut set = RowSet::of(layout);
        for rows in [[3, 64, 199].as_slice(), &[0, 64], &[], &[63, 65]] {
            set.insert(Indices::new(&bytes(rows)));
        }
        assert_eq!(set.take(), bytes(&[0, 3, 63, 64, 65, 199]));
        assert!(set.take().is_empty());
        assert_eq!((RowSet::of(Layout::new(0, 0, 0)).take(), RowSet::bytes_for(layout)), (vec![], 32));
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
            let layout = Layout::new(first, len, width);
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
        let layout = Layout::new(14, 10, 5);
        for rows in [[0, 0].as_slice(), &[1, 0], &[3], &[0, 1, u32::MAX]] {
            assert_eq!(layout.elements(Indices::new(&bytes(rows))).unwrap_err().kind, Kind::Frame);
        }
        assert!(Layout::new(0, 0, 0).elements(Indices::new(&bytes(&[0]))).is_err());
        assert_eq!(Layout::new(0, 0, 0).elements(Indices::new(&[])).unwrap(), 0);
    }
}
