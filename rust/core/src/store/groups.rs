//! Calls of workers that train together on an in-process store. The shard's groups decide who may continue; a
//! worker that must wait blocks its own thread.

use super::Store;
use crate::base::error::{Error, Kind, Result};
use crate::base::mode::{Clocks, Joined, MembershipRequest, Mode};
use crate::base::sync::{Arc, lock};
use crate::coordination::portions::{Ask, PortionAnswer};
use crate::tensor::{SliceVersion, Versions};
use crate::verbs::{Listener, TrainTogether};
use std::sync::mpsc::{RecvTimeoutError, TryRecvError, sync_channel};
use std::time::Duration;

/// The places of a store's client, each with the number of steps it has taken.
#[derive(Debug, Default)]
pub(super) struct Seats(Vec<((u32, bool), u64)>);

impl Store {
    /// The number of a group, assigned when its first tensor or worker comes.
    pub(super) fn group(&self, name: &str) -> u32 {
        let mut groups = lock(&self.shared.groups);
        let next = groups.len() as u32;
        groups.get(name).copied().unwrap_or_else(|| *groups.entry(name.into()).or_insert(next))
    }
}

impl Store {
    /// Makes the versions whose grace is over, by a clock of the caller in milliseconds, such as a virtual one;
    /// from then on, no other clock does.
    pub fn end_graces(&self, now: u64) {
        let _ends = self.shared.deadlines.end_complete_at_last();
        self.shared.deadlines.note_timed();
        self.shared.shard.end_graces(now);
    }
}

impl TrainTogether for Store {
    fn join(&self, group: &str, seat: &MembershipRequest, _timeout: Duration) -> Result<Joined> {
        if self.shared.directory.is_some() && seat.mode != Mode::Free {
            let why = "processes that share a store do not wait for each other: that needs a server";
            return Err(Error::new(Kind::Config, why).expected(Mode::Free, seat.mode));
        }
        let (group, shard) = (self.group(group), &self.shared.shard);
        seat.check_new_name()?;
        let joined = shard.join(group, self.client, seat)?;
        let key = (group, matches!(seat.mode, Mode::WarmStart { .. }));
        let mut seats = lock(&self.seats);
        seats.0.retain(|(place, _)| *place != key);
        seats.0.push((key, joined.clock));
        Ok(joined)
    }

    fn leave(&self, group: &str, warm: bool, _timeout: Duration) -> Result<()> {
        let _ends = self.shared.deadlines.end_complete_at_last();
        let key = (self.group(group), warm);
        lock(&self.seats).0.retain(|(place, _)| *place != key);
        self.shared.shard.leave(key.0, self.client, warm);
        Ok(())
    }

    fn advance(&self, group: &str, warm: bool, steps: u64, timeout: Duration) -> Result<Clocks> {
        let key = (self.group(group), warm);
        let clock = match lock(&self.seats).0.iter_mut().find(|(place, _)| *place == key) {
            Some((_, clock)) => {
                *clock = clock.saturating_add(steps);
                *clock
            }
            None => 0,
        };
        let groups = self.shared.shard.groups();
        let (done, outcome) = sync_channel(1);
        // A `try_send`, so that the notifying thread never waits for a worker that is gone.
        groups.advance(key.0, self.client, warm, clock, Box::new(move |result| drop(done.try_send(result))));
        // `recv_timeout` spins for a while before it looks at the time.
        let outcome = if timeout.is_zero() {
            outcome.try_recv().map_err(|none| match none {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            })
        } else {
            outcome.recv_timeout(timeout)
        };
        match outcome {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(still_behind(&groups.behind(key.0, self.client, warm))),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Error::new(Kind::Unavailable, "another call of this worker waits in its place"))
            }
        }
    }

    fn listen(&self, name: &Arc<str>, at: &Versions, _timeout: Duration) -> Result<Listener> {
        let (shard, client) = (self.shared.shard.clone(), self.client);
        let group = self.group(&self.tensor(name)?.spec.group);
        let Some(&SliceVersion { slice, version, .. }) = at.tensor(name).and_then(<[_]>::first) else {
            return Ok(Listener::new(|| false));
        };
        Ok(Listener::new(move || shard.goes_on_without(group, slice, client, version).unwrap_or(false)))
    }

    fn portion(&self, ask: &Ask, wait: Duration, _timeout: Duration) -> Result<PortionAnswer> {
        self.ask_for_portion(ask, wait)
    }
}

/// The error of a worker whose wait for others timed out.
pub fn still_behind(names: &[String]) -> Error {
    let message = format!("the deadline passed while the worker waited for {}", names.join(", "));
    Error::new(Kind::Deadline, message)
}
