//! Copies what a server's history has gained, and removes from the bucket what the history has no room for.

use super::prune::{begin, bytes};
use crate::backup::bucket::Bucket;
use crate::backup::upload::{remove, send};
use crate::persistence::Files;
use fastps_core::error::Result;
use fastps_core::failpoint::reach;
use fastps_durable::KeptHistory;
use fastps_durable::copy::{CopiedSnapshot, Held, MANIFEST_NAME, Sealed};
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use std::path::Path as FilePath;

/// Copies the history of the shard whose directory this is. To be called when `latest` names one of its snapshots:
/// then no other server writes there. Interrupted, it goes on where it was with the next call. Returns the bytes of the
/// history that the bucket has.
pub(crate) async fn copy_history(
    bucket: &Bucket,
    shard: u32,
    files: &Files,
    directory: &FilePath,
) -> Result<u64> {
    let Some(journal) = files.journal() else { return Ok(0) };
    let Some(kept) = journal.kept_history()? else { return Ok(0) };
    copy_kept(bucket, shard, &kept, directory).await
}

pub(super) async fn copy_kept(
    bucket: &Bucket,
    shard: u32,
    kept: &KeptHistory,
    directory: &FilePath,
) -> Result<u64> {
    let home = bucket.history(shard, &kept.directory);
    let there = bucket.list_history(&home).await?;
    for number in kept.segments.iter().filter(|number| !there.segments.contains_key(number)) {
        // One that was removed meanwhile is no history any more.
        if let Some((sealed, file, path)) = Sealed::open(directory, *number)? {
            send(bucket, &home.clone().join(sealed.name()), sealed.part(), &file, &path).await?;
            reach("history_segment_copied");
        }
    }
    // After the log that follows them, so that each has some.
    for number in kept.snapshots.iter().filter(|number| !there.snapshots.contains_key(number)) {
        match Held::open(directory, *number) {
            Ok(held) => copy_snapshot(bucket, &home, &held).await?,
            Err(error) if Held::after(directory, number - 1)?.contains(number) => return Err(error),
            Err(_) => {}
        }
    }
    prune(bucket, kept, &home).await
}

async fn copy_snapshot(bucket: &Bucket, home: &Path, held: &Held) -> Result<()> {
    let to = home.clone().join(CopiedSnapshot::of(&held.described).name());
    for (part, file) in &held.files {
        send(bucket, &to.clone().join(part.name), *part, file, &held.path.join(part.name)).await?;
        reach("history_file_copied");
    }
    let place = to.join(MANIFEST_NAME);
    let manifest = PutPayload::from(held.described.text().to_vec());
    bucket.store.put(&place, manifest).await.map(drop).map_err(|error| bucket.failed("write", &place, &error))
}

/// Removes what the copied history has no room for, and snapshots that nobody completes. Returns the bytes of the rest.
async fn prune(bucket: &Bucket, kept: &KeptHistory, home: &Path) -> Result<u64> {
    let there = bucket.list_history(home).await?;
    let begin = begin(&there, kept);
    let older = there.snapshots.values().filter(|stored| stored.snapshot.log < begin);
    let abandoned = there.incomplete.values();
    // The manifest goes first: a snapshot without one is none.
    let mut gone: Vec<_> = older.chain(abandoned).flat_map(|stored| stored.places.clone()).collect();
    // Then the log, the oldest first: what is left reaches the end.
    gone.extend(there.segments.range(..begin).map(|(_, sealed)| home.clone().join(sealed.name())));
    for place in gone {
        reach("history_object_removed");
        let removed = remove(bucket, [place].into_iter()).await;
        removed.map_err(|error| bucket.failed("remove older history from", home, &error))?;
    }
    Ok(bytes(&there, begin))
}
