//! The native client: the verbs of [`fastps_core::verbs::ParameterServer`] on a cluster of servers.
//!
//! A push's way: `push` checks, encodes and makes one frame per slice; `link` queues them per shard; `session` drives
//! the link over connections; `answer` takes what comes back to the `call`, where the caller waits; `receipts` says
//! what became of it. What stays unanswered when the caller gives up becomes a `doubt`.

mod answer;
mod call;
mod checkpoint;
mod connect;
mod control;
mod deadlines;
mod doubt;
mod groups;
mod link;
mod lost;
mod map;
mod payload;
mod portions;
mod pull;
mod push;
mod queue;
mod receipts;
mod register;
mod runtime;
mod session;
mod sparse;
mod stats;
mod stream;
mod verbs;
mod waiting;
mod way;

pub use checkpoint::Snapshot;
pub use connect::{Ack, ConnectOptions};
pub(crate) use control::channel;
pub use waiting::{WaitsFor, on_wait};
pub use way::Transport;

use crate::secret::Secret;
use deadlines::Deadlines;
use doubt::Doubt;
use fastps_core::codec::ErrorFeedback;
use fastps_core::error::{Error, Kind, Result};
use groups::Place;
use link::{Link, closed};
use lost::Losses;
use map::{Entry, Map};
use runtime::{Driver, Process, lock};
use stats::Counters;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long a call waits for a newer map before it makes do with the one at hand.
const REFRESH: Duration = Duration::from_millis(500);

/// A client of a cluster: its own identity, its own connection to each shard. Dropping it closes it.
pub struct Client {
    addresses: Vec<String>,
    options: ConnectOptions,
    driver: Arc<Driver>,
    shared: Arc<Shared>,
    links: Vec<Arc<Link>>,
    map: Arc<Map>,
    deadlines: Arc<Deadlines>,
    /// The last sequence number; held while a push is queued, so that all links see pushes in one order.
    turn: Mutex<u64>,
    registering: Arc<tokio::sync::Mutex<()>>,
    /// Workers of this client may hold portions of samples.
    has_portions: AtomicBool,
    closed: watch::Sender<bool>,
}

/// What a client's links, calls and tickets share.
#[derive(Debug)]
pub(crate) struct Shared {
    process: Process,
    client: u64,
    /// Shows its servers that a call, a stream or a hello is this client's.
    secret: Secret,
    name: String,
    /// The map that its client has, too.
    map: Arc<Map>,
    ack: Ack,
    checksums: Option<bool>,
    counters: Counters,
    /// How often a link had to take a new incarnation.
    incarnations: AtomicU64,
    /// The map names slices that a server does not have, or servers that forgot them.
    map_is_stale: AtomicBool,
    /// What servers that were started anew lack.
    lost: Losses,
    /// Its places in groups of workers.
    places: Mutex<Vec<Place>>,
    some_place_is_lost: AtomicBool,
    /// Doubts whose content may go back to a residual.
    doubts: Mutex<Vec<Arc<Doubt>>>,
}

impl Shared {
    fn note_doubt(&self, doubt: &Arc<Doubt>) {
        stats::count(&self.counters.in_doubt, 1);
        let mut doubts = lock(&self.doubts);
        doubts.retain(|d| !d.is_settled());
        doubts.push(doubt.clone());
    }

    /// Waits until nothing that belongs to this residual is in doubt any more.
    fn settle_doubts(&self, feedback: &Arc<Mutex<ErrorFeedback>>, deadline: Instant) -> Result<()> {
        let doubts: Vec<_> = lock(&self.doubts).iter().filter(|d| d.concerns(feedback)).cloned().collect();
        doubts.iter().try_for_each(|doubt| doubt.wait_until(deadline).map(drop))
    }
}

impl Client {
    /// Waits until nothing that belongs to this residual is in doubt any more: before it is saved, or used by somebody
    /// else.
    pub fn settle(&self, feedback: &Arc<Mutex<ErrorFeedback>>, timeout: Duration) -> Result<()> {
        self.alive()?;
        self.shared.settle_doubts(feedback, after(timeout))
    }

    /// The shards' addresses, in the order of their indices.
    pub fn addresses(&self) -> Vec<String> {
        self.links.iter().map(|link| link.address.clone()).collect()
    }

    fn alive(&self) -> Result<()> {
        self.shared.process.check()?;
        if *self.closed.borrow() { Err(closed()) } else { Ok(()) }
    }

    fn turn(&self) -> MutexGuard<'_, u64> {
        lock(&self.turn)
    }

    /// Identifies this client in [`fastps_core::verbs::Versions`]: `own` counts end with a link's incarnation.
    fn versions_id(&self) -> u64 {
        self.shared.client.wrapping_add(self.shared.incarnations.load(Ordering::Acquire))
    }

    /// The entries of these tensors; shard 0 is asked for those that are not known.
    fn look_up<'a>(
        &self,
        names: impl Iterator<Item = &'a Arc<str>> + Clone,
        deadline: Instant,
    ) -> Result<(u64, Vec<Arc<Entry>>)> {
        self.alive()?;
        self.raise_lost()?;
        if self.shared.map_is_stale.swap(false, Ordering::AcqRel)
            && self.refresh(Vec::new(), deadline.min(after(REFRESH))).is_err()
        {
            // The map that we have must do, until shard 0 is back.
            self.shared.map_is_stale.store(true, Ordering::Release);
        }
        for asked in [false, true] {
            let (epoch, found) = self.map.look_up(names.clone());
            let missing: Vec<_> = names
                .clone()
                .zip(&found)
                .filter(|(_, entry)| entry.is_none())
                .map(|(name, _)| name.to_string())
                .collect();
            let Some(first) = missing.first().cloned() else {
                return Ok((epoch, found.into_iter().flatten().collect()));
            };
            if asked {
                return Err(self.unknown(first));
            }
            self.refresh(missing, deadline).map_err(|error| error.tensor(first))?;
        }
        Err(Error::new(Kind::Internal, "the map was asked and did not answer"))
    }

    /// The error of a name that shard 0 does not list.
    fn unknown(&self, name: String) -> Error {
        let message = if self.map.is_gone(&name) {
            self.links[0].gone(&name)
        } else {
            format!("no tensor of this name is registered at {}", self.addresses().join(", "))
        };
        Error::new(Kind::UnknownTensor, message).tensor(name)
    }

    /// Brings the map up to date with shard 0, for some tensors or for all.
    fn refresh(&self, names: Vec<String>, deadline: Instant) -> Result<()> {
        let (map, link, shards) = (self.map.clone(), self.links[0].clone(), self.links.len());
        self.block(async move { map::refresh(&map, &link, shards, names, deadline).await })
    }

    /// Waits for work; closing the client ends it.
    fn block<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut ended = self.closed.subscribe();
        self.driver.drive(async |_| {
            tokio::select! {
                result = work => result,
                _ = ended.wait_for(|closed| *closed) => Err(closed()),
            }
        })
    }

    fn shut(&self) {
        if self.shared.process.check().is_err() || self.closed.send_replace(true) {
            return;
        }
        self.links.iter().for_each(|link| link.close());
        self.driver.end();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shut();
        if self.shared.process.check().is_err() {
            // In a forked child nobody may touch what the parent's runtime might have held locked.
            std::mem::forget((std::mem::take(&mut self.links), self.driver.clone()));
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("addresses", &self.addresses()).finish_non_exhaustive()
    }
}

/// A point in time that far from now; times beyond what clocks can say are cut to a millennium.
fn after(timeout: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_hours(365_000 * 24);
    Instant::now() + timeout.min(LONGEST)
}
