//! What a copied snapshot makes needless: the log before it, except what the other kept snapshots need.

use crate::backup::bucket::Bucket;
use crate::backup::fetch::described;
use crate::backup::upload::folders;
use crate::persistence::Files;
use fastps_core::error::Result;
use fastps_core::failpoint::reach;
use fastps_durable::copy::MANIFEST_NAME;
use fastps_durable::owner::{LogPosition, is_needless};

/// Notes that `latest` names a snapshot from which the log is replayed from `log` on, and removes the pieces that
/// nobody needs any more.
pub(crate) async fn snapshot_is_copied(
    bucket: &Bucket,
    shard: u32,
    files: &Files,
    log: LogPosition,
) -> Result<()> {
    let Some(owner) = files.owner() else { return Ok(()) };
    let has_pieces = owner.record().is_some_and(|record| record.tip.copied != LogPosition::default());
    let copied = match files.log_copy() {
        Some(copy) => copy.add_snapshot(log),
        // Of a server before this one, which copied its log.
        None if has_pieces => log,
        None => return Ok(()),
    };
    let Some(oldest) = oldest(bucket, shard).await? else { return Ok(()) };
    owner.change(|claim| {
        claim.copied(copied);
        claim.forget(oldest);
    });
    let Some(record) = owner.record() else { return Ok(()) };
    reach("pieces_needless");
    let pieces = bucket.pieces(shard).await?;
    let needless = pieces.into_iter().filter(|piece| is_needless(*piece, &record, oldest));
    bucket.remove_pieces(shard, needless).await?;
    reach("pieces_removed");
    Ok(())
}

/// The place that the log is replayed from after the oldest kept snapshot. Fails if one of them cannot be read:
/// its log stays.
async fn oldest(bucket: &Bucket, shard: u32) -> Result<Option<LogPosition>> {
    let (home, mut oldest) = (bucket.shard(shard), None);
    for ((_, name), objects) in folders(bucket, &home).await? {
        if objects.iter().any(|object| object.location.filename() == Some(MANIFEST_NAME)) {
            let log = described(bucket, &home.clone().join(name.as_str())).await?.log();
            oldest = Some(oldest.map_or(log, |oldest: LogPosition| oldest.min(log)));
        }
    }
    Ok(oldest)
}
