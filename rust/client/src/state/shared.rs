//! State that a client's links, calls and tickets share.

use crate::options::Ack;
use crate::state::doubt::Doubt;
use crate::state::fence::Fence;
use crate::state::lost::Losses;
use crate::state::map::Map;
use crate::state::memberships::Memberships;
use crate::state::owners::Owners;
use crate::state::report::Reports;
use crate::state::resolution::Resolution;
use crate::state::runtime::{Process, lock};
use crate::state::stats::{self, Counters};
use fastps_core::codec::ErrorFeedback;
use fastps_core::error::Result;
use fastps_transport::bearer::Bearer;
use fastps_transport::secret::Secret;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// State that a client's links, calls and tickets share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) process: Process,
    pub(crate) client: u64,
    /// Proves to servers that a call, a stream or a hello is this client's.
    pub(crate) secret: Secret,
    /// Proves to servers who calls.
    pub(crate) bearer: Bearer,
    pub(crate) name: String,
    /// The client's map.
    pub(crate) map: Arc<Map>,
    pub(crate) ack: Ack,
    /// Questions where the servers are, if the client has a resolver.
    pub(crate) resolution: Option<Arc<Resolution>>,
    /// Who owns the shards.
    pub(crate) owners: Owners,
    pub(crate) checksums: Option<bool>,
    pub(crate) counters: Counters,
    /// Number of new incarnations of links.
    pub(crate) incarnations: AtomicU64,
    /// Set when the map names slices that a server lacks, or servers that forgot them.
    pub(crate) map_is_stale: AtomicBool,
    /// The client's end, if its tensors are gone.
    pub(crate) fence: Fence,
    /// Changes that restarted servers lack.
    pub(crate) lost: Losses,
    /// The client's memberships in groups of workers.
    pub(crate) memberships: Memberships,
    /// The worker's report, which goes to shard 0.
    pub(crate) report: Reports,
    /// Doubts whose content may return to a residual.
    pub(crate) doubts: Mutex<Vec<Arc<Doubt>>>,
}

impl Shared {
    pub(crate) fn note_doubt(&self, doubt: &Arc<Doubt>) {
        stats::count(&self.counters.in_doubt, 1);
        let mut doubts = lock(&self.doubts);
        doubts.retain(|d| !d.is_settled());
        doubts.push(doubt.clone());
    }

    /// Waits until no push of this residual is in doubt.
    pub(crate) fn settle_doubts(
        &self,
        feedback: &Arc<Mutex<ErrorFeedback>>,
        deadline: Instant,
    ) -> Result<()> {
        let doubts: Vec<_> = lock(&self.doubts).iter().filter(|d| d.concerns(feedback)).cloned().collect();
        doubts.iter().try_for_each(|doubt| doubt.wait_until(deadline).map(drop))
    }
}
