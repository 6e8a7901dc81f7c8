//! The table of one range of samples: which portions of its epoch are leased, returned or finished.

use super::request::{Given, MAX_NAME, PortionAnswer, PortionWaiter, Samples};
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::memory::Charge;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

/// Most workers of a table.
const MAX_WORKERS: usize = 1 << 16;
/// Bytes of a table, with the longest name.
pub(super) const TABLE_BYTES: u64 = (MAX_NAME + 2 * size_of::<(Arc<str>, PortionTable)>()) as u64;
/// Bytes of a worker, or of a returned portion.
pub(super) const WORKER_BYTES: u64 = 2 * size_of::<(PortionWorker, PortionMember, PortionWorker)>() as u64;

/// A client, and the number of one of its workers.
pub(super) type PortionWorker = (u64, u64);

#[derive(Default)]
pub(super) struct PortionMember {
    held: Option<u64>,
    pub(super) waiter: Option<PortionWaiter>,
}

impl fmt::Debug for PortionMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortionMember")
            .field("held", &self.held)
            .field("waits", &self.waiter.is_some())
            .finish()
    }
}

/// The portions of one range of samples.
#[derive(Debug)]
pub(super) struct PortionTable {
    pub(super) samples: Samples,
    pub(super) run: u64,
    pub(super) epoch: u64,
    /// The first portion that was never given out in this epoch.
    next: u64,
    /// Portions before `next` that were returned.
    returned: BTreeSet<u64>,
    /// Number of portions that members hold. All portions before `next` that are neither held nor returned
    /// are finished.
    pub(super) leased: u64,
    pub(super) members: BTreeMap<PortionWorker, PortionMember>,
    /// Waiting workers in order of arrival.
    pub(super) queue: VecDeque<PortionWorker>,
    memory: Charge,
}

impl PortionTable {
    pub(super) fn new(samples: Samples, run: u64, epoch: u64, memory: Charge) -> Self {
        Self {
            samples,
            run,
            epoch,
            next: 0,
            returned: BTreeSet::new(),
            leased: 0,
            members: BTreeMap::new(),
            queue: VecDeque::new(),
            memory,
        }
    }

    pub(super) fn answer(&self, given: Given) -> PortionAnswer {
        let unfinished = self.samples.portions() - self.next + self.returned.len() as u64 + self.leased;
        PortionAnswer { run: self.run, epoch: self.epoch, unfinished, given }
    }

    pub(super) fn join(&mut self, worker: PortionWorker) -> Result<()> {
        if self.members.contains_key(&worker) {
            return Ok(());
        }
        if self.members.len() >= MAX_WORKERS {
            let message = format!("portions {:?} have too many workers", self.samples.name);
            return Err(Error::new(Kind::Capacity, message)
                .expected(format!("at most {MAX_WORKERS}"), "one more")
                .retry_after_ms(1000));
        }
        self.memory.grow_to(self.bytes() + WORKER_BYTES)?;
        self.members.insert(worker, PortionMember::default());
        Ok(())
    }

    /// Bytes of the table. A worker that leaves returns at most one portion.
    fn bytes(&self) -> u64 {
        TABLE_BYTES + WORKER_BYTES * (self.members.len() + self.returned.len()) as u64
    }

    fn free(&mut self) -> Option<u64> {
        if let Some(portion) = self.returned.pop_first() {
            return Some(portion);
        }
        (self.next < self.samples.portions()).then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Finishes a portion, even if its lease ended meanwhile, unless another worker holds the portion by now.
    pub(super) fn finish(&mut self, worker: PortionWorker, portion: u64) {
        match self.members.get_mut(&worker) {
            Some(member) if member.held == Some(portion) => {
                member.held = None;
                self.leased -= 1;
            }
            _ => drop(self.returned.remove(&portion)),
        }
    }

    /// Removes a worker, and returns its portion so that others get it.
    pub(super) fn leave(&mut self, worker: PortionWorker) {
        if let Some(PortionMember { held: Some(portion), .. }) = self.members.remove(&worker) {
            self.leased -= 1;
            self.returned.insert(portion);
        }
        self.queue.retain(|other| *other != worker);
    }

    pub(super) fn begin(&mut self, epoch: u64) {
        (self.epoch, self.next, self.leased) = (epoch, 0, 0);
        self.returned.clear();
        self.queue.clear();
        let over = self.answer(Given::Over);
        for member in self.members.values_mut() {
            member.held = None;
            if let Some(waiter) = member.waiter.take() {
                waiter(over);
            }
        }
    }

    /// Begins the next epoch if this one is over; otherwise gives free portions to waiting workers.
    pub(super) fn settle(&mut self) {
        if self.leased == 0 && self.returned.is_empty() && self.next == self.samples.portions() {
            self.begin(self.epoch.saturating_add(1));
        }
        while let Some(worker) = self.queue.front().copied()
            && let Some(portion) = self.free()
        {
            self.queue.pop_front();
            self.leased += 1;
            let answer = self.answer(Given::Portion(portion));
            if let Some(member) = self.members.get_mut(&worker) {
                member.held = Some(portion);
                if let Some(waiter) = member.waiter.take() {
                    waiter(answer);
                }
            }
        }
        self.memory.shrink_to(self.bytes());
    }

    /// A portion for the worker; `None`: it waits.
    pub(super) fn take(
        &mut self,
        worker: PortionWorker,
        later: impl FnOnce() -> PortionWaiter,
    ) -> Option<PortionAnswer> {
        let held = self.members.get(&worker).and_then(|member| member.held);
        let free = if held.is_none() { self.free() } else { None };
        self.leased += u64::from(free.is_some());
        let portion = held.or(free);
        let member = self.members.get_mut(&worker)?;
        let Some(portion) = portion else {
            if member.waiter.replace(later()).is_none() {
                self.queue.push_back(worker);
            }
            return None;
        };
        (member.held, member.waiter) = (Some(portion), None);
        Some(self.answer(Given::Portion(portion)))
    }
}
