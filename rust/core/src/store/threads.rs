//! The slices of one call, shared out among the store's own threads, of which the caller's is one.

use crate::sync::{AtomicU32, Mutex, MutexGuard, Ordering, lock};
use std::sync::OnceLock;

/// Elements above which one call is worth two threads, and one more for each half as much.
const PARALLEL: usize = 1 << 17;

#[derive(Debug)]
pub(super) struct Threads {
    count: usize,
    /// All but the caller's, started by the first call that is large enough for them.
    others: OnceLock<Option<rayon::ThreadPool>>,
    /// Held by the call that the others work for. One that comes meanwhile works alone, so it waits for nobody else's work.
    taken: Mutex<()>,
}

impl Threads {
    pub(super) fn new(count: usize) -> Self {
        Self { count, others: OnceLock::new(), taken: Mutex::default() }
    }

    /// Does the work of all parts, and gives what became of each, in their order; `size`: elements of one. There are `elements` in
    /// all, and at least so many parts. Inlined with the work of a small call, which knows of no threads.
    #[inline(always)]
    pub(super) fn each<P: Sync, T: Send>(
        &self,
        (elements, least): (usize, usize),
        parts: impl Iterator<Item = P>,
        size: impl Fn(&P) -> usize,
        work: impl Fn(&P) -> T + Sync,
    ) -> Vec<T> {
        if let Some((others, _taken)) = self.take(elements) {
            let (parts, count) = (parts.collect::<Vec<_>>(), self.count.min(2 * elements / PARALLEL));
            return together(others, &parts, shares(parts.iter().map(size), count), &work);
        }
        let mut done = Vec::with_capacity(least);
        for part in parts {
            done.push(work(&part));
        }
        done
    }

    fn take(&self, elements: usize) -> Option<(&rayon::ThreadPool, MutexGuard<'_, ()>)> {
        if elements < PARALLEL || self.count == 1 {
            return None;
        }
        let taken = self.taken.try_lock().ok()?;
        let build = || rayon::ThreadPoolBuilder::new().num_threads(self.count - 1).build().ok();
        Some((self.others.get_or_init(build).as_ref()?, taken))
    }
}

/// Each thread begins at its own share, which is the same from call to call: its core's cache still has it. Whoever is done
/// goes on with what the next ones have not begun.
fn together<P: Sync, T: Send>(
    others: &rayon::ThreadPool,
    parts: &[P],
    shares: Vec<usize>,
    work: &(impl Fn(&P) -> T + Sync),
) -> Vec<T> {
    let begun: Vec<_> = parts.iter().map(|_| AtomicU32::new(0)).collect();
    let done = Mutex::new(Vec::with_capacity(parts.len()));
    let run = |from: usize| {
        let order = (from..parts.len()).chain(0..from);
        let own = order.filter(|&k| begun[k].swap(1, Ordering::Relaxed) == 0);
        let own: Vec<_> = own.map(|k| (k, work(&parts[k]))).collect();
        lock(&done).extend(own);
    };
    let run = &run;
    others.in_place_scope(|scope| {
        for &from in &shares[1..] {
            scope.spawn(move |_| run(from));
        }
        run(shares[0]);
    });
    let mut done = std::mem::take(&mut *lock(&done));
    done.sort_unstable_by_key(|(k, _)| *k);
    done.into_iter().map(|(_, answer)| answer).collect()
}

/// The first part of each share, shares having about as many elements.
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

    fn each<T: Send>(threads: &Threads, parts: &[usize], work: impl Fn(&usize) -> T + Sync) -> Vec<T> {
        threads.each((parts.iter().sum(), parts.len()), parts.iter().copied(), |part| *part, work)
    }

    #[test]
    fn shares_have_as_many_elements() {
        let shares = |parts: &[usize], count| shares(parts.iter().copied(), count);
        assert_eq!(shares(&[100; 10], 2), [0, 5]);
        assert_eq!(shares(&[10, 10, 100, 10, 100, 10], 2), [0, 3]);
        assert_eq!(shares(&[1], 4), [0, 1, 1, 1]);
    }

    #[test]
    fn every_part_is_done_once_and_the_answers_are_in_order() {
        let parts: Vec<usize> = (0..200).map(|k| PARALLEL / 100 + k).collect();
        for count in [1, 2, 3, 8] {
            let (threads, calls) = (Threads::new(count), AtomicU32::new(0));
            let work = |part: &usize| {
                calls.fetch_add(1, Ordering::Relaxed);
                part * 2
            };
            let done = each(&threads, &parts, work);
            assert_eq!(done, parts.iter().map(|part| part * 2).collect::<Vec<_>>());
            assert_eq!(calls.into_inner(), 200);
        }
    }

    #[test]
    fn a_call_beside_another_one_works_alone() {
        let threads = Threads::new(2);
        let inner = |_: &usize| each(&threads, &[PARALLEL], |part| *part);
        assert_eq!(each(&threads, &[PARALLEL / 2; 2], inner), [[PARALLEL], [PARALLEL]]);
    }
}
