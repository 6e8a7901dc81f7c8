//! Who owns the shards of a bucket, for people.

use crate::backup::bucket::{Bucket, block};
use crate::backup::fetch::{described, shards};
use fastps_core::error::Result;
use fastps_durable::owner::Record;
use object_store::ObjectStoreExt;

/// A shard, as its bucket tells.
#[derive(Clone, Debug)]
pub struct Owned {
    /// Index of the shard.
    pub shard: u32,
    /// Who owns it; `None`: its servers have no --owner-lease.
    pub record: Option<Record>,
    /// When the record was written last, in seconds since 1970 by the store's clock.
    pub renewed: Option<u64>,
    /// The newest copied snapshot: its number, and its time in seconds since 1970.
    pub copy: Option<(u64, u64)>,
}

/// The shards of a bucket, ascending.
pub fn owners(bucket: &Bucket) -> Result<Vec<Owned>> {
    block(async {
        let mut owned = Vec::new();
        for shard in shards(bucket).await? {
            owned.push(owner_of(bucket, shard).await.map_err(|error| error.shard(shard))?);
        }
        Ok(owned)
    })
}

async fn owner_of(bucket: &Bucket, shard: u32) -> Result<Owned> {
    let record = bucket.owner(shard).await?.map(|(record, _)| *record);
    let place = bucket.owner_place(shard);
    let renewed = match bucket.store.head(&place).await {
        Ok(found) => u64::try_from(found.last_modified.timestamp()).ok(),
        Err(object_store::Error::NotFound { .. }) => None,
        Err(error) => return Err(bucket.failed("read", &place, &error)),
    };
    let copy = match bucket.latest(shard).await? {
        Some((latest, _)) => {
            let described = described(bucket, &bucket.shard(shard).join(latest.folder.as_str())).await?;
            Some((latest.generation, described.written()))
        }
        None => None,
    };
    Ok(Owned { shard, record, renewed, copy })
}
