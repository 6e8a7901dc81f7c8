//! Distributes the slices of one call over threads that the caller lends.

use super::Store;
use crate::base::sync::{AtomicU32, Mutex, Ordering, lock};

/// Threads that the caller lends for one call. If the caller's threads spin while idle, the store's threads
/// would have to wait for their cores.
pub trait Team: Sync {
    /// Number of threads, including the caller's own.
    fn threads(&self) -> usize;
    /// Runs `work` on each thread, with the thread's number from 0 on; returns when all are done.
    fn run(&self, work: &(dyn Fn(usize) + Sync));
}

/// Number of elements from which a call uses more than one thread of a team. Fewer than for the store's own
/// threads, because lent threads are awake. Measured after backward with two threads: from this size on, 0.7
/// times the time of one thread.
const SHARED_OUT: usize = 1 << 16;

impl Store {
    /// The team for a call on `elements` elements, if it is large enough for one, and how many of its threads
    /// may work.
    pub(super) fn lent<'t>(
        &self,
        team: Option<&'t dyn Team>,
        elements: usize,
    ) -> Option<(&'t dyn Team, usize)> {
        let team = team.filter(|_| elements >= SHARED_OUT)?;
        let threads = self.shared.threads.min(team.threads());
        (threads > 1).then_some((team, threads))
    }
}

/// Runs `work` on all parts with `threads` threads of a team, and returns the results in order; `size`
/// returns the elements of a part. Each thread begins at its own share, which is the same in every call,
/// because its core's cache still has it. A thread that is done takes parts that others have not begun.
pub(super) fn shared_out<P: Sync, T: Send>(
    (team, threads): (&dyn Team, usize),
    parts: &[P],
    size: impl Fn(&P) -> usize,
    work: impl Fn(&P) -> T + Sync,
) -> Vec<T> {
    let shares = shares(parts.iter().map(size), threads);
    let begun: Vec<_> = parts.iter().map(|_| AtomicU32::new(0)).collect();
    let done = Mutex::new(Vec::with_capacity(parts.len()));
    let run = |thread: usize| {
        // The team runs all of its threads; those beyond `threads` have nothing to do.
        let Some(&from) = shares.get(thread) else { return };
        let order = (from..parts.len()).chain(0..from);
        let own = order.filter(|&k| begun[k].swap(1, Ordering::Relaxed) == 0);
        let own: Vec<_> = own.map(|k| (k, work(&parts[k]))).collect();
        lock(&done).extend(own);
    };
    team.run(&run);
    let mut done = std::mem::take(&mut *lock(&done));
    done.sort_unstable_by_key(|(k, _)| *k);
    done.into_iter().map(|(_, answer)| answer).collect()
}

/// The first part of each share; all shares have about the same number of elements.
fn shares(sizes: impl Iterator<Item = usize>, count: usize) -> Vec<usize> {
    let mut all = 0;
    let middle = |size: usize| {
        all += size;
        all - size / 2
    };
    let middles: Vec<_> = sizes.map(middle).collect();
    (0..count).map(|share| middles.partition_point(|middle| middle * count < share * all)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A team that claims the first number of threads and has the second.
    struct Others(usize, usize);

    impl Team for Others {
        fn threads(&self) -> usize {
            self.0
        }

        fn run(&self, work: &(dyn Fn(usize) + Sync)) {
            std::thread::scope(|scope| {
                let others: Vec<_> = (1..self.1).map(|thread| scope.spawn(move || work(thread))).collect();
                work(0);
                // ThreadSanitizer sees joins, but not the end of a scope.
                for other in others {
                    other.join().unwrap();
                }
            });
        }
    }

    #[test]
    fn shares_have_as_many_elements() {
        let shares = |parts: &[usize], count| shares(parts.iter().copied(), count);
        assert_eq!(shares(&[100; 10], 2), [0, 5]);
        assert_eq!(shares(&[10, 10, 100, 10, 100, 10], 2), [0, 3]);
        assert_eq!(shares(&[100], 4), [0, 0, 0, 1]);
        assert_eq!(shares(&[], 2), [0, 0]);
    }

    #[test]
    fn every_part_is_done_once_and_the_answers_are_in_order() {
        let parts: Vec<usize> = (0..200).collect();
        for (used, threads, there) in [(2, 2, 2), (3, 8, 8), (4, 4, 1), (1, 2, 2)] {
            let calls = AtomicU32::new(0);
            let work = |part: &usize| {
                calls.fetch_add(1, Ordering::Relaxed);
                part * 2
            };
            let done = shared_out((&Others(threads, there), used), &parts, |part| *part, work);
            assert_eq!(done, parts.iter().map(|part| part * 2).collect::<Vec<_>>());
            assert_eq!(calls.into_inner(), 200);
        }
    }

    #[test]
    fn no_more_threads_work_than_may() {
        let parts = [1; 50];
        let seen = Mutex::new(std::collections::HashSet::new());
        let work = |_: &usize| {
            lock(&seen).insert(std::thread::current().id());
            std::thread::yield_now();
        };
        shared_out((&Others(8, 8), 2), &parts, |part| *part, work);
        assert!((1..=2).contains(&lock(&seen).len()));
    }
}
