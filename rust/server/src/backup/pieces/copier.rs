//! Copies the log of a server's shards to its bucket, on a background thread: what is synced, in pieces of whole
//! frames. Pushes never wait for it.

use super::pace::Pace;
use crate::backup::bucket::Bucket;
use crate::cluster::node::Node;
use crate::config::ServerConfig;
use crate::owner::Ownership;
use crate::persistence::Files;
use crate::persistence::log_copy::LogCopy;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_durable::Journal;
use fastps_durable::owner::{Cutter, LogPosition, Phase, Piece};
use fastps_durable::shard_folder;
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use object_store::PutPayload;
use std::pin::Pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::time::sleep;

/// Length at which a piece is copied at once.
const PIECE_BYTES: usize = 8 << 20;
/// Pieces of a shard that are on their way at a time.
const MAX_PIECES_IN_FLIGHT: usize = 4;
/// Pause after a failed request.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// The part of the age of a piece after which the log is looked at again, and the limits of that time.
const LOOKS_PER_PIECE: u32 = 8;
const MIN_LOOK_INTERVAL: Duration = Duration::from_millis(5);
const MAX_LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Ages of a piece that can be chosen.
const MIN_AGE: Duration = Duration::from_millis(50);
const MAX_AGE: Duration = Duration::from_hours(1);
/// The smallest limit that can be chosen.
const MIN_BYTES_PER_SECOND: u64 = 1 << 10;
/// Least time in which to copy the end of the log, even past the deadline.
const MIN_LAST_COPY_TIME: Duration = Duration::from_millis(500);

/// Copies the logs of a server.
#[derive(Debug)]
pub(crate) struct LogCopies {
    stop: watch::Sender<Option<Instant>>,
    thread: JoinHandle<()>,
}

impl LogCopies {
    /// Fails unless the settings fit together.
    pub(crate) fn check(config: &ServerConfig) -> Result<()> {
        let wrong = |message: &str, expected: &str, got: String| {
            Err(Error::new(Kind::Config, message).expected(expected, got))
        };
        let Some(age) = config.copy_log else {
            return match config.copy_bytes_per_second {
                None => Ok(()),
                Some(_) => wrong(
                    "only copies of the log are limited",
                    "--copy-bytes-per-second with --copy-log",
                    "only --copy-bytes-per-second".to_owned(),
                ),
            };
        };
        if config.copies_to().is_none() {
            let message = "the log is copied to where the snapshots are copied";
            return wrong(message, "--copy-log with --copy-to URL", "only --copy-log".to_owned());
        }
        if config.owner_lease.is_none() {
            let message =
                "pieces of the log bear the term of the shard's owner, which the record beside them counts";
            return wrong(message, "--copy-log with --owner-lease SECONDS", "only --copy-log".to_owned());
        }
        if !(MIN_AGE..=MAX_AGE).contains(&age) {
            let expected = format!("{} to {} s", MIN_AGE.as_secs_f64(), MAX_AGE.as_secs());
            let message =
                "the age at which a piece of the log is copied is too short or too long (--copy-log)";
            return wrong(message, &expected, format!("{} s", age.as_secs_f64()));
        }
        if config.copy_bytes_per_second.is_some_and(|bytes| bytes < MIN_BYTES_PER_SECOND) {
            let message = "the log would fall behind for ever (--copy-bytes-per-second)";
            let got = config.copy_bytes_per_second.unwrap_or_default().to_string();
            return wrong(message, &format!("at least {MIN_BYTES_PER_SECOND}"), got);
        }
        Ok(())
    }

    /// Begins, for the shards of this process, which it owns.
    pub(crate) fn start(bucket: &Bucket, config: &ServerConfig, nodes: &[Arc<Node>]) -> Result<Option<Self>> {
        let (Some(age), Some(data_dir)) = (config.copy_log, &config.data_dir) else { return Ok(None) };
        let (mut shards, pace) = (Vec::new(), Pace::new(config.copy_bytes_per_second));
        for node in nodes {
            let (shard, files) = (node.index(), &node.files);
            let directory = shard_folder(data_dir, shard);
            if let Some(copier) = Copier::new(bucket, shard, files, &directory, (age, pace.clone()))? {
                shards.push(copier);
            }
        }
        let puts = (86_400.0 / age.as_secs_f64()).ceil();
        tracing::info!(
            "the log is copied to {}, for each shard with at most {puts} puts a day, one for every {} MiB, and one for each \
             group of sessions, registrations and other changes that are no gradients, which are answered when they are \
             copied; a bucket with versions or soft delete keeps and bills every piece that is removed",
            bucket.url,
            PIECE_BYTES >> 20
        );
        let failed = |error| Error::new(Kind::Internal, format!("cannot start a thread: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (stop, stopped) = watch::channel(None);
        let thread = std::thread::Builder::new().name("fastps-copy-log".to_owned());
        let thread = thread.spawn(move || {
            runtime.block_on(run(shards, stopped));
            // Drops requests that are under way.
            runtime.shutdown_background();
        });
        Ok(Some(Self { stop, thread: thread.map_err(failed)? }))
    }

    /// Copies the rest of the logs, which change no more, unless that takes longer than until `deadline`, and
    /// ends.
    pub(crate) fn stop(self, deadline: Instant) {
        self.stop.send_replace(Some(deadline.max(Instant::now() + MIN_LAST_COPY_TIME)));
        let _ = self.thread.join();
    }
}

async fn run(shards: Vec<Copier>, stop: watch::Receiver<Option<Instant>>) {
    let work = join_all(shards.into_iter().map(|shard| shard.run(stop.clone())));
    let mut stopped = stop.clone();
    let ended = async {
        let deadline = stopped.wait_for(Option::is_some).await.ok().and_then(|deadline| *deadline);
        tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now).into()).await;
    };
    tokio::select! {
        _ = work => {}
        () = ended => tracing::warn!("the end of the log is not copied: there was no time"),
    }
}

type Put = Pin<Box<dyn Future<Output = Piece> + Send>>;

/// The log of a shard.
pub(in crate::backup) struct Copier {
    bucket: Bucket,
    shard: u32,
    owner: Arc<Ownership>,
    copy: Arc<LogCopy>,
    journal: Arc<Journal>,
    cutter: Cutter,
    term: u64,
    /// Age at which a piece is copied.
    age: Duration,
    pace: Pace,
    /// When the log was first seen to have more than the pieces.
    since: Option<Instant>,
}

impl Copier {
    /// `None`: the shard has no log, or nothing says who owns it.
    pub(in crate::backup) fn new(
        bucket: &Bucket,
        shard: u32,
        files: &Files,
        directory: &std::path::Path,
        (age, pace): (Duration, Pace),
    ) -> Result<Option<Self>> {
        let (Some(journal), Some(owner), Some(copy)) = (files.journal(), files.owner(), files.log_copy())
        else {
            return Ok(None);
        };
        let Some(record) = owner.record() else { return Ok(None) };
        let copied = record.tip.copied;
        copy.begin(copied);
        let cutter = Cutter::new(directory, journal.copied_from(copied)?);
        let (owner, copy) = (owner.clone(), copy.clone());
        let (journal, bucket, term) = (journal.clone(), bucket.clone(), owner.term());
        Ok(Some(Self { bucket, shard, owner, copy, journal, cutter, term, age, pace, since: None }))
    }

    pub(in crate::backup) async fn run(mut self, mut stop: watch::Receiver<Option<Instant>>) {
        let look = (self.age / LOOKS_PER_PIECE).clamp(MIN_LOOK_INTERVAL, MAX_LOOK_INTERVAL);
        let mut flight = FuturesUnordered::new();
        let copy = self.copy.clone();
        while self.owns() {
            let is_last = stop.borrow_and_update().is_some();
            while flight.len() < MAX_PIECES_IN_FLIGHT
                && let Some(put) = self.due(is_last, flight.is_empty())
            {
                flight.push(put);
            }
            if is_last && flight.is_empty() {
                return;
            }
            tokio::select! {
                Some(piece) = flight.next(), if !flight.is_empty() => self.is_copied(piece),
                () = sleep(look) => {}
                () = copy.wanted() => {}
                changed = stop.changed(), if !is_last => if changed.is_err() {
                    return;
                }
            }
        }
    }

    /// Returns whether pieces of this term are still part of the history.
    fn owns(&self) -> bool {
        self.owner.phase().is_some_and(|phase| !matches!(phase, Phase::Lost | Phase::Released))
    }

    /// Copying the next piece, if it is old or long enough, or if somebody waits for it and no piece is on its way:
    /// all who come meanwhile share the next one.
    fn due(&mut self, is_last: bool, is_free: bool) -> Option<Put> {
        let (position, synced) = self.journal.synced();
        self.copy.note_synced(position, synced);
        let ready = self.cutter.ready(synced);
        if ready == 0 {
            self.since = None;
            return None;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        let hurries = is_last || is_free && self.copy.is_awaited();
        if ready < self.pace.most(PIECE_BYTES) as u64 && since.elapsed() < self.age && !hurries {
            return None;
        }
        if !is_last && !self.pace.is_free(Instant::now()) {
            return None;
        }
        match self.next(synced) {
            Ok(Some((piece, bytes))) => Some(self.put(piece, bytes)),
            Ok(None) => {
                self.since = None;
                None
            }
            Err(error) => {
                tell_failure(&self.copy, self.shard, &error);
                self.since = None;
                None
            }
        }
    }

    fn next(&mut self, synced: LogPosition) -> Result<Option<(Piece, Vec<u8>)>> {
        let begin = self.cutter.next();
        let next = self.cutter.cut(self.term, synced, self.pace.most(PIECE_BYTES))?;
        if let Some((piece, bytes)) = &next {
            self.pace.count(bytes.len(), Instant::now());
            if piece.begin != begin {
                tracing::warn!(
                    shard = self.shard,
                    "the copy of the log has a gap until the next snapshot is copied: the log from segment {}, byte {} \
                     on was removed or broke off before it was copied",
                    begin.segment,
                    begin.offset
                );
            }
            if self.cutter.ready(synced) == 0 {
                self.since = None;
            }
        }
        Ok(next)
    }

    /// Writes a piece, however often that fails.
    fn put(&self, piece: Piece, bytes: Vec<u8>) -> Put {
        let (bucket, shard, copy) = (self.bucket.clone(), self.shard, self.copy.clone());
        let bytes = PutPayload::from(bytes);
        reach("piece_cut");
        Box::pin(async move {
            while let Err(error) = bucket.put_piece(shard, piece, bytes.clone()).await {
                tell_failure(&copy, shard, &error);
                sleep(RETRY_PAUSE).await;
            }
            reach("piece_put");
            piece
        })
    }

    fn is_copied(&self, piece: Piece) {
        if self.copy.count(true) {
            tracing::info!(shard = self.shard, "the log is copied again");
        }
        let copied = self.copy.add(piece);
        self.owner.change(|claim| claim.copied(copied));
        reach("piece_copied");
    }
}

fn tell_failure(copy: &LogCopy, shard: u32, error: &Error) {
    if copy.count(false) {
        tracing::error!(shard, %error, "the log is not copied; this is tried again until it succeeds");
    }
}
