//! Identity of a shard: its cluster, which shard 0 names, and its number.

use crate::cluster::membership::RETRY_AFTER_MS;
use crate::cluster::node::Node;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::Event;
use fastps_transport::addressee;
use tonic::metadata::MetadataMap;

impl Node {
    /// Takes the identity that shard 0 reports. Fails if it differs from that of the slices here.
    pub(crate) fn hear(&self, id: u64) -> Result<()> {
        let known = self.membership.id();
        if id == 0 || id == known {
            return Ok(());
        }
        if known != 0 && self.reservations.holds_any() {
            self.membership.doubt();
            return Err(Error::new(Kind::Unavailable, "shard 0 is of another cluster than this shard")
                .retry_after_ms(RETRY_AFTER_MS));
        }
        self.learn(id);
        Ok(())
    }

    /// Assigns the shard's slices to this cluster.
    pub(crate) fn learn(&self, id: u64) {
        if self.membership.learn(id) {
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
