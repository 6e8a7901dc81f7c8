//! The record of a run for its readers: finished steps, the curve of the loss, messages, sums.

use crate::settings::CODECS;
use std::collections::VecDeque;

/// Numbers of a finished step.
pub(crate) const ROW: usize = 20;
/// Most finished steps to keep.
const MOST_ROWS: usize = 1 << 14;
/// Most messages to keep.
const MOST_MESSAGES: usize = 1 << 10;
/// Most points of the curve; beyond, every second one is dropped.
const MOST_POINTS: usize = 1 << 12;
/// Columns of the histogram of the staleness; the last one has all larger values.
pub(crate) const COLUMNS: usize = 256;

/// Entries with consecutive numbers, of which the last ones are kept.
#[derive(Debug)]
pub(crate) struct Recent<T> {
    kept: VecDeque<T>,
    most: usize,
    /// Number of entries so far, dropped ones included.
    pub(crate) count: u64,
}

impl<T> Recent<T> {
    fn new(most: usize) -> Self {
        Self { kept: VecDeque::new(), most, count: 0 }
    }

    /// Adds an entry.
    pub(crate) fn push(&mut self, entry: T) {
        if self.kept.len() == self.most {
            self.kept.pop_front();
        }
        self.kept.push_back(entry);
        self.count += 1;
    }

    /// The kept entries from a number on, each with its number.
    pub(crate) fn since(&self, from: f64) -> impl Iterator<Item = (u64, &T)> {
        let first = self.count - self.kept.len() as u64;
        // NaN counts as the first number.
        let skipped = (from as u64).saturating_sub(first) as usize;
        self.kept.iter().enumerate().skip(skipped).map(move |(k, entry)| (first + k as u64, entry))
    }
}

/// A message about one worker, or about all.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) time: f64,
    pub(crate) kind: &'static str,
    pub(crate) worker: Option<usize>,
    pub(crate) text: String,
}

/// The record of a run.
#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) rows: Recent<[f64; ROW]>,
    pub(crate) messages: Recent<Message>,
    pub(crate) curve: Vec<[f64; 4]>,
    /// Factor on the setting for updates between points of the curve.
    pub(crate) thinned: u64,
    pub(crate) staleness: [u64; COLUMNS],
    /// Pushes and their bytes, by codec.
    pub(crate) codecs: [[u64; 2]; CODECS.len()],
    pub(crate) plain_bytes: u64,
    pub(crate) acknowledged: u64,
    pub(crate) refused: u64,
    pub(crate) handled: u64,
    /// The update at which a value left all bounds; 0 if none did.
    pub(crate) diverged: u64,
    pub(crate) loss: f64,
    pub(crate) error: f64,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self {
            rows: Recent::new(MOST_ROWS),
            messages: Recent::new(MOST_MESSAGES),
            curve: Vec::new(),
            thinned: 1,
            staleness: [0; COLUMNS],
            codecs: [[0; 2]; CODECS.len()],
            plain_bytes: 0,
            acknowledged: 0,
            refused: 0,
            handled: 0,
            diverged: 0,
            loss: f64::NAN,
            error: f64::NAN,
        }
    }

    /// Adds a point to the curve, which keeps its first one.
    pub(crate) fn point(&mut self, updates: u64, time: f64) {
        if self.curve.len() == MOST_POINTS {
            let mut k = 0;
            self.curve.retain(|_| {
                k += 1;
                k % 2 == 1
            });
            self.thinned *= 2;
        }
        self.curve.push([updates as f64, time, self.loss, self.error]);
    }

    /// Counts the bytes of a step, which pushed if there are any.
    pub(crate) fn count_bytes(&mut self, codec: usize, bytes: u64) {
        let [pushes, sum] = &mut self.codecs[codec];
        *pushes += u64::from(bytes > 0);
        *sum += bytes;
    }

    /// All bytes that were pushed.
    pub(crate) fn bytes(&self) -> u64 {
        self.codecs.iter().map(|[_, bytes]| bytes).sum()
    }

    /// Counts the staleness of a push.
    pub(crate) fn count(&mut self, staleness: u64) {
        self.staleness[staleness.min(COLUMNS as u64 - 1) as usize] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_entries_are_kept_with_their_numbers() {
        let mut recent = Recent::new(3);
        (0..5).for_each(|k| recent.push(k * 10));
        let since = |from| recent.since(from).map(|(k, entry)| (k, *entry)).collect::<Vec<_>>();
        assert_eq!(since(0.0), [(2, 20), (3, 30), (4, 40)]);
        assert_eq!(since(4.0), [(4, 40)]);
        assert_eq!(since(9.0), []);
        assert_eq!(since(f64::NAN).len(), 3);
    }

    #[test]
    fn a_long_curve_is_thinned() {
        let mut log = Log::new();
        (0..3 * MOST_POINTS as u64).for_each(|k| log.point(k, k as f64));
        assert!(log.curve.len() <= MOST_POINTS && log.curve[0][0] == 0.0 && log.thinned >= 2);
    }
}
