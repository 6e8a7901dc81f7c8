//! The addressee of a call, in its metadata. An address may lead to another server than before: one of
//! another cluster that has taken the port, or another shard. Such a server refuses the call.

use tonic::metadata::{MetadataMap, MetadataValue};

/// The metadata that names the cluster, by its identity in decimal.
const CLUSTER: &str = "fastps-cluster";
/// The metadata that names the shard, by its index in decimal.
const SHARD: &str = "fastps-shard";

/// A shard of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addressee {
    /// Identity of the cluster; 0: unknown.
    pub cluster_id: u64,
    /// Index of the shard.
    pub shard: u32,
}

impl Addressee {
    /// Adds it to the metadata of a call.
    pub fn write(self, metadata: &mut MetadataMap) {
        if self.cluster_id != 0 {
            metadata.insert(CLUSTER, MetadataValue::from(self.cluster_id));
        }
        metadata.insert(SHARD, MetadataValue::from(self.shard));
    }
}

/// The cluster and the shard in the metadata of a call, if present.
pub fn named(metadata: &MetadataMap) -> (Option<u64>, Option<u32>) {
    let text = |name| metadata.get(name)?.to_str().ok();
    (text(CLUSTER).and_then(|id| id.parse().ok()), text(SHARD).and_then(|shard| shard.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_name_their_addressee() {
        let written = |cluster_id| {
            let mut metadata = MetadataMap::new();
            Addressee { cluster_id, shard: 3 }.write(&mut metadata);
            named(&metadata)
        };
        assert_eq!(written(u64::MAX), (Some(u64::MAX), Some(3)));
        assert_eq!(written(0), (None, Some(3)));
        assert_eq!(named(&MetadataMap::new()), (None, None));
    }
}
