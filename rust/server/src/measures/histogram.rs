//! A histogram with fixed bounds. An observation is at most two relaxed additions.

use std::sync::atomic::{AtomicU64, Ordering};

/// Observations by size.
#[derive(Debug)]
pub(crate) struct Histogram<const N: usize> {
    bounds: &'static [u64; N],
    buckets: [AtomicU64; N],
    above: AtomicU64,
    sum: AtomicU64,
}

/// The observations at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Observed {
    /// Upper bounds, and the number of observations in each bucket.
    pub(crate) buckets: Vec<(u64, u64)>,
    /// Observations above the last bound.
    pub(crate) above: u64,
    pub(crate) sum: u64,
}

impl<const N: usize> Histogram<N> {
    pub(super) fn new(bounds: &'static [u64; N]) -> Self {
        let buckets = std::array::from_fn(|_| AtomicU64::new(0));
        Self { bounds, buckets, above: AtomicU64::new(0), sum: AtomicU64::new(0) }
    }

    pub(super) fn observe(&self, value: u64) {
        let bucket = self.bounds.iter().zip(&self.buckets).find(|(bound, _)| value <= **bound);
        bucket.map_or(&self.above, |(_, count)| count).fetch_add(1, Ordering::Relaxed);
        if value > 0 {
            self.sum.fetch_add(value, Ordering::Relaxed);
        }
    }

    pub(crate) fn observed(&self) -> Observed {
        let counts = self.buckets.iter().map(|count| count.load(Ordering::Relaxed));
        Observed {
            buckets: self.bounds.iter().copied().zip(counts).collect(),
            above: self.above.load(Ordering::Relaxed),
            sum: self.sum.load(Ordering::Relaxed),
        }
    }
}

impl Observed {
    /// Number of observations.
    pub(crate) fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum::<u64>() + self.above
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let histogram = Histogram::new(&[0, 1, 4]);
        for value in [0, 0, 1, 2, 4, 5, 100] {
            histogram.observe(value);
        }
        let observed = histogram.observed();
        assert_eq!(observed, Observed { buckets: vec![(0, 2), (1, 1), (4, 2)], above: 2, sum: 112 });
        assert_eq!(observed.count(), 7);
    }
}
