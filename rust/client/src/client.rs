//! A client of a cluster with the state that all its calls need: the map, the sequence numbers, and the
//! thread that drives its connections.

use crate::link::deadlines::Deadlines;
use crate::link::refresh::refresh;
use crate::link::session::goodbye;
use crate::link::state::closed;
use crate::link::wait::Links;
use crate::options::ConnectOptions;
use crate::state::map::{Entry, Map};
use crate::state::runtime::{Driver, lock};
use crate::state::shared::Shared;
use crate::state::spaces::KnownSpaces;
use crate::state::time::after;
use fastps_core::codec::ErrorFeedback;
use fastps_core::error::{Error, Kind, Result, unknown_tensor};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long a call waits for a newer map before it uses the present one.
const MAP_REFRESH_TIMEOUT: Duration = Duration::from_millis(500);

/// Limit on notifying all servers that the client is closed.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(500);

/// A client of a cluster, with its own identity, and a connection to each shard. Dropping it closes it.
pub struct Client {
    pub(crate) addresses: Vec<String>,
    pub(crate) options: ConnectOptions,
    pub(crate) driver: Arc<Driver>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) links: Links,
    pub(crate) map: Arc<Map>,
    pub(crate) deadlines: Arc<Deadlines>,
    /// The last sequence number; held while a push is queued, so that all links see pushes in one order.
    pub(crate) sequence: Mutex<u64>,
    pub(crate) registering: Arc<tokio::sync::Mutex<()>>,
    /// The spaces of vectors that it has opened, or computes portions for.
    pub(crate) spaces: Mutex<KnownSpaces>,
    /// Set if workers or replicas of this client may hold portions of samples, or it may have a coordinator's
    /// seat.
    pub(crate) has_portions: AtomicBool,
    pub(crate) closed: watch::Sender<bool>,
}

impl Client {
    /// Waits until no push of this residual is in doubt, before it is saved or used by another client.
    pub fn settle(&self, feedback: &Arc<Mutex<ErrorFeedback>>, timeout: Duration) -> Result<()> {
        self.is_open()?;
        self.shared.settle_doubts(feedback, after(timeout))
    }

    /// The shards' addresses, in the order of their indices.
    pub fn addresses(&self) -> Vec<String> {
        self.links.iter().map(|link| link.address()).collect()
    }

    /// Fails once the client is closed, or its tensors are gone.
    pub(crate) fn alive(&self) -> Result<()> {
        self.is_open()?;
        self.shared.fence.check()
    }

    pub(crate) fn is_open(&self) -> Result<()> {
        self.shared.process.check()?;
        if *self.closed.borrow() { Err(closed()) } else { Ok(()) }
    }

    pub(crate) fn lock_sequence(&self) -> MutexGuard<'_, u64> {
        lock(&self.sequence)
    }

    /// Identifies this client in [`fastps_core::verbs::Versions`]: `own` counts end with a link's
    /// incarnation.
    pub(crate) fn versions_id(&self) -> u64 {
        self.shared.client.wrapping_add(self.shared.incarnations.load(Ordering::Acquire))
    }

    /// The entries of these tensors; asks shard 0 for unknown ones.
    pub(crate) fn look_up<'a>(
        &self,
        names: impl Iterator<Item = &'a Arc<str>> + Clone,
        deadline: Instant,
    ) -> Result<(u64, Vec<Arc<Entry>>)> {
        self.alive()?;
        self.shared.lost.raise()?;
        if self.shared.map_is_stale.swap(false, Ordering::AcqRel)
            && self.refresh(Vec::new(), deadline.min(after(MAP_REFRESH_TIMEOUT))).is_err()
        {
            // The present map is used until shard 0 is back.
            self.shared.map_is_stale.store(true, Ordering::Release);
            if Instant::now() >= deadline {
                return Err(Error::new(Kind::Deadline, "the map of the tensors is not up to date"));
            }
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

    /// As [`Client::look_up`], with what `check` makes of the entries. Before it fails, shard 0 is asked again:
    /// another client may have removed a tensor and registered one of the same name.
    pub(crate) fn look_up_for<'a, T>(
        &self,
        names: impl Iterator<Item = &'a Arc<str>> + Clone,
        deadline: Instant,
        mut check: impl FnMut(&[Arc<Entry>]) -> Result<T>,
    ) -> Result<(u64, Vec<Arc<Entry>>, T)> {
        let (epoch, entries) = self.look_up(names.clone(), deadline)?;
        let error = match self.doubted(check(&entries)) {
            Ok(made) => return Ok((epoch, entries, made)),
            Err(error) => error,
        };
        if !self.shared.map_is_stale.load(Ordering::Acquire) {
            return Err(error);
        }
        let (epoch, entries) = self.look_up(names, deadline)?;
        let made = check(&entries)?;
        Ok((epoch, entries, made))
    }

    /// Has the map asked for again by the next call if something does not fit the entries of this one.
    pub(crate) fn doubted<T>(&self, checked: Result<T>) -> Result<T> {
        let is_of_the_entries = |error: &Error| {
            matches!(error.kind, Kind::Shape | Kind::DType | Kind::Config | Kind::Precondition)
        };
        if checked.as_ref().is_err_and(is_of_the_entries) {
            self.doubt();
        }
        checked
    }

    /// Has the map asked for again by the next call.
    pub(crate) fn doubt(&self) {
        self.shared.map_is_stale.store(true, Ordering::Release);
    }

    /// Error for a name that shard 0 does not list.
    fn unknown(&self, name: String) -> Error {
        if self.map.is_gone(&name) {
            return Error::new(Kind::UnknownTensor, self.links[0].gone(&name)).tensor(name);
        }
        let message = format!("no tensor of this name is registered at {}", self.addresses().join(", "));
        unknown_tensor(message, &name, self.map.names().iter().map(|known| &**known))
    }

    /// Brings the map up to date with shard 0, for some tensors or for all.
    pub(crate) fn refresh(&self, names: Vec<String>, deadline: Instant) -> Result<()> {
        let (map, link, shards) = (self.map.clone(), self.links[0].clone(), self.links.len());
        self.block(async move { refresh(&map, &link, shards, &names, deadline).await })
    }

    /// Waits for work; closing the client ends it.
    pub(crate) fn block<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut ended = self.closed.subscribe();
        self.driver.drive(async |_| {
            tokio::select! {
                result = work => result,
                _ = ended.wait_for(|closed| *closed) => Err(closed()),
            }
        })
    }

    pub(crate) fn shut(&self, within: Duration) {
        if self.shared.process.check().is_err() || self.closed.send_replace(true) {
            return;
        }
        if let Some(resolution) = &self.shared.resolution {
            resolution.close();
        }
        let goodbyes: Vec<_> = self.links.iter().filter_map(goodbye).collect();
        self.links.iter().for_each(|link| link.close());
        if !goodbyes.is_empty() {
            self.driver.finish(futures_util::future::join_all(goodbyes), GOODBYE_TIMEOUT.min(within));
        }
        self.driver.end();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shut(GOODBYE_TIMEOUT);
        if self.shared.process.check().is_err() {
            // A forked child must not touch what the parent's runtime might have held locked.
            std::mem::forget((std::mem::take(&mut self.links), self.driver.clone()));
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("addresses", &self.addresses()).finish_non_exhaustive()
    }
}
