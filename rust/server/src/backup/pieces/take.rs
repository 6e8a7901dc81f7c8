//! Takes a shard over from its bucket: the newest snapshot and the log after it, into an empty directory.

use crate::backup::bucket::Bucket;
use crate::backup::fetch::{described, download};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_durable::copy::{self, Taken};
use fastps_durable::owner::{LogPosition, Record, history};
use futures_util::stream::{StreamExt, TryStreamExt, iter};
use std::path::Path;

/// Pieces that are read at a time.
const MAX_PIECES_IN_FLIGHT: usize = 4;

/// Fills a shard's directory with what its former owners copied, according to their record, and returns where that
/// ends. `latest` must name the term of this server: an earlier owner changes nothing any more that is read here.
pub(crate) async fn take(bucket: &Bucket, record: &Record, directory: &Path) -> Result<LogPosition> {
    let shard = record.shard;
    let pieces = bucket.pieces(shard).await?;
    reach("take_listed");
    let mut taken = Taken::begin(directory)?;
    let latest = bucket.latest(shard).await?;
    let from = match &latest {
        Some((latest, _)) => {
            let folder = bucket.shard(shard).join(latest.folder.as_str());
            let described = described(bucket, &folder).await?;
            download(bucket, &folder, &described, &taken.folder(&described)?).await?;
            reach("take_downloaded");
            taken.complete(&described, &latest.folder)?;
            described.log()
        }
        // Its log was copied from the beginning of the shard on.
        None if record.tip.copied.segment > 0 => LogPosition { segment: 1, offset: 0 },
        None => return Err(nothing_copied(bucket, shard)),
    };
    let history = history(&pieces, record, from)?;
    if latest.is_none() && history.pieces.is_empty() {
        return Err(nothing_copied(bucket, shard));
    }
    let count = history.pieces.len();
    let read = |piece| async move { bucket.piece(shard, piece).await.map(|bytes| (piece, bytes)) };
    let mut bytes = iter(history.pieces).map(read).buffered(MAX_PIECES_IN_FLIGHT);
    while let Some((piece, bytes)) = bytes.try_next().await? {
        taken.add(piece, &bytes)?;
        reach("take_piece");
    }
    copy::note_served(directory, record.term)?;
    reach("take_filled");
    taken.finish()?;
    tracing::info!(
        shard,
        pieces = count,
        "read the newest snapshot and the log after it from {}",
        bucket.url
    );
    Ok(history.end)
}

fn nothing_copied(bucket: &Bucket, shard: u32) -> Error {
    let message = format!("nothing of the shard has been copied to {} yet", bucket.url);
    Error::new(Kind::Config, message)
        .shard(shard)
        .expected("a snapshot, or the log from its beginning", "neither")
}
