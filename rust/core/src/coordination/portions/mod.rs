//! Portions of a range of samples, leased to workers. A table tracks which portions of the current epoch are
//! leased, returned or finished.
//!
//! A worker holds one portion at a time and reports it finished with its next request. So a request that is
//! repeated because its answer was lost changes nothing: a worker that has not finished its portion gets the
//! same one again. The portions of an ended client's workers go to other workers. The next epoch begins, for
//! all workers, when every portion of the current one is finished.

mod request;
mod table;
#[cfg(test)]
mod tests;

pub use request::{Ask, Given, PortionAnswer, PortionWaiter, Samples, Then};

use crate::base::error::{Error, Kind, Result, check_printable};
use crate::base::sync::Arc;
use crate::memory::{Meter, Purpose};
use std::collections::BTreeMap;
use table::{PortionTable, TABLE_BYTES};

/// Most tables of a shard.
const MAX_TABLES: usize = 1 << 10;
/// Largest epoch that a worker may name.
const MAX_EPOCH: u64 = 1 << 62;

/// All tables of a shard.
#[derive(Debug)]
pub struct Portions {
    tables: BTreeMap<Arc<str>, PortionTable>,
    /// Number of the last table.
    run: u64,
    meter: Arc<Meter>,
}

impl Portions {
    /// Begins without tables. Their numbers count up from `run`, which must be random if workers may remember
    /// numbers of an earlier process.
    pub fn new(run: u64, meter: Arc<Meter>) -> Self {
        Self { tables: BTreeMap::new(), run, meter }
    }

    /// Answers a worker's request. `None`: the worker waits, and the waiter from `later` gets the answer.
    pub fn ask(
        &mut self,
        client: u64,
        ask: &Ask,
        later: impl FnOnce() -> PortionWaiter,
    ) -> Result<Option<PortionAnswer>> {
        ask.samples.check()?;
        if ask.epoch > MAX_EPOCH {
            return Err(Error::new(Kind::Config, "invalid epoch of portions")
                .expected(format!("at most {MAX_EPOCH}"), ask.epoch));
        }
        let worker = (client, ask.worker);
        if ask.then == Then::Leave && !self.tables.contains_key(&ask.samples.name) {
            let answer =
                PortionAnswer { run: ask.run, epoch: ask.epoch, unfinished: 0, given: Given::Nothing };
            return Ok(Some(answer));
        }
        let table = self.table(ask)?;
        let known = ask.run == table.run;
        if ask.epoch > table.epoch && ask.run != 0 {
            if known {
                return Err(Error::new(Kind::Precondition, "the epoch of the portions has not begun")
                    .expected(format!("at most epoch {}", table.epoch), ask.epoch));
            }
            // The worker knows a table that was lost, and a worker that does not know it came first.
            table.begin(ask.epoch);
        }
        if known
            && ask.epoch == table.epoch
            && let Some(portion) = ask.finished
        {
            table.finish(worker, portion);
            table.settle();
        }
        if ask.then == Then::Leave {
            table.leave(worker);
            table.settle();
            let answer = table.answer(Given::Nothing);
            self.drop_unused();
            return Ok(Some(answer));
        }
        if let Err(error) = table.join(worker) {
            self.drop_unused();
            return Err(error);
        }
        Ok(match ask.then {
            _ if ask.run != 0 && ask.epoch < table.epoch => Some(table.answer(Given::Over)),
            Then::Take => table.take(worker, later),
            _ => Some(table.answer(Given::Nothing)),
        })
    }

    fn table(&mut self, ask: &Ask) -> Result<&mut PortionTable> {
        let name = &ask.samples.name;
        if !self.tables.contains_key(name) {
            if self.tables.len() >= MAX_TABLES {
                return Err(Error::new(Kind::Capacity, "too many kinds of portions")
                    .expected(format!("at most {MAX_TABLES} names"), "one more"));
            }
            check_printable("name of portions", name)?;
            let memory = self.meter.take(Purpose::Identities, TABLE_BYTES)?;
            // 0 means no table.
            self.run = self.run.wrapping_add(1).max(1);
            let table = PortionTable::new(ask.samples.clone(), self.run, ask.epoch, memory);
            self.tables.insert(name.clone(), table);
        }
        match self.tables.get_mut(name) {
            Some(table) if table.samples == ask.samples => Ok(table),
            Some(table) => {
                let message = format!("portions {name:?} are of other samples");
                Err(Error::new(Kind::Precondition, message).expected(&table.samples, &ask.samples))
            }
            None => Err(Error::new(Kind::Internal, "a missing table of portions")),
        }
    }

    /// Ends a worker's wait, and returns an answer without a portion. `None`: the waiter has just got its
    /// answer.
    pub fn withdraw(&mut self, client: u64, ask: &Ask) -> Option<PortionAnswer> {
        let table = self.tables.get_mut(&ask.samples.name)?;
        let worker = (client, ask.worker);
        drop(table.members.get_mut(&worker)?.waiter.take()?);
        table.queue.retain(|other| *other != worker);
        Some(table.answer(Given::Nothing))
    }

    /// Removes the workers of an ended client, and gives their portions to others.
    pub fn forget_client(&mut self, client: u64) {
        for table in self.tables.values_mut() {
            let workers = table.members.range((client, 0)..=(client, u64::MAX));
            let workers: Vec<_> = workers.map(|(worker, _)| *worker).collect();
            for worker in &workers {
                table.leave(*worker);
            }
            if !workers.is_empty() {
                table.settle();
            }
        }
        self.drop_unused();
    }

    fn drop_unused(&mut self) {
        self.tables.retain(|_, table| !table.members.is_empty());
    }

    /// Numbers of tables, of workers and of leased portions.
    pub fn counts(&self) -> (u64, u64, u64) {
        let workers = self.tables.values().map(|table| table.members.len() as u64).sum();
        (self.tables.len() as u64, workers, self.tables.values().map(|table| table.leased).sum())
    }
}
