//! Who owns the shards of the cluster, as shard 0 tells clients.

use fastps_proto::v1 as pb;
use futures_util::future::BoxFuture;
use futures_util::stream::{StreamExt, iter};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Least time between two readings of the records, and limit of one.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);
/// Records that are read at a time.
const MAX_LOOKS: usize = 8;

/// Asks the record of a shard who owns it and serves it; `None`: nobody, or it cannot be read.
pub(crate) struct OwnerRecords(
    pub(crate) Box<dyn Fn(u32) -> BoxFuture<'static, Option<pb::ShardOwner>> + Send + Sync>,
);

impl fmt::Debug for OwnerRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnerRecords")
    }
}

/// The owners, as last read.
#[derive(Debug)]
pub(crate) struct KnownOwners {
    records: OwnerRecords,
    shards: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    owners: Vec<pb::ShardOwner>,
    /// When they were read last, or began to be.
    looked: Option<Instant>,
}

impl KnownOwners {
    pub(crate) fn new(records: OwnerRecords, shards: usize) -> Arc<Self> {
        Arc::new(Self { records, shards: shards as u32, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The owners, as last read; empty: they have not been read yet. Has them read again, for later calls, if that was
    /// some time ago.
    pub(crate) fn known(self: &Arc<Self>) -> Vec<pb::ShardOwner> {
        let mut state = self.state();
        if state.looked.is_none_or(|looked| looked.elapsed() >= LOOK_INTERVAL) {
            state.looked = Some(Instant::now());
            tokio::spawn(self.clone().read());
        }
        state.owners.clone()
    }

    async fn read(self: Arc<Self>) {
        let ask = |shard| {
            let asked = (self.records.0)(shard);
            async move { tokio::time::timeout(LOOK_TIMEOUT, asked).await.ok().flatten().unwrap_or_default() }
        };
        let owners: Vec<_> = iter(0..self.shards).map(ask).buffered(MAX_LOOKS).collect().await;
        self.state().owners = owners;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[tokio::test]
    async fn records_are_read_for_a_later_call_and_not_for_each() {
        let reads = Arc::new(AtomicU64::new(0));
        let counted = reads.clone();
        let records = OwnerRecords(Box::new(move |shard| {
            let term = counted.fetch_add(1, Ordering::Relaxed) / 2 + 1;
            let owner = pb::ShardOwner { address: format!("host-{shard}:7070"), term };
            Box::pin(async move { (shard == 0).then_some(owner) })
        }));
        let known = KnownOwners::new(records, 2);
        let of_term = |term| {
            vec![pb::ShardOwner { address: "host-0:7070".to_owned(), term }, pb::ShardOwner::default()]
        };
        assert!(known.known().is_empty() && known.known().is_empty(), "no call waits");
        for term in 1..3 {
            while known.state().owners != of_term(term) {
                tokio::task::yield_now().await;
            }
            assert_eq!((known.known(), reads.load(Ordering::Relaxed)), (of_term(term), 2 * term));
            tokio::time::sleep(LOOK_INTERVAL).await;
            assert_eq!(known.known(), of_term(term), "and none waits for the next reading");
        }
    }
}
