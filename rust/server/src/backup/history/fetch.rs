//! Fetches from a bucket what a moment of the past needs: the log from the snapshot before it on, the lists of the
//! snapshots' slices, and the values of one snapshot.

use super::listing::{Listing, Stored};
use crate::backup::bucket::{Bucket, block};
use crate::backup::fetch::{described, download_file, missing};
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::copy::{CopiedSnapshot, Latest, PastFolder, Sealed, chain};
use fastps_durable::{Moment, bases};
use object_store::path::Path;
use std::fs::remove_file;
use std::path::Path as FilePath;

/// Limit on restarts because a server has removed what was being read.
const MAX_READ_ATTEMPTS: usize = 3;

/// A shard in the bucket, and its part of the folder.
struct Shard {
    latest: Latest,
    home: Path,
    listing: Listing,
    folder: PastFolder,
}

/// Builds a data directory for reading in a folder, or adds to it what a moment needs; `None`: all of the log, without
/// values.
pub fn fetch_past(bucket: &Bucket, folder: &FilePath, moment: Option<&Moment>) -> Result<()> {
    PastFolder::note_source(folder, &bucket.url)?;
    block(async {
        for shard in shards(bucket, folder).await? {
            fetch_log(bucket, shard, moment).await?;
        }
        let Some(moment) = moment else { return Ok(()) };
        for (shard, base) in bases(folder, moment)? {
            if let Some(number) = base {
                let one = open(bucket, folder, shard).await?;
                fetch_values(bucket, &one, number).await.map_err(|error| error.shard(shard))?;
            }
        }
        Ok(())
    })
}

async fn shards(bucket: &Bucket, folder: &FilePath) -> Result<Vec<Shard>> {
    let (mut shards, mut count) = (Vec::<Shard>::new(), 1);
    while (shards.len() as u32) < count {
        let one = open(bucket, folder, shards.len() as u32).await?;
        let of = one.latest.shards.max(1);
        if !shards.is_empty() && of != count {
            let message = format!("{} has shards of clusters of different sizes", bucket.url);
            return Err(Error::new(Kind::Config, message).shard(one.latest.shard).expected(count, of));
        }
        count = of;
        shards.push(one);
    }
    Ok(shards)
}

async fn open(bucket: &Bucket, folder: &FilePath, shard: u32) -> Result<Shard> {
    let (latest, _) = bucket.latest(shard).await?.ok_or_else(|| missing(bucket, shard))?;
    let home = bucket.history(shard, &latest.directory);
    let listing = bucket.list_history(&home).await.map_err(|error| error.shard(shard))?;
    let folder = PastFolder::open(folder, &latest)?;
    Ok(Shard { latest, home, listing, folder })
}

/// Fetches the log, and lists of slices. Begins again if a server has removed something meanwhile.
async fn fetch_log(bucket: &Bucket, mut shard: Shard, moment: Option<&Moment>) -> Result<()> {
    let number = shard.latest.shard;
    let mut result = Ok(());
    for _ in 0..MAX_READ_ATTEMPTS {
        result = fetch_once(bucket, &shard, moment).await.map_err(|error| error.shard(number));
        if result.is_ok() {
            break;
        }
        let listing = bucket.list_history(&shard.home).await?;
        if listing == shard.listing {
            break;
        }
        shard.listing = listing;
        shard.folder.clear()?;
    }
    result
}

async fn fetch_once(bucket: &Bucket, shard: &Shard, moment: Option<&Moment>) -> Result<()> {
    let Shard { home, listing, folder, .. } = shard;
    let log = whole_log(bucket, shard)?;
    let begins = log.first().is_some_and(|first| first.number == 1);
    for stored in usable(listing, &log) {
        fetch_list(bucket, home, folder, stored).await?;
    }
    let Some(first) = folder.first_segment(moment, begins)? else { return Ok(()) };
    for sealed in log.iter().filter(|segment| segment.number >= first) {
        if let Some(unfinished) = folder.segment(sealed)? {
            let place = home.clone().join(sealed.name());
            let _ = remove_file(&unfinished.path);
            download_file(bucket, &place, sealed.part(), &unfinished.path).await?;
            folder.add_segment(&unfinished, sealed, &bucket.name(&place))?;
        }
    }
    log.last().map_or(Ok(()), |last| folder.end(last))
}

/// The snapshots that the log follows. The state of one that nothing follows is of no moment: its slices were copied
/// one after the other.
fn usable<'a>(listing: &'a Listing, log: &'a [Sealed]) -> impl Iterator<Item = &'a Stored> {
    let follows = |stored: &&Stored| log.iter().any(|segment| segment.number == stored.snapshot.log);
    listing.snapshots.values().filter(follows)
}

/// The log that is copied, without a gap.
fn whole_log(bucket: &Bucket, shard: &Shard) -> Result<Vec<Sealed>> {
    let Shard { home, listing, .. } = shard;
    let nothing = || {
        let message = format!("{} has no history yet", bucket.name(home));
        Error::new(Kind::Config, message)
            .expected("servers with --copy-history, and a snapshot after the first changes", "none")
    };
    let logs = listing.snapshots.values().map(|stored| stored.snapshot.log);
    let begin = if listing.segments.contains_key(&1) { Some(1) } else { logs.clone().min() };
    let (log, mut gap) = chain(&listing.segments, begin.ok_or_else(nothing)?);
    if gap.is_none()
        && let (Some(last), Some(newest)) = (log.last(), logs.max())
        && last.next > 0
        && newest > last.next
    {
        // Snapshots follow the log before them.
        gap = Some(last.next);
    }
    if let Some(missing) = gap {
        let message =
            format!("{} is missing", bucket.name(&home.clone().join(format!("log-{missing:08}-..."))));
        let expected = "the segments of the log without a gap";
        return Err(
            Error::new(Kind::Internal, message).expected(expected, format!("none of number {missing}"))
        );
    }
    if log.is_empty() { Err(nothing()) } else { Ok(log) }
}

/// Fetches the list of slices of a snapshot.
async fn fetch_list(bucket: &Bucket, home: &Path, folder: &PastFolder, stored: &Stored) -> Result<()> {
    let name = stored.snapshot.name();
    let Some(unfinished) = folder.snapshot(stored.snapshot.number)? else { return Ok(()) };
    let from = home.clone().join(name.as_str());
    let described = described(bucket, &from).await?;
    let found = CopiedSnapshot::of(&described);
    if found != stored.snapshot {
        let message = format!("{} has the manifest of another snapshot", bucket.name(&from));
        return Err(Error::new(Kind::Internal, message).expected(name, found.name()));
    }
    for part in described.parts().filter(|part| PastFolder::is_list(*part)) {
        let place = from.clone().join(part.name);
        download_file(bucket, &place, part, &unfinished.path.join(part.name)).await?;
    }
    folder.add_snapshot(&unfinished, &described, &bucket.name(&from))
}

/// Fetches the values of a snapshot.
async fn fetch_values(bucket: &Bucket, shard: &Shard, number: u64) -> Result<()> {
    let Shard { home, listing, folder, .. } = shard;
    let Some(to) = folder.without_values(number) else { return Ok(()) };
    let Some(stored) = listing.snapshots.get(&number) else {
        let message =
            format!("{} no longer has snapshot {number}: its server has removed it", bucket.name(home));
        return Err(Error::new(Kind::Config, message).expected("a later moment", "one that needs it"));
    };
    let from = home.clone().join(stored.snapshot.name());
    let described = described(bucket, &from).await?;
    for part in described.parts().filter(|part| !PastFolder::is_list(*part)) {
        let path = to.join(part.name);
        // It had its length only.
        let _ = remove_file(&path);
        download_file(bucket, &from.clone().join(part.name), part, &path).await?;
    }
    folder.has_values(number)
}
