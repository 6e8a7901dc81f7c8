//! Factorization of a matrix with some known entries, such as ratings: `r = mean + b_u + b_i + p_u . q_i`.
//! Stochastic gradient descent runs on threads that share all factors without any lock (Niu et al. 2011; the
//! model: Koren, Bell, Volinsky 2009).
//!
//! A bias is stored as one more factor, whose partner in the other row is always 1. So both sides use one
//! rule: `p += lr (e q - reg p)`, `q += lr (e p - reg q)`, with the error e before the step.

pub use crate::hogwild::work_queue::Stop;

use crate::base::barrier::BarrierSeat;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use crate::base::sync::{Mutex, RwLock, RwLockReadGuard, lock, read, write};
use crate::hogwild::work_queue::{Deal, rounds, shuffle, split_mix};
use crate::memory::{LINE, LineKernel, Lines, RacyBuffer, run_lines};

/// Ratings in a block that a thread takes.
const BLOCK: usize = 512;
/// Users whose ratings are shuffled together: few enough for a core's own cache, and enough that a step
/// seldom waits for the previous one.
const GROUP: usize = 16;
/// Maximum number of queues; each takes memory for every user. More threads than this share queues.
const QUEUES: usize = 16;
/// Ratings between the prefetch of an item's row and its use.
const AHEAD: usize = 8;

/// The known entries: row, column and value of each.
#[derive(Clone, Copy, Debug)]
pub struct Ratings<'a> {
    /// The row of each entry.
    pub users: &'a [i32],
    /// The column of each entry.
    pub items: &'a [i32],
    /// The value of each entry, minus the mean of all.
    pub values: &'a [f32],
}

impl Ratings<'_> {
    /// Checks every number once, so that training need not.
    pub fn check(&self, users: usize, items: usize) -> Result<()> {
        if self.users.len() != self.values.len() || self.items.len() != self.values.len() {
            let error = Error::new(Kind::Shape, "users, items and ratings differ in length");
            let got = format!("{}, {} and {}", self.users.len(), self.items.len(), self.values.len());
            return Err(error.expected("one length", got));
        }
        let within = |what: &str, numbers: &[i32], count: usize| {
            let Some(wrong) = numbers.iter().find(|n| **n < 0 || **n as usize >= count) else {
                return Ok(());
            };
            let error = Error::new(Kind::Shape, format!("a {what} is out of range"));
            Err(error.expected(format!("0 to {}", count.saturating_sub(1)), wrong))
        };
        within("user", self.users, users)?;
        within("item", self.items, items)
    }
}

/// How a step changes the factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FactorRule {
    /// Learning rate.
    pub lr: f64,
    /// Strength of the L2 penalty on factors and biases.
    pub regularization: f64,
    /// Whether users and items have biases.
    pub biases: bool,
}

/// Factors in training; threads share them without locks.
pub struct Factors {
    rank: usize,
    stride: usize,
    isa: Isa,
    users: Side,
    items: Side,
}

/// The rows of users or of items. A row has the factors, then its own bias and the partner of the other
/// side's bias, or these two in the opposite order, then padding of 0.
struct Side {
    rows: RacyBuffer,
    count: usize,
    bias: usize,
    one: usize,
}

impl Factors {
    /// Starts with these factors, row by row, and biases.
    pub fn new(rank: usize, users: (&[f32], &[f32]), items: (&[f32], &[f32])) -> Result<Self> {
        let (isa, stride) = (Isa::get()?, (rank + 2).next_multiple_of(LINE));
        let users = Side::new(isa, rank, stride, users, (rank, rank + 1))?;
        let items = Side::new(isa, rank, stride, items, (rank + 1, rank))?;
        Ok(Self { rank, stride, isa, users, items })
    }

    /// Factors of the users, row by row, and their biases.
    pub fn users(&self) -> (Vec<f32>, Vec<f32>) {
        self.users.parts(self.isa, self.rank, self.stride)
    }

    /// Factors of the items, row by row, and their biases.
    pub fn items(&self) -> (Vec<f32>, Vec<f32>) {
        self.items.parts(self.isa, self.rank, self.stride)
    }

    /// Numbers of users and of items.
    pub fn counts(&self) -> (usize, usize) {
        (self.users.count, self.items.count)
    }

    /// Makes passes over checked ratings, on threads that stay alive for all of them. After each pass, `next`
    /// gets the sum of squared errors, each before its step, and the number of ratings that were learned
    /// from: all, unless the pass was stopped. It returns the next epoch, or `None` to end.
    pub fn train(
        &self,
        ratings: Ratings<'_>,
        order: &mut Order,
        first: Epoch,
        threads: usize,
        stop: Stop<'_>,
        next: Next<'_>,
    ) -> Result<()> {
        let work = |thread: usize, pass: &Pass<'_>, seat: &BarrierSeat<'_>| {
            if let Some(seed) = pass.epoch.seed {
                for queue in (thread..pass.order.queues.len()).step_by(threads) {
                    pass.order.shuffle(queue, seed);
                }
            }
            if seat.meet() {
                let queues = pass.order.queues.iter().map(read).collect();
                let work =
                    Work { model: self, ratings, queues, rule: pass.epoch.rule, deals: &pass.deals, thread };
                *lock(&pass.squares) += run_lines(self.isa, work);
            }
        };
        rounds(threads, Pass::new(order, first, stop), work, |pass| {
            let after = next(*lock(&pass.squares), pass.deals.iter().map(Deal::done).sum());
            after.map(|epoch| pass.begin(epoch)).is_some()
        })
    }
}

/// Called after each pass. It is not a type parameter, because the loop would then be compiled in the
/// caller's crate, where it is not vectorised.
pub type Next<'a> = &'a mut dyn FnMut(f64, usize) -> Option<Epoch>;

/// The settings of one pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epoch {
    /// The seed of a new order; without one, the order stays.
    pub seed: Option<u64>,
    /// How a step changes the factors.
    pub rule: FactorRule,
}

/// What the threads of a pass share.
struct Pass<'a> {
    epoch: Epoch,
    order: &'a mut Order,
    /// One per queue.
    deals: Vec<Deal<'a>>,
    squares: Mutex<f64>,
    stop: Stop<'a>,
}

impl<'a> Pass<'a> {
    fn new(order: &'a mut Order, epoch: Epoch, stop: Stop<'a>) -> Self {
        let mut pass = Self { epoch, order, deals: Vec::new(), squares: Mutex::new(0.0), stop };
        pass.begin(epoch);
        pass
    }

    fn begin(&mut self, epoch: Epoch) {
        if epoch.seed.is_some() {
            self.order.divide();
        }
        let lengths = self.order.queues.iter().map(|queue| read(queue).len());
        self.deals = lengths.map(|len| Deal::new(len, BLOCK, self.stop)).collect();
        (self.epoch, self.squares) = (epoch, Mutex::new(0.0));
    }
}

/// The work of one thread; returns its sum of squared errors.
struct Work<'a> {
    model: &'a Factors,
    ratings: Ratings<'a>,
    queues: Vec<RwLockReadGuard<'a, Vec<u32>>>,
    rule: FactorRule,
    /// One per queue.
    deals: &'a [Deal<'a>],
    thread: usize,
}

impl Work<'_> {
    /// The next ratings: from this thread's queue, then from the others'.
    fn take(&self) -> Option<&[u32]> {
        let queues = self.deals.len();
        (0..queues).map(|k| (self.thread + k) % queues).find_map(|queue| {
            let block = self.deals[queue].take()?;
            Some(&self.queues[queue][block])
        })
    }
}

impl LineKernel for Work<'_> {
    type Out = f64;
    #[inline(always)]
    fn run(self, lines: impl Lines) -> f64 {
        let Self { model, ratings, rule, .. } = self;
        let (stride, users, items) = (model.stride, &model.users, &model.items);
        let (of_user, of_item) = (users.fixed(stride, rule.biases), items.fixed(stride, rule.biases));
        let mut sum = 0.0;
        while let Some(block) = self.take() {
            for (k, rating) in block.iter().enumerate() {
                if let Some(soon) = block.get(k + AHEAD) {
                    items.rows.prefetch(stride * ratings.items[*soon as usize] as usize, stride);
                }
                let rating = *rating as usize;
                let step = RatingStep {
                    stride,
                    user: FactorRow {
                        rows: &users.rows,
                        at: stride * ratings.users[rating] as usize,
                        fixed: &of_user,
                    },
                    item: FactorRow {
                        rows: &items.rows,
                        at: stride * ratings.items[rating] as usize,
                        fixed: &of_item,
                    },
                    rating: ratings.values[rating],
                    rule,
                };
                let error = step.run(lines);
                sum += f64::from(error) * f64::from(error);
            }
        }
        sum
    }
}

/// The order of a pass: a queue per thread. A thread whose queue is empty helps with the others.
#[derive(Debug)]
pub struct Order {
    /// The ratings of each thread's items, sorted by user: those of user u and thread t begin at
    /// `starts[t * users + u]`.
    sorted: Vec<u32>,
    starts: Vec<usize>,
    users: usize,
    /// Between passes, one thread changes each queue.
    queues: Vec<RwLock<Vec<u32>>>,
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
    fn divide(&mut self) {
        let parts = (self.starts.len() - 1) / self.users.max(1);
        if self.queues.len() < parts {
            let part = |k| self.starts[k * self.users]..self.starts[(k + 1) * self.users];
            self.queues = (0..parts).map(|k| RwLock::new(self.sorted[part(k)].to_vec())).collect();
        }
    }

    /// Gives one queue a new order. Each thread has its own items. It visits groups of users one after the
    /// other in a random order and starts at a different group than the other threads, so threads seldom meet
    /// at a row. The ratings of a group are shuffled.
    fn shuffle(&self, queue: usize, seed: u64) {
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

impl std::fmt::Debug for Factors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (users, items) = self.counts();
        let mut f = f.debug_struct("Factors");
        f.field("rank", &self.rank).field("users", &users).field("items", &items).finish_non_exhaustive()
    }
}

impl Side {
    fn new(
        isa: Isa,
        rank: usize,
        stride: usize,
        (factors, biases): (&[f32], &[f32]),
        (bias, one): (usize, usize),
    ) -> Result<Self> {
        if factors.len() != rank * biases.len() {
            let error = Error::new(Kind::Shape, "factors and biases do not fit together");
            return Err(error.expected(format!("{} x {rank}", biases.len()), factors.len()));
        }
        let rows = RacyBuffer::filled(stride * biases.len(), 0.0);
        let mut row = vec![0.0; stride];
        for (k, own) in biases.iter().enumerate() {
            row[..rank].copy_from_slice(&factors[rank * k..rank * (k + 1)]);
            (row[bias], row[one]) = (*own, 1.0);
            rows.store(isa, stride * k, &row);
        }
        Ok(Self { rows, count: biases.len(), bias, one })
    }

    /// For each element, the factor on its stepped value and the term added afterwards. So partners, and
    /// biases that are disabled, keep their values without a store of a single element among vectors.
    fn fixed(&self, stride: usize, biases: bool) -> Fixed {
        let (mut kept, mut added) = (vec![1.0; stride], vec![0.0; stride]);
        (kept[self.one], added[self.one]) = (0.0, if biases { 1.0 } else { 0.0 });
        if !biases {
            kept[self.bias] = 0.0;
        }
        (kept, added)
    }

    fn parts(&self, isa: Isa, rank: usize, stride: usize) -> (Vec<f32>, Vec<f32>) {
        let (mut factors, mut biases) =
            (Vec::with_capacity(rank * self.count), Vec::with_capacity(self.count));
        let mut row = vec![0.0; stride];
        for k in 0..self.count {
            self.rows.load(isa, stride * k, &mut row);
            factors.extend_from_slice(&row[..rank]);
            biases.push(row[self.bias]);
        }
        (factors, biases)
    }
}

type Fixed = (Vec<f32>, Vec<f32>);

/// A row to step.
struct FactorRow<'a> {
    rows: &'a RacyBuffer,
    at: usize,
    fixed: &'a Fixed,
}

impl FactorRow<'_> {
    #[inline(always)]
    fn line(&self, lines: impl Lines, at: usize) -> [f32; LINE] {
        self.rows.line(lines, self.at + at)
    }

    /// Stores `kept * from + step * other` in this row, where an element is not fixed.
    #[inline(always)]
    fn step(
        &self,
        lines: impl Lines,
        at: usize,
        kept: f32,
        from: &[f32; LINE],
        step: f32,
        other: &[f32; LINE],
    ) {
        let (kept_here, added) = (&self.fixed.0[at..at + LINE], &self.fixed.1[at..at + LINE]);
        let mut line = [0.0; LINE];
        for k in 0..LINE {
            line[k] = (kept * from[k] + step * other[k]) * kept_here[k] + added[k];
        }
        self.rows.set_line(lines, self.at + at, &line);
    }
}

/// The step for one rating; returns the error before the step.
struct RatingStep<'a> {
    stride: usize,
    user: FactorRow<'a>,
    item: FactorRow<'a>,
    rating: f32,
    rule: FactorRule,
}

impl RatingStep<'_> {
    #[inline(always)]
    fn run(self, lines: impl Lines) -> f32 {
        let Self { stride, user, item, rating, rule } = self;
        let mut sums = [0.0_f32; LINE];
        for at in (0..stride).step_by(LINE) {
            let (p, q) = (user.line(lines, at), item.line(lines, at));
            for k in 0..LINE {
                sums[k] += p[k] * q[k];
            }
        }
        // Pairwise, because adding 16 values one by one would take longer than the rest of the step.
        for half in [8, 4, 2, 1] {
            for k in 0..half {
                sums[k] += sums[k + half];
            }
        }
        let error = rating - sums[0];
        let step = rule.lr as f32 * error;
        let kept = (1.0 - rule.lr * rule.regularization) as f32;
        for at in (0..stride).step_by(LINE) {
            let (p, q) = (user.line(lines, at), item.line(lines, at));
            user.step(lines, at, kept, &p, step, &q);
            item.step(lines, at, kept, &q, step, &p);
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const RULE: FactorRule = FactorRule { lr: 0.05, regularization: 0.1, biases: true };

    /// Factors that differ.
    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32).map(|i| ((i * 37 + seed) % 101) as f32 / 202.0 - 0.25).collect()
    }

    fn ratings() -> (Vec<i32>, Vec<i32>, Vec<f32>) {
        let all = (0..60).map(|k| (k % 7, (k * k) % 11, ((k * 5) % 9) as f32 / 3.0 - 1.0));
        let (users, (items, values)) = all.map(|(u, i, r)| (u, (i, r))).unzip();
        (users, items, values)
    }

    fn epoch(seed: impl Into<Option<u64>>) -> Epoch {
        Epoch { seed: seed.into(), rule: RULE }
    }

    /// Shuffles all queues and returns their contents.
    fn shuffled(order: &mut Order, seed: u64) -> Vec<Vec<u32>> {
        order.divide();
        (0..order.queues.len()).for_each(|queue| order.shuffle(queue, seed));
        queues(order)
    }

    fn queues(order: &Order) -> Vec<Vec<u32>> {
        order.queues.iter().map(|queue| read(queue).clone()).collect()
    }

    /// The rule as its formula states it, in float64.
    fn reference(rank: usize, rule: FactorRule, passes: usize) -> (Vec<f64>, Vec<f64>) {
        let float = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<_>>();
        let (mut p, mut q) = (float(numbers(7 * rank, 1)), float(numbers(11 * rank, 2)));
        let (mut b, mut c) = (vec![0.0; 7], vec![0.0; 11]);
        let (users, items, values) = ratings();
        for _ in 0..passes {
            for ((u, i), r) in users.iter().zip(&items).zip(&values) {
                let (u, i) = (*u as usize, *i as usize);
                let dot: f64 = (0..rank).map(|k| p[u * rank + k] * q[i * rank + k]).sum();
                let e = f64::from(*r) - dot - b[u] - c[i];
                for k in 0..rank {
                    let (x, y) = (p[u * rank + k], q[i * rank + k]);
                    p[u * rank + k] = x + rule.lr * (e * y - rule.regularization * x);
                    q[i * rank + k] = y + rule.lr * (e * x - rule.regularization * y);
                }
                if rule.biases {
                    b[u] += rule.lr * (e - rule.regularization * b[u]);
                    c[i] += rule.lr * (e - rule.regularization * c[i]);
                }
            }
        }
        ([p, b].concat(), [q, c].concat())
    }

    #[test]
    fn one_thread_follows_the_formula() {
        for rank in [1, 13, 14, 15, 16, 40] {
            for rule in [RULE, FactorRule { biases: false, ..RULE }] {
                let (users, items, values) = ratings();
                let ratings = Ratings { users: &users, items: &items, values: &values };
                ratings.check(7, 11).unwrap();
                let (p, q) = (numbers(7 * rank, 1), numbers(11 * rank, 2));
                let model = Factors::new(rank, (&p, &[0.0; 7]), (&q, &[0.0; 11])).unwrap();
                let (mut order, mut passes) = (Order::new(ratings, 7, 1), 0);
                let epoch = Epoch { seed: None, rule };
                let mut next = |_, done| {
                    passes += 1;
                    assert_eq!(done, 60);
                    (passes < 4).then_some(epoch)
                };
                model.train(ratings, &mut order, epoch, 1, &|| false, &mut next).unwrap();
                let (expected_users, expected_items) = reference(rank, rule, 4);
                for ((factors, biases), expected) in
                    [(model.users(), expected_users), (model.items(), expected_items)]
                {
                    for (x, y) in factors.iter().chain(&biases).zip(expected) {
                        assert!((f64::from(*x) - y).abs() < 2e-6, "rank {rank}: {x} {y}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_order_has_every_rating_once_and_each_thread_its_items() {
        let (users, items, values) = ratings();
        let ratings = Ratings { users: &users, items: &items, values: &values };
        for threads in [1, 2, 3, 13, usize::MAX] {
            let mut order = Order::new(ratings, 7, threads);
            assert!(queues(&order).concat().into_iter().eq(0..60));
            let mut orders = Vec::new();
            for seed in [1, 2, 1] {
                let queues = shuffled(&mut order, seed);
                let mut all = queues.concat();
                orders.push(all.clone());
                all.sort_unstable();
                assert!(all.into_iter().eq(0..60));
                let threads = threads.min(QUEUES);
                assert_eq!(queues.len(), threads);
                for (thread, queue) in queues.iter().enumerate() {
                    assert!(queue.iter().all(|i| items[*i as usize] as usize % threads == thread));
                }
            }
            assert!(orders[0] != orders[1] && orders[0] == orders[2]);
        }
    }

    #[test]
    fn users_come_in_groups_and_threads_begin_at_different_ones() {
        // 50 users with a rating of each of two items.
        let users: Vec<i32> = (0..100).map(|i| i / 2).collect();
        let items: Vec<i32> = (0..100).map(|i| i % 2).collect();
        let mut order = Order::new(Ratings { users: &users, items: &items, values: &[0.0; 100] }, 50, 2);
        let mut firsts = Vec::new();
        for seed in 0..2 {
            for queue in shuffled(&mut order, seed) {
                let group: HashSet<_> = queue[..GROUP].iter().map(|i| users[*i as usize]).collect();
                assert_eq!(group.len(), GROUP);
                firsts.push(group);
            }
        }
        assert!(firsts[0].is_disjoint(&firsts[1]) && firsts[0] != firsts[2]);
    }

    #[test]
    fn threads_help_each_other_with_what_is_left() {
        // All ratings are of the second thread's items.
        let (users, items, values) = (vec![0; 5000], vec![1; 5000], vec![0.5; 5000]);
        let ratings = Ratings { users: &users, items: &items, values: &values };
        let mut order = Order::new(ratings, 1, 2);
        let model = Factors::new(2, (&[0.1; 2], &[0.0]), (&[0.1; 4], &[0.0; 2])).unwrap();
        let mut learned = |threads, stop: Stop<'_>| {
            let mut learned = Vec::new();
            let mut next = |_, done| {
                learned.push(done);
                (learned.len() < 3).then(|| epoch(7))
            };
            model.train(ratings, &mut order, epoch(1), threads, stop, &mut next).unwrap();
            learned
        };
        for threads in [1, 2, 3] {
            assert_eq!(learned(threads, &|| false), [5000; 3]);
        }
        assert_eq!(learned(2, &|| true), [0; 3]);
    }

    #[test]
    fn what_is_out_of_range_is_refused() {
        let check = |users: &[i32], items: &[i32]| Ratings { users, items, values: &[1.0, 2.0] }.check(3, 4);
        assert_eq!(check(&[0, 2], &[3, 0]), Ok(()));
        for (users, items) in [([0, 3], [0, 0]), ([-1, 0], [0, 0]), ([0, 0], [4, 0]), ([0, 0], [0, i32::MIN])]
        {
            assert_eq!(check(&users, &items).unwrap_err().kind, Kind::Shape);
        }
        assert_eq!(check(&[0], &[0, 1]).unwrap_err().kind, Kind::Shape);
        assert_eq!(Factors::new(2, (&[0.0; 3], &[0.0; 2]), (&[], &[])).unwrap_err().kind, Kind::Shape);
    }
}
