//! The order of a pass over the ratings.

use super::Ratings;
use crate::base::sync::{RwLock, write};
use crate::hogwild::work_queue::{shuffle, split_mix};

/// Users whose ratings are shuffled together: few enough for a core's own cache, and enough that a step
/// seldom waits for the previous one.
pub(super) const GROUP: usize = 16;
/// Maximum number of queues; each takes memory for every user. More threads than this share queues.
pub(super) const QUEUES: usize = 16;

/// The order of a pass: a queue per thread. A thread whose queue is empty helps with the others.
#[derive(Debug)]
pub struct Order {
    /// The ratings of each thread's items, sorted by user: those of user u and thread t begin at
    /// `starts[t * users + u]`.
    sorted: Vec<u32>,
    starts: Vec<usize>,
    users: usize,
    /// Between passes, one thread changes each queue.
    pub(super) queues: Vec<RwLock<Vec<u32>>>,
}

impl Order {
    /// All ratings in the given order, in one queue for all threads.
    pub fn new(ratings: Ratings<'_>, users: usize, threads: usize) -> Self {
        let (count, threads) = (ratings.values.len(), threads.clamp(1, QUEUES));
        let place = |i: usize| ratings.items[i] as usize % threads * users + ratings.users[i] as usize;
        let mut starts = vec![0; threads * users + 1];
        for i in 0..count {
            starts[place(i) + 1] += 1;
        }
        for k in 1..starts.len() {
            starts[k] += starts[k - 1];
        }
        let (mut next, mut sorted) = (starts.clone(), vec![0; count]);
        for i in 0..count {
            sorted[next[place(i)]] = i as u32;
            next[place(i)] += 1;
        }
        Self { sorted, starts, users, queues: vec![RwLock::new((0..count as u32).collect())] }
    }

    /// Splits a single queue for all threads into one per thread.
    pub(super) fn divide(&mut self) {
        let parts = (self.starts.len() - 1) / self.users.max(1);
        if self.queues.len() < parts {
            let part = |k| self.starts[k * self.users]..self.starts[(k + 1) * self.users];
            self.queues = (0..parts).map(|k| RwLock::new(self.sorted[part(k)].to_vec())).collect();
        }
    }

    /// Gives one queue a new order. Each thread has its own items. It visits groups of users one after the
    /// other in a random order and starts at a different group than the other threads, so threads seldom meet
    /// at a row. The ratings of a group are shuffled.
    pub(super) fn shuffle(&self, queue: usize, seed: u64) {
        let mut state = seed;
        let mut turns: Vec<usize> = (0..self.users).collect();
        shuffle(&mut turns, split_mix(&mut state));
        state = state.wrapping_add(queue as u64);
        let groups = self.users.div_ceil(GROUP);
        let skipped = queue * groups / self.queues.len();
        let mut order = write(&self.queues[queue]);
        let mut to = 0;
        for k in 0..groups {
            let (first, from) = ((k + skipped) % groups * GROUP, to);
            for user in &turns[first..(first + GROUP).min(self.users)] {
                let place = queue * self.users + user;
                let own = &self.sorted[self.starts[place]..self.starts[place + 1]];
                order[to..to + own.len()].copy_from_slice(own);
                to += own.len();
            }
            shuffle(&mut order[from..to], split_mix(&mut state));
        }
    }
}
