//! Factors of a matrix of which some entries are known, such as ratings: `r = mean + b_u + b_i + p_u . q_i`, by stochastic
//! gradient descent of threads that share all factors without any lock (Niu et al. 2011; the model: Koren, Bell,
//! Volinsky 2009).
//!
//! A bias is one more factor, whose partner in the other row is always 1. So both sides step by one rule:
//! `p += lr (e q - reg p)`, `q += lr (e p - reg q)`, with the error e before the step.

pub use crate::passes::Stop;

use crate::error::{Error, Kind, Result};
use crate::isa::{Isa, Kernel};
use crate::params::RacyBuffer;
use crate::passes::{Deal, shuffle, together};

/// Ratings that a thread takes at once.
const BLOCK: usize = 2048;
/// Users whose ratings come mixed with each other's: few enough for a core's own cache, enough that a step seldom waits
/// for the one before.
const GROUP: u32 = 16;
/// Rows begin at cache lines.
const LINE: usize = 16;

/// Known entries: row, column and value of each.
#[derive(Clone, Copy, Debug)]
pub struct Ratings<'a> {
    /// The row of each.
    pub users: &'a [i32],
    /// The column of each.
    pub items: &'a [i32],
    /// The value of each, less the mean of all.
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

/// How factors step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Length of a step.
    pub lr: f64,
    /// Strength of the L2 penalty on factors and biases.
    pub regularization: f64,
    /// Whether users and items have biases.
    pub biases: bool,
}

/// Factors in training.
pub struct Factors {
    rank: usize,
    stride: usize,
    isa: Isa,
    users: Side,
    items: Side,
}

/// The rows of users or of items: factors, own bias, the other's bias's partner (or the other way round), padding of 0.
struct Side {
    rows: RacyBuffer,
    count: usize,
    bias: usize,
    one: usize,
}

impl Factors {
    /// Begins with these factors, row by row, and biases.
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

    /// One pass over checked ratings in this order. Gives the sum of squared errors, each before its step, and how many
    /// ratings were learned from: all, unless the pass was stopped.
    pub fn pass(
        &self,
        ratings: Ratings<'_>,
        order: &[u32],
        rule: Rule,
        threads: usize,
        stop: Stop<'_>,
    ) -> Result<(f64, usize)> {
        let deal = Deal::new(order.len(), BLOCK, stop);
        let sums =
            together(threads, || self.isa.run(Work { model: self, ratings, order, rule, deal: &deal }))?;
        Ok((sums.iter().sum(), deal.done()))
    }
}

/// What each thread does; gives its sum of squared errors.
struct Work<'a> {
    model: &'a Factors,
    ratings: Ratings<'a>,
    order: &'a [u32],
    rule: Rule,
    deal: &'a Deal<'a>,
}

impl Kernel for Work<'_> {
    type Out = f64;
    #[inline(always)]
    fn run(self) -> f64 {
        let Self { model, ratings, order, rule, deal } = self;
        let (isa, stride, users, items) = (model.isa, model.stride, &model.users, &model.items);
        let (mut p, mut q) = (vec![0.0; stride], vec![0.0; stride]);
        let (of_user, of_item) = (users.fixed(stride, rule.biases), items.fixed(stride, rule.biases));
        let mut sum = 0.0;
        while let Some(block) = deal.take() {
            for rating in &order[block] {
                let rating = *rating as usize;
                let user = stride * ratings.users[rating] as usize;
                let item = stride * ratings.items[rating] as usize;
                users.rows.load(isa, user, &mut p);
                items.rows.load(isa, item, &mut q);
                let error = Step {
                    p: (&mut p, &of_user),
                    q: (&mut q, &of_item),
                    rating: ratings.values[rating],
                    rule,
                }
                .run();
                users.rows.store(isa, user, &p);
                items.rows.store(isa, item, &q);
                sum += f64::from(error) * f64::from(error);
            }
        }
        sum
    }
}

/// A new order for a pass: groups of users one after the other, shuffled, and the ratings of each group, shuffled. So a
/// user's row is one thread's for a while, and threads meet at items alone.
pub fn shuffle_by_user(order: &mut Vec<u32>, users: &[i32], count: usize, seed: u64) {
    shuffle(order, seed);
    let mut turns: Vec<u32> = (0..count as u32).collect();
    shuffle(&mut turns, seed ^ 1);
    let turn = |i: u32| (turns[users[i as usize] as usize] / GROUP) as usize;
    let mut places = vec![0_u32; count + 1];
    for i in &*order {
        places[turn(*i) + 1] += 1;
    }
    for k in 1..places.len() {
        places[k] += places[k - 1];
    }
    let mut sorted = vec![0; order.len()];
    for i in &*order {
        let place = &mut places[turn(*i)];
        sorted[*place as usize] = *i;
        *place += 1;
    }
    *order = sorted;
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

    /// What a step leaves of each element, and what it then adds: so partners and biases that are off keep their values,
    /// without a store of one element among vectors.
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

/// One rating: gives the error before the step.
struct Step<'a> {
    p: (&'a mut [f32], &'a Fixed),
    q: (&'a mut [f32], &'a Fixed),
    rating: f32,
    rule: Rule,
}

impl<'a> Kernel for Step<'a> {
    type Out = f32;
    #[inline(always)]
    fn run(self) -> f32 {
        let (p, q) = (self.p.0.as_chunks_mut::<LINE>().0, self.q.0.as_chunks_mut::<LINE>().0);
        let mut sums = [0.0_f32; LINE];
        for (p, q) in p.iter().zip(q.iter()) {
            for k in 0..LINE {
                sums[k] += p[k] * q[k];
            }
        }
        // Pairwise: a sum of 16 one by one would take longer than all the rest.
        for half in [8, 4, 2, 1] {
            for k in 0..half {
                sums[k] += sums[k + half];
            }
        }
        let error = self.rating - sums[0];
        let step = self.rule.lr as f32 * error;
        let kept = (1.0 - self.rule.lr * self.rule.regularization) as f32;
        let fixed = |(kept, added): &'a Fixed| (kept.as_chunks::<LINE>().0, added.as_chunks::<LINE>().0);
        let ((p_kept, p_added), (q_kept, q_added)) = (fixed(self.p.1), fixed(self.q.1));
        for (line, (p, q)) in p.iter_mut().zip(q).enumerate() {
            for k in 0..LINE {
                let (x, y) = (p[k], q[k]);
                p[k] = (kept * x + step * y) * p_kept[line][k] + p_added[line][k];
                q[k] = (kept * y + step * x) * q_kept[line][k] + q_added[line][k];
            }
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Rule = Rule { lr: 0.05, regularization: 0.1, biases: true };

    /// Factors that differ.
    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32).map(|i| ((i * 37 + seed) % 101) as f32 / 202.0 - 0.25).collect()
    }

    fn ratings() -> (Vec<i32>, Vec<i32>, Vec<f32>) {
        let all = (0..60).map(|k| (k % 7, (k * k) % 11, ((k * 5) % 9) as f32 / 3.0 - 1.0));
        let (users, (items, values)) = all.map(|(u, i, r)| (u, (i, r))).unzip();
        (users, items, values)
    }

    /// The rule as its formula says it, in float64.
    fn reference(rank: usize, rule: Rule, passes: usize) -> (Vec<f64>, Vec<f64>) {
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
            for rule in [RULE, Rule { biases: false, ..RULE }] {
                let (users, items, values) = ratings();
                let ratings = Ratings { users: &users, items: &items, values: &values };
                ratings.check(7, 11).unwrap();
                let (p, q) = (numbers(7 * rank, 1), numbers(11 * rank, 2));
                let model = Factors::new(rank, (&p, &[0.0; 7]), (&q, &[0.0; 11])).unwrap();
                let order: Vec<u32> = (0..60).collect();
                for _ in 0..4 {
                    model.pass(ratings, &order, rule, 1, &|| false).unwrap();
                }
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
    fn an_order_by_user_has_every_rating_once() {
        let (users, _, _) = ratings();
        let mut order: Vec<u32> = (0..60).collect();
        shuffle_by_user(&mut order, &users, 7, 5);
        order.sort_unstable();
        assert!(order.iter().copied().eq(0..60));
        // 50 users with a rating each: the first 16 of the order are one group, and not the first users.
        let users: Vec<i32> = (0..50).collect();
        let mut order: Vec<u32> = (0..50).collect();
        let mut orders = Vec::new();
        for seed in 0..2 {
            shuffle_by_user(&mut order, &users, 50, seed);
            let mut first = order[..16].to_vec();
            first.sort_unstable();
            orders.push(first);
        }
        assert_ne!(orders[0], orders[1]);
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
