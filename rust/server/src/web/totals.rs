//! Counters that never fall from one answer to the next, although what they count comes and goes.

use std::collections::HashMap;

/// The counters of each worker, by its session.
pub(super) type Counts<const N: usize> = HashMap<u64, [u64; N]>;

/// What former answers have shown; workers have `N` counters.
#[derive(Debug)]
pub(super) struct Totals<const N: usize> {
    /// A sum over slices is too small for a moment while one of them is removed.
    shards: HashMap<(u32, &'static str), u64>,
    workers: Counts<N>,
    /// Sums of what workers without series of their own have counted; `None`: there were none.
    others: Option<[u64; N]>,
}

impl<const N: usize> Default for Totals<N> {
    fn default() -> Self {
        Self { shards: HashMap::new(), workers: HashMap::new(), others: None }
    }
}

impl<const N: usize> Totals<N> {
    /// The value of a shard's counter to show.
    pub(super) fn of_shard(&mut self, shard: u32, counter: &'static str, value: u64) -> u64 {
        let largest = self.shards.entry((shard, counter)).or_default();
        *largest = value.max(*largest);
        *largest
    }

    /// Adds what workers without series of their own have counted since the last answer. What those that have
    /// left, or have a series now, counted before remains.
    pub(super) fn others(&mut self, named: Counts<N>, rest: Counts<N>) -> Option<[u64; N]> {
        for (session, counts) in &rest {
            let before = self.workers.get(session).unwrap_or(&[0; N]);
            let sums = self.others.get_or_insert([0; N]);
            for ((sum, count), before) in sums.iter_mut().zip(counts).zip(before) {
                // A worker that has begun again counts from 0.
                *sum = sum.saturating_add(count.checked_sub(*before).unwrap_or(*count));
            }
        }
        self.workers = named.into_iter().chain(rest).collect();
        self.others
    }
}
