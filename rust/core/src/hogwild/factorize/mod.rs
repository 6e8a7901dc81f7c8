//! Factorization of a matrix with some known entries, such as ratings: `r = mean + b_u + b_i + p_u . q_i`.
//! Stochastic gradient descent runs on threads that share all factors without any lock (Niu et al. 2011; the
//! model: Koren, Bell, Volinsky 2009).
//!
//! A bias is stored as one more factor, whose partner in the other row is always 1. So both sides use one
//! rule: `p += lr (e q - reg p)`, `q += lr (e p - reg q)`, with the error e before the step.

mod order;
mod step;
#[cfg(test)]
mod tests;

pub use crate::hogwild::work_queue::Stop;
pub use order::Order;

use crate::base::barrier::BarrierSeat;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use crate::base::sync::{Mutex, RwLockReadGuard, lock, read};
use crate::hogwild::work_queue::{Deal, rounds};
use crate::memory::{LINE, LineKernel, Lines, RacyBuffer, run_lines};
use step::{FactorRow, Fixed, RatingStep};

/// Ratings in a block that a thread takes.
const BLOCK: usize = 512;
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

/// Settings of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FactorRule {
    /// Learning rate.
    pub lr: f64,
    /// Strength of the L2 penalty on factors and biases.
    pub regularization: f64,
    /// Set if users and items have biases.
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
    /// Settings of a step.
    pub rule: FactorRule,
}

/// State that the threads of a pass share.
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
