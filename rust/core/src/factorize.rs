//! Factors of a matrix of which some entries are known, such as ratings: `r = mean + b_u + b_i + p_u . q_i`, by stochastic
//! gradient descent of threads that share all factors without any lock (Niu et al. 2011; the model: Koren, Bell,
//! Volinsky 2009).
//!
//! A bias is one more factor, whose partner in the other row is always 1. So both sides step by one rule:
//! `p += lr (e q - reg p)`, `q += lr (e p - reg q)`, with the error e before the step.

pub use crate::passes::{Stop, shuffle};

use crate::error::{Error, Kind, Result};
use crate::isa::{Isa, Kernel};
use crate::params::RacyBuffer;
use crate::passes::{Deal, together};

/// Ratings that a thread takes at once.
const BLOCK: usize = 256;
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
        let sums = together(threads, || self.work(ratings, order, rule, &deal))?;
        Ok((sums.iter().sum(), deal.done()))
    }

    fn work(&self, ratings: Ratings<'_>, order: &[u32], rule: Rule, deal: &Deal<'_>) -> f64 {
        let (mut p, mut q) = (vec![0.0; self.stride], vec![0.0; self.stride]);
        let partner = if rule.biases { 1.0 } else { 0.0 };
        let mut sum = 0.0;
        while let Some(block) = deal.take() {
            for rating in &order[block] {
                let rating = *rating as usize;
                let user = self.stride * ratings.users[rating] as usize;
                let item = self.stride * ratings.items[rating] as usize;
                self.users.rows.load(self.isa, user, &mut p);
                self.items.rows.load(self.isa, item, &mut q);
                let error = self.isa.run(Step { p: &mut p, q: &mut q, rating: ratings.values[rating], rule });
                (p[self.users.one], q[self.items.one]) = (partner, partner);
                if !rule.biases {
                    (p[self.users.bias], q[self.items.bias]) = (0.0, 0.0);
                }
                self.users.rows.store(self.isa, user, &p);
                self.items.rows.store(self.isa, item, &q);
                sum += f64::from(error) * f64::from(error);
            }
        }
        sum
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

/// One rating: gives the error before the step.
struct Step<'a> {
    p: &'a mut [f32],
    q: &'a mut [f32],
    rating: f32,
    rule: Rule,
}

impl Kernel for Step<'_> {
    type Out = f32;
    #[inline(always)]
    fn run(self) -> f32 {
        let ((p, _), (q, _)) = (self.p.as_chunks_mut::<LINE>(), self.q.as_chunks_mut::<LINE>());
        let mut sums = [0.0_f32; LINE];
        for (p, q) in p.iter().zip(q.iter()) {
            for k in 0..LINE {
                sums[k] += p[k] * q[k];
            }
        }
        let error = self.rating - sums.iter().sum::<f32>();
        let step = self.rule.lr as f32 * error;
        let kept = (1.0 - self.rule.lr * self.rule.regularization) as f32;
        for (p, q) in p.iter_mut().zip(q) {
            for k in 0..LINE {
                (p[k], q[k]) = (kept * p[k] + step * q[k], kept * q[k] + step * p[k]);
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
