//! Copies each new snapshot of a server's shards to its bucket, and their history if asked, on a background thread.

use super::bucket::Bucket;
use super::history::copy_history;
use super::pieces::snapshot_is_copied;
use super::upload::{Keep, upload};
use crate::cluster::node::Node;
use crate::config::ServerConfig;
use crate::human::size;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::copy::Held;
use fastps_durable::shard_folder;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Interval between checks for newer snapshots.
const COPY_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Least time in which to copy the last snapshot, even past the deadline.
const MIN_LAST_COPY_TIME: Duration = Duration::from_millis(500);

/// Copies what a server keeps.
#[derive(Debug)]
pub(crate) struct Copies {
    stop: watch::Sender<Option<Instant>>,
    thread: JoinHandle<()>,
}

/// A shard's directory.
#[derive(Debug)]
struct Shard {
    node: Arc<Node>,
    directory: PathBuf,
    /// The last snapshot that was tried.
    tried: u64,
    /// Set if the history is copied, too.
    with_history: bool,
}

impl Copies {
    /// Opens the bucket for copies, if one is configured.
    pub(crate) fn check(config: &ServerConfig) -> Result<Option<Bucket>> {
        let Some(url) = config.copies_to() else { return Ok(None) };
        if config.data_dir.is_none() {
            return Err(Error::new(Kind::Config, "only the snapshots of a data directory can be copied")
                .expected("--copy-to with --data-dir", "only --copy-to"));
        }
        Bucket::open(url).map(Some)
    }

    /// Begins, for the shards of this process.
    pub(crate) fn start(bucket: Bucket, config: &ServerConfig, nodes: &[Arc<Node>]) -> Result<Option<Self>> {
        let Some(data_dir) = &config.data_dir else { return Ok(None) };
        let shard = |node: &Arc<Node>| {
            let directory = shard_folder(data_dir, node.index());
            let there = Held::after(&directory, 0).unwrap_or_default();
            // Snapshots before the newest have been copied or skipped.
            let tried = there.iter().rev().nth(1).copied().unwrap_or(0);
            Shard { node: node.clone(), directory, tried, with_history: config.copy_history }
        };
        let shards = nodes.iter().map(shard).collect();
        let keep = Keep { count: config.keep, younger: config.keep_for };
        let failed = |error| Error::new(Kind::Internal, format!("cannot start a thread: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (stop, stopped) = watch::channel(None);
        let thread = std::thread::Builder::new().name("fastps-copies".to_owned());
        let thread = thread.spawn(move || {
            runtime.block_on(run(&bucket, keep, shards, stopped));
            // Drops a request that is under way.
            runtime.shutdown_background();
        });
        Ok(Some(Self { stop, thread: thread.map_err(failed)? }))
    }

    /// Copies the last snapshots, unless that takes longer than until `deadline`, and ends.
    pub(crate) fn stop(self, deadline: Instant) {
        self.stop.send_replace(Some(deadline.max(Instant::now() + MIN_LAST_COPY_TIME)));
        let _ = self.thread.join();
    }
}

async fn run(bucket: &Bucket, keep: Keep, mut shards: Vec<Shard>, stop: watch::Receiver<Option<Instant>>) {
    let mut stopped = stop.clone();
    let work = async {
        loop {
            let last =
                tokio::time::timeout(COPY_CHECK_INTERVAL, stopped.wait_for(Option::is_some)).await.is_ok();
            for shard in &mut shards {
                copy(bucket, keep, shard).await;
            }
            if last {
                return;
            }
        }
    };
    let mut stopped = stop;
    let ended = async {
        let deadline = stopped.wait_for(Option::is_some).await.ok().and_then(|deadline| *deadline);
        tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now).into()).await;
    };
    tokio::select! {
        () = work => {}
        () = ended => tracing::warn!(
            "the last snapshot is not copied to {}: there was no time; fastps checkpoint upload does it",
            bucket.url
        ),
    }
}

/// Copies a shard's newest snapshot, once. Skips earlier ones except cuts, which belong together with those
/// of the other shards.
async fn copy(bucket: &Bucket, keep: Keep, shard: &mut Shard) {
    let Ok(numbers) = Held::after(&shard.directory, shard.tried) else { return };
    let Some((newest, before)) = numbers.split_last() else { return };
    for number in before {
        // Skips a snapshot that is gone or damaged.
        if let Ok(held) = Held::open(&shard.directory, *number)
            && held.described.cut().is_some()
        {
            copy_one(bucket, keep, shard, Ok(held)).await;
        }
    }
    shard.tried = *newest;
    match Held::newest(&shard.directory) {
        Ok(None) => {}
        Ok(Some(held)) => copy_one(bucket, keep, shard, Ok(held)).await,
        Err(error) => copy_one(bucket, keep, shard, Err(error)).await,
    }
}

async fn copy_one(bucket: &Bucket, keep: Keep, shard: &Shard, held: Result<Held>) {
    let begin = Instant::now();
    let log = held.as_ref().ok().map(|held| held.described.log());
    let copied = match held {
        Ok(held) => {
            let term = shard.node.files.owner().map_or(0, |owner| owner.term());
            upload(bucket, &shard.directory, held, keep, term).await
        }
        Err(error) => Err(error),
    };
    let is_news = shard.node.files.count_copy(copied.as_ref().ok().map(|copied| copied.number));
    let pruned = match log.filter(|_| copied.is_ok()) {
        Some(log) => snapshot_is_copied(bucket, shard.node.index(), &shard.node.files, log).await,
        None => Ok(()),
    };
    // Other copies never wait for it.
    if copied.is_ok() && shard.with_history {
        copy_all_history(bucket, shard).await;
    }
    let (shard, ms) = (shard.node.index(), begin.elapsed().as_millis() as u64);
    match copied {
        Ok(copied) => {
            let (number, bytes, place) = (copied.number, size(copied.bytes), copied.place);
            match (copied.was_there, is_news) {
                (true, _) => {}
                (false, true) => tracing::info!(shard, ms, "copied snapshot {number} ({bytes}) to {place}"),
                (false, false) => tracing::debug!(shard, ms, "copied snapshot {number} ({bytes}) to {place}"),
            }
            for error in [copied.left, pruned.err()].into_iter().flatten() {
                tracing::warn!(shard, %error, "older copies stay");
            }
        }
        Err(error) => {
            tracing::error!(shard, %error, "the snapshot is not copied; the next one will be tried");
        }
    }
}

async fn copy_all_history(bucket: &Bucket, shard: &Shard) {
    let copied = copy_history(bucket, shard.node.index(), &shard.node.files, &shard.directory).await;
    shard.node.files.count_copied_history(copied.as_ref().ok().copied());
    if let Err(error) = copied {
        let shard = shard.node.index();
        tracing::error!(shard, %error, "the history is not copied; this is tried again with the next snapshot");
    }
}
