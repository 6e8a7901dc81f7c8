//! Asks a shard's owner, through its record, to give the shard up, and waits until it has.

use super::records::random;
use crate::backup::bucket::{Bucket, block};
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::owner::{Record, Stage};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Pause between two looks at the record.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// An owner that has not renewed its record for so many leases has ended.
const SILENT_LEASES: u32 = 2;
/// Most times that the record is asked to be written.
const MAX_ASKED: u32 = 10;

/// Asks the owner of a shard to give it up, and returns once the record is free, or a next owner has taken it.
/// `asked` is called with the owner's record. `None`: nobody owned the shard.
pub fn release(bucket: &Bucket, shard: u32, asked: impl Fn(&Record)) -> Result<Option<Record>> {
    block(async {
        let (mut term, mut seen, mut asked_for) = (None, None, 0);
        loop {
            let Some((record, version)) = bucket.owner(shard).await? else {
                let error = Error::new(Kind::Config, "nothing says who owns the shard").shard(shard);
                return Err(error.expected("a server with --owner-lease", "no record of an owner"));
            };
            let first = *term.get_or_insert(record.term);
            if record.stage == Stage::Released || record.term > first {
                return Ok(seen.is_some().then_some(*record));
            }
            match &seen {
                // Its next renewal no longer asks.
                Some((nonce, since)) if *nonce == record.nonce => check_lives(&record, *since)?,
                Some((_, _)) => seen = Some((record.nonce, Instant::now())),
                None => {
                    let asking = record.as_ref().clone().asking_to_release(random()?);
                    // Otherwise a renewal came first, or nothing is known: it is read again.
                    asked_for += 1;
                    match bucket.swap_owner(&asking, Some(version)).await {
                        Ok(_) => {
                            asked(&record);
                            seen = Some((asking.nonce, Instant::now()));
                            continue;
                        }
                        Err(error) if asked_for >= MAX_ASKED || error.kind == Kind::Config => {
                            return Err(error);
                        }
                        Err(_) => {}
                    }
                }
            }
            sleep(LOOK_INTERVAL).await;
        }
    })
}

fn check_lives(record: &Record, since: Instant) -> Result<()> {
    if since.elapsed() < SILENT_LEASES * record.lease() {
        return Ok(());
    }
    let message = format!(
        "{} has not renewed its record: it has ended, or cannot reach the bucket. A server with --take-over takes the shard \
         without being asked to",
        record.address
    );
    let got = format!("none for {} s", since.elapsed().as_secs());
    Err(Error::new(Kind::Unavailable, message)
        .shard(record.shard)
        .expected("a renewal within the lease", got))
}
