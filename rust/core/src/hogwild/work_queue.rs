//! Passes over examples by several threads. The threads take blocks of the order from one counter and never
//! wait for each other during a pass; they meet only at its end. Both estimators use it.

use crate::base::barrier::{Barrier, BarrierSeat};
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::{AtomicU64, Ordering, RwLock, read, write};

/// Called before every block; true ends the pass.
pub type Stop<'a> = &'a (dyn Fn() -> bool + Sync);

/// The examples of one pass, handed out in blocks.
pub(crate) struct Deal<'a> {
    len: usize,
    block: usize,
    next: AtomicU64,
    /// End of the examples to process: later ones were returned.
    end: AtomicU64,
    stop: Stop<'a>,
}

impl<'a> Deal<'a> {
    pub(crate) fn new(len: usize, block: usize, stop: Stop<'a>) -> Self {
        let (next, end) = (AtomicU64::new(0), AtomicU64::new(len as u64));
        Self { len, block: block.max(1), next, end, stop }
    }

    /// The next block, in ascending order for each thread. The thread must process the block or return it.
    pub(crate) fn take(&self) -> Option<std::ops::Range<usize>> {
        if (self.stop)() {
            return None;
        }
        let from = self.next.fetch_add(self.block as u64, Ordering::Relaxed) as usize;
        (from < self.len).then(|| from..(from + self.block).min(self.len))
    }

    /// Returns the block that begins at `from`, and all later ones.
    pub(crate) fn give_back(&self, from: usize) {
        self.end.fetch_min(from as u64, Ordering::Relaxed);
    }

    /// How many examples were processed, counted from the first. Valid once all threads are done.
    pub(crate) fn done(&self) -> usize {
        let taken = self.next.load(Ordering::Relaxed).min(self.len as u64);
        taken.min(self.end.load(Ordering::Relaxed)) as usize
    }
}

/// Runs `work` on `threads` threads, of which the caller's is the first, and returns all results in the order
/// of the threads. The argument of `work` is the thread's number.
pub(crate) fn together<T: Send>(threads: usize, work: impl Fn(usize) -> T + Sync) -> Result<Vec<T>> {
    let work = &work;
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        let mut results = vec![work(0)];
        for thread in others {
            let result = thread.join();
            results.push(result.map_err(|_| Error::new(Kind::Internal, "a training thread ended early"))?);
        }
        Ok(results)
    })
}

/// Runs `work` in rounds on threads that stay alive between them: starting a thread takes as long as learning
/// from some thousand examples, and a new thread finds its data in another core's cache. Between two rounds,
/// the caller's thread calls `next`, which changes the shared data and returns whether another round follows.
/// The work of a round may meet the other threads, and must end if they do not come.
pub(crate) fn rounds<S: Send + Sync>(
    threads: usize,
    shared: S,
    work: impl Fn(usize, &S, &BarrierSeat<'_>) + Sync,
    mut next: impl FnMut(&mut S) -> bool,
) -> Result<()> {
    let (barrier, shared, work) = (&Barrier::new(threads), &RwLock::new(shared), &work);
    std::thread::scope(|scope| {
        // Taken first, so that the other threads end whatever happens here.
        let seat = barrier.seat();
        let mut others = Vec::new();
        for thread in 1..threads {
            let rounds = move || {
                let seat = barrier.seat();
                while seat.meet() {
                    work(thread, &read(shared), &seat);
                    seat.meet();
                }
            };
            let failed = |e| Error::new(Kind::Internal, format!("cannot start a thread: {e}"));
            others.push(std::thread::Builder::new().spawn_scoped(scope, rounds).map_err(failed)?);
        }
        while seat.meet() {
            work(0, &read(shared), &seat);
            if !seat.meet() || !next(&mut write(shared)) {
                break;
            }
        }
        drop(seat);
        let ended =
            others.into_iter().map(std::thread::ScopedJoinHandle::join).filter(Result::is_err).count();
        if ended > 0 {
            return Err(Error::new(Kind::Internal, "a training thread ended early"));
        }
        Ok(())
    })
}

/// Fisher-Yates with its own generator (`SplitMix64`): the same seed gives the same order everywhere.
pub fn shuffle<T>(order: &mut [T], seed: u64) {
    let mut state = seed;
    for i in (1..order.len()).rev() {
        // A multiply-shift instead of a division; its bias is below 2^-32.
        let j = (u128::from(split_mix(&mut state)) * (i as u128 + 1)) >> 64;
        order.swap(i, j as usize);
    }
}

pub(crate) fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_is_dealt_once() {
        for threads in [1, 3] {
            let deal = Deal::new(1003, 10, &|| false);
            let taken =
                together(threads, |_| std::iter::from_fn(|| deal.take()).flatten().collect::<Vec<_>>());
            let mut taken = taken.unwrap().concat();
            taken.sort_unstable();
            assert_eq!(taken, (0..1003).collect::<Vec<_>>());
            assert_eq!(deal.done(), 1003);
        }
    }

    #[test]
    fn what_is_given_back_is_not_done() {
        let deal = Deal::new(100, 10, &|| false);
        assert_eq!((deal.take(), deal.take()), (Some(0..10), Some(10..20)));
        assert_eq!(deal.done(), 20);
        deal.give_back(10);
        assert_eq!(deal.done(), 10);
        assert_eq!(Deal::new(100, 10, &|| true).take(), None);
    }

    #[test]
    fn rounds_are_worked_by_all_and_changed_in_between() {
        for threads in [1, 2, 5] {
            let worked: Vec<_> = (0..threads).map(|_| AtomicU64::new(0)).collect();
            let all = || worked.iter().map(|own| own.load(Ordering::Relaxed)).sum::<u64>();
            let mut sums = Vec::new();
            let work = |thread: usize, round: &u64, seat: &BarrierSeat<'_>| {
                worked[thread].fetch_add(*round, Ordering::Relaxed);
                assert!(seat.meet());
                assert_eq!(all(), (1..=*round).sum::<u64>() * threads as u64);
            };
            let next = |round: &mut u64| {
                sums.push(all());
                *round += 1;
                *round <= 3
            };
            rounds(threads, 1, work, next).unwrap();
            assert_eq!(sums, [1, 3, 6].map(|sum| sum * threads as u64));
        }
    }

    #[test]
    fn a_thread_that_panics_ends_the_rounds_of_all() {
        let panics = |round: &u64, thread: usize| assert!(*round < 2 || thread != 2, "as intended");
        let mut begun = 0;
        let work = |thread: usize, round: &u64, seat: &BarrierSeat<'_>| {
            panics(round, thread);
            seat.meet();
        };
        let ended = rounds(4, 0, work, |round| {
            begun += 1;
            *round += 1;
            true
        });
        assert_eq!((ended.unwrap_err().kind, begun), (Kind::Internal, 2));
    }

    #[test]
    fn shuffle_permutes_and_repeats() {
        let order = |seed| {
            let mut order: Vec<u32> = (0..1000).collect();
            shuffle(&mut order, seed);
            order
        };
        let mut sorted = order(7);
        assert_eq!(sorted, order(7));
        assert_ne!(sorted, order(8));
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
        // Every element is as likely in every place.
        let mean = (0..4000).map(|seed| f64::from(order(seed)[0])).sum::<f64>() / 4000.0;
        assert!((mean - 499.5).abs() < 20.0, "{mean}");
    }
}
