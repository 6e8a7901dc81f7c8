//! A shard's membership in its cluster: the cluster's identity, and whether the shard may serve. Shard 0 has
//! the identity, and always may; the others learn it from shard 0, and whether they have what it lists on
//! them (`loss`).

use fastps_core::error::{Error, Kind, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Retry delay of calls that depend on shard 0.
pub(crate) const RETRY_AFTER_MS: u64 = 100;

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

    /// Takes the identity of the cluster. Returns whether it differs from the known one.
    pub(crate) fn learn(&self, id: u64) -> bool {
        self.id.swap(id, Ordering::AcqRel) != id
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

    /// Signals that shard 0 belongs to another cluster than before.
    pub(crate) fn doubt(&self) {
        self.doubted.notify_one();
    }

    /// Waits until shard 0 has turned out to be of another cluster.
    pub(crate) async fn doubted(&self) {
        self.doubted.notified().await;
    }
}
