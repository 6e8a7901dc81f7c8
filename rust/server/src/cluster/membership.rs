//! A shard's membership in its cluster: the cluster's identity, and whether the shard may serve. Shard 0 has
//! the identity, and always may; the others learn it from shard 0, and whether they have what it lists on
//! them (`loss`).

use crate::cluster::node::Node;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::Event;
use fastps_transport::addressee;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tonic::metadata::MetadataMap;

/// Retry delay of calls that depend on shard 0.
const RETRY_AFTER_MS: u64 = 100;

/// Permission of the shard to serve.
#[derive(Clone, Debug)]
pub(crate) enum Standing {
    /// It has the slices that shard 0 lists, as far as it knows.
    Serves,
    /// It asks shard 0 which slices it should have, or is about to drop what is lost. Holds the reason for a
    /// long wait.
    Waits(Option<Error>),
    /// It has lost slices.
    Refuses(Error),
}

/// A shard's membership in its cluster.
#[derive(Debug)]
pub(crate) struct Membership {
    /// Identity of the cluster; 0: not known yet.
    id: AtomicU64,
    standing: Mutex<Standing>,
    /// Signals that shard 0 belongs to another cluster than before.
    doubted: Notify,
    /// Set when lost slices may be dropped.
    pub(crate) accept_loss: bool,
}

impl Membership {
    /// The membership of a shard that knows this identity (0: none).
    pub(crate) fn new(id: u64, standing: Standing, accept_loss: bool) -> Self {
        let (id, standing) = (AtomicU64::new(id), Mutex::new(standing));
        Self { id, standing, doubted: Notify::new(), accept_loss }
    }

    /// Identity of the cluster; 0: not known yet.
    pub(crate) fn id(&self) -> u64 {
        self.id.load(Ordering::Acquire)
    }

    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn change(&self, standing: Standing) {
        *self.standing() = standing;
    }

    /// Handles a shard 0 that does not answer: a shard with slices serves them, one without has nothing to
    /// serve.
    pub(crate) fn go_on_without_first(&self, has_slices: bool, why: Error) {
        let mut standing = self.standing();
        if let Standing::Waits(_) = *standing {
            *standing = if has_slices { Standing::Serves } else { Standing::Waits(Some(why)) };
        }
    }

    /// Fails unless the shard may serve.
    pub(crate) fn check(&self) -> Result<()> {
        match &*self.standing() {
            Standing::Serves => Ok(()),
            // A TLS refusal is final.
            Standing::Waits(Some(why)) if why.kind == Kind::Denied => Err(why.clone()),
            Standing::Waits(why) => {
                let mut message = "the shard waits for shard 0 to say which slices it should have".to_owned();
                if let Some(why) = why {
                    message = format!("{message}: {why}");
                }
                Err(Error::new(Kind::Unavailable, message).retry_after_ms(RETRY_AFTER_MS))
            }
            Standing::Refuses(error) => Err(error.clone()),
        }
    }

    /// Waits until shard 0 has turned out to be of another cluster.
    pub(crate) async fn doubted(&self) {
        self.doubted.notified().await;
    }
}

impl Node {
    /// Takes the identity that shard 0 reports. Fails if it differs from that of the slices here.
    pub(crate) fn hear(&self, id: u64) -> Result<()> {
        let known = self.membership.id();
        if id == 0 || id == known {
            return Ok(());
        }
        if known != 0 && self.reservations.holds_any() {
            self.membership.doubted.notify_one();
            return Err(Error::new(Kind::Unavailable, "shard 0 is of another cluster than this shard")
                .retry_after_ms(RETRY_AFTER_MS));
        }
        self.learn(id);
        Ok(())
    }

    /// Assigns the shard's slices to this cluster.
    pub(crate) fn learn(&self, id: u64) {
        if self.membership.id.swap(id, Ordering::AcqRel) != id {
            self.files.step(|| Event::ClusterLearned(id));
        }
    }

    /// Fails if a call addresses another cluster or another shard.
    pub(crate) fn check_addressee(&self, metadata: &MetadataMap) -> Result<()> {
        let (cluster, shard) = addressee::named(metadata);
        let own = self.membership.id();
        if let Some(other) = cluster.filter(|other| own != 0 && *other != own) {
            let why = "this server is of another cluster than the one that the client knows: its tensors are not here. \
                       Create a new client and register them again, or start that cluster again";
            return Err(Error::new(Kind::Fenced, why)
                .expected(format!("cluster {other:016x}"), format!("cluster {own:016x}")));
        }
        match shard.filter(|shard| *shard != self.index()) {
            Some(shard) => {
                let why = "the call was meant for another shard: its address leads to several";
                Err(Error::new(Kind::Precondition, why)
                    .expected(format!("shard {shard}"), format!("shard {}", self.index())))
            }
            None => Ok(()),
        }
    }
}
