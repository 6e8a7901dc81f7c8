//! State that a shard keeps on disk (`fastps_durable`): records changes, and delays answers until the changes
//! that they report are durable. `snapshots` and `checkpoint` write the shard's state without being asked and
//! on request; `gate` holds writes while a cut begins, and `deferral` makes automatic snapshots wait for it.

pub(crate) mod checkpoint;
mod deferral;
pub(crate) mod gate;
pub(crate) mod log_copy;
pub(crate) mod snapshots;
mod trouble;

use crate::config::ServerConfig;
use crate::human::{now, size};
use crate::owner::Ownership;
use crate::persistence::deferral::Deferral;
use crate::persistence::log_copy::LogCopy;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::Shard;
use fastps_durable::{Catalog, Cut, Event, Journal, Settings, Summary, shard_folder};
use fastps_transport::convert::Ack;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Shortest configurable time between two snapshots.
const MIN_SNAPSHOT_INTERVAL: Duration = Duration::from_millis(100);
/// Retry delay of a writer that waits for a shorter log.
const LOG_RETRY_MS: u64 = 100;
/// Retry delay of a cut that waits for a snapshot. It is as long as a client asks for one hold, so that the
/// client releases the writes of other shards instead of asking this one again.
const CUT_RETRY_MS: u64 = 1000;
/// Interval at which a wait for the log checks whether the log is broken.
const LOG_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Longest time that a call waits for the copy of its change, and the retry delay then. Clients that connect wait a
/// little longer.
const MAX_COPY_WAIT: Duration = Duration::from_secs(4);
const COPY_RETRY_MS: u64 = 200;

/// Called directly after the moment of a cut.
pub(crate) type Begun<'a> = dyn Fn() -> Result<()> + 'a;

/// A shard's files, if it has any.
#[derive(Clone, Debug, Default)]
pub(crate) struct Files(Option<Arc<Kept>>);

#[derive(Debug)]
struct Kept {
    journal: Arc<Journal>,
    /// The log's position after the last step of a registration.
    steps: AtomicU64,
    snapshots: Made,
    /// Counts of copies, if snapshots are copied.
    copies: Option<Made>,
    /// The same of the history, if it is copied.
    history: Option<CopiedHistory>,
    /// How far the log is copied, if it is.
    log_copy: Option<Arc<LogCopy>>,
    /// Whether this server owns its shard, if that is asked.
    owner: Option<Arc<Ownership>>,
    /// Number of snapshots being written or waiting for another one.
    writing: AtomicU64,
    deferral: Deferral,
    /// Time between automatic snapshots.
    every: Duration,
}

/// Times of snapshots and copies: of the newest, or of the server's start, in seconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) snapshot: u64,
    /// `None`: none are made.
    pub(crate) copy: Option<u64>,
    /// Time between automatic snapshots.
    pub(crate) every: Duration,
}

/// What a bucket has of the history, for the statistics.
#[derive(Debug, Default)]
struct CopiedHistory {
    bytes: AtomicU64,
    failed: AtomicU64,
}

/// Counts of snapshots, or of copies, for the statistics.
#[derive(Debug)]
struct Made {
    /// The newest number; 0 if there is none.
    newest: AtomicU64,
    /// Its time, or the server's start, in seconds since 1970.
    since: AtomicU64,
    failed: AtomicU64,
    /// Set while the last attempt since the start succeeded.
    succeeds: AtomicBool,
}

impl Made {
    fn none() -> Self {
        let (newest, since, failed) = (AtomicU64::new(0), AtomicU64::new(now()), AtomicU64::new(0));
        Self { newest, since, failed, succeeds: AtomicBool::new(false) }
    }

    /// Notes the result of an attempt. Returns whether it is news: the first success, or one after a failure.
    fn is_news(&self, succeeds: bool) -> bool {
        !self.succeeds.swap(succeeds, Ordering::Relaxed) && succeeds
    }

    /// Counts one with this number and time, or a failure.
    fn count(&self, made: Option<(u64, u64)>) {
        let Some((number, since)) = made else {
            self.failed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        self.since.store(since, Ordering::Relaxed);
        self.newest.store(number, Ordering::Relaxed);
    }

    /// The newest number, its age in seconds, and the number of failures.
    fn counts(&self) -> [u64; 3] {
        let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
        [load(&self.newest), now().saturating_sub(load(&self.since)), load(&self.failed)]
    }
}

impl Files {
    /// Takes the shard's folder, if a data directory is configured.
    pub(crate) fn open(config: &ServerConfig, shard: u32, shards: usize) -> Result<Self> {
        let Some(path) = &config.data_dir else { return Ok(Self(None)) };
        if config.snapshot_every < MIN_SNAPSHOT_INTERVAL {
            return Err(Error::new(Kind::Config, "snapshots would follow each other too soon").expected(
                format!("at least {MIN_SNAPSHOT_INTERVAL:?}"),
                format!("{:?}", config.snapshot_every),
            ));
        }
        if config.keep == 0 {
            return Err(Error::new(Kind::Config, "a server needs its last snapshot")
                .expected("at least 1 snapshot that is kept", config.keep));
        }
        if config.sink.is_some() {
            return Err(Error::new(Kind::Config, "with a data directory, records have no other sink"));
        }
        let settings = Settings {
            path: shard_folder(path, shard),
            shard,
            shards: shards as u32,
            keep: config.keep,
            keep_for: config.keep_for,
            history: config.keep_history,
            accept_loss: config.accept_loss,
        };
        let journal = Journal::open(settings).map_err(|error| error.shard(shard))?;
        let copies = config.copies_to().map(|_| Made::none());
        let history = config.copy_history.then(CopiedHistory::default);
        let log_copy = config.copy_log.map(|_| Arc::new(LogCopy::new()));
        let (steps, snapshots, writing) = (AtomicU64::new(0), Made::none(), AtomicU64::new(0));
        let deferral = Deferral::none();
        let every = config.snapshot_every;
        let owner = config.owner_lease.map(|_| Arc::new(Ownership::new()));
        let kept =
            Kept { journal, steps, snapshots, copies, history, log_copy, owner, writing, deferral, every };
        Ok(Self(Some(Arc::new(kept))))
    }

    pub(crate) fn journal(&self) -> Option<&Arc<Journal>> {
        self.0.as_ref().map(|kept| &kept.journal)
    }

    /// Whether this server owns its shard; `None`: with a copy of the data, any server does.
    pub(crate) fn owner(&self) -> Option<&Arc<Ownership>> {
        self.0.as_ref()?.owner.as_ref()
    }

    /// How far the log is copied; `None`: it is not copied.
    pub(crate) fn log_copy(&self) -> Option<&Arc<LogCopy>> {
        self.0.as_ref()?.log_copy.as_ref()
    }

    /// The most that receipts promise here.
    pub(crate) fn strongest_ack(&self) -> Ack {
        match (self.journal(), self.log_copy()) {
            (Some(_), Some(_)) => Ack::Copied,
            (Some(_), None) => Ack::Logged,
            (None, _) => Ack::Applied,
        }
    }

    /// The counters; empty without a data directory.
    pub(crate) fn counters(&self) -> Vec<(&'static str, u64)> {
        let Some(Kept { journal, snapshots, copies, history, log_copy, owner, .. }) = self.0.as_deref()
        else {
            return Vec::new();
        };
        let [newest, age, failed] = snapshots.counts();
        let mut counters = vec![
            ("log_pending", journal.pending()),
            ("log_syncs", journal.syncs()),
            ("log_broken", u64::from(journal.check().is_err())),
            ("snapshot", newest),
            ("snapshot_age_s", age),
            ("snapshots_failed", failed),
        ];
        if let Some((bytes, since)) = journal.history_kept() {
            counters.extend([("history_bytes", bytes), ("history_since", since)]);
        }
        if let Some(copies) = copies {
            let [newest, age, failed] = copies.counts();
            counters.extend([("copy", newest), ("copy_age_s", age), ("copies_failed", failed)]);
        }
        if let Some(CopiedHistory { bytes, failed }) = history {
            let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
            counters.extend([("history_copied_bytes", load(bytes)), ("history_copies_failed", load(failed))]);
        }
        if let Some(copy) = log_copy {
            let behind = copy.behind().as_millis() as u64;
            counters.extend([("log_copy_behind_ms", behind), ("log_copies_failed", copy.failed())]);
        }
        if let Some(owner) = owner {
            counters.extend([("owner_term", owner.term()), ("owner_lease_left_ms", owner.left_ms())]);
        }
        counters
    }

    /// The times; `None` without a data directory.
    pub(crate) fn times(&self) -> Option<Times> {
        let Kept { snapshots, copies, every, .. } = self.0.as_deref()?;
        let since = |made: &Made| made.since.load(Ordering::Relaxed);
        Some(Times { snapshot: since(snapshots), copy: copies.as_ref().map(since), every: *every })
    }

    /// Counts a copy of the snapshot with this number, or a failed copy. Returns whether it is news.
    pub(crate) fn count_copy(&self, copied: Option<u64>) -> bool {
        let Some(copies) = self.0.as_ref().and_then(|kept| kept.copies.as_ref()) else { return false };
        copies.count(copied.map(|number| (number, now())));
        copies.is_news(copied.is_some())
    }

    /// Counts the bytes of the history that is copied, or a failed copy.
    pub(crate) fn count_copied_history(&self, bytes: Option<u64>) {
        let Some(history) = self.0.as_ref().and_then(|kept| kept.history.as_ref()) else { return };
        match bytes {
            Some(bytes) => history.bytes.store(bytes, Ordering::Relaxed),
            None => drop(history.failed.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// Progress of the recovery, for people.
    pub(crate) fn progress(&self) -> String {
        match self.journal().map(|journal| journal.progress()) {
            None | Some((_, 0)) => "it has not begun to read".to_owned(),
            Some((done, total)) => format!("{} % of {}", done * 100 / total, size(total)),
        }
    }

    /// Restores the state of an empty shard. Returns the rest of the recovered state.
    pub(crate) fn recover(&self, shard: &Shard) -> Result<Catalog> {
        let Some(Kept { journal, snapshots, .. }) = self.0.as_deref() else { return Ok(Catalog::default()) };
        let begin = Instant::now();
        let report = journal.recover(shard).map_err(|error| error.shard(shard.index()))?;
        shard.note_changes(0);
        for note in &report.notes {
            tracing::warn!(shard = shard.index(), "{note}");
        }
        for lost in &report.lost {
            tracing::error!(shard = shard.index(), "{lost}");
        }
        tracing::info!(shard = shard.index(), ms = begin.elapsed().as_millis() as u64, "recovered: {report}");
        if let Some(newest) = journal.newest() {
            snapshots.count(Some(newest));
        }
        Ok(journal.catalog())
    }

    /// Writes a snapshot now; given a cut, calls its function when the snapshot has begun.
    pub(crate) fn snapshot(&self, shard: &Shard, cut: Option<(Cut, &Begun<'_>)>) -> Result<Summary> {
        self.write(shard, true, |Kept { journal, deferral, .. }| match cut {
            None => journal.snapshot(shard),
            Some((cut, begun)) => journal.snapshot_of_cut(shard, cut, begun).inspect(|_| deferral.end()),
        })
    }

    /// Writes a snapshot because it is time.
    pub(crate) fn periodic(&self, shard: &Shard) -> Result<Summary> {
        self.write(shard, false, |kept| kept.journal.snapshot(shard))
    }

    /// Writes a snapshot to replace a long log.
    pub(crate) fn shorten(&self, shard: &Shard) -> Result<Summary> {
        self.write(shard, false, |kept| kept.journal.shorten(shard))
    }

    /// Writes a snapshot. One that nobody asked for is no event, unless it is news.
    fn write(
        &self,
        shard: &Shard,
        asked: bool,
        write: impl FnOnce(&Kept) -> Result<Summary>,
    ) -> Result<Summary> {
        let Some(kept) = self.0.as_deref() else {
            return Err(Error::new(Kind::Precondition, "this server keeps no snapshots")
                .expected("a server with --data-dir", "one without"));
        };
        let Kept { snapshots, writing, deferral, .. } = kept;
        let begin = Instant::now();
        writing.fetch_add(1, Ordering::AcqRel);
        let made = write(kept);
        if made.is_ok() {
            deferral.note_snapshot(Instant::now());
        }
        writing.fetch_sub(1, Ordering::AcqRel);
        snapshots.count(made.as_ref().ok().map(|made| (made.generation, made.written)));
        let is_news = snapshots.is_news(made.is_ok());
        let summary = made?;
        let shard = shard.index();
        let ms = begin.elapsed().as_millis() as u64;
        let (bytes, number) = (summary.bytes, summary.generation);
        if is_news || asked {
            tracing::info!(shard, ms, bytes, "snapshot {number}");
        } else {
            tracing::debug!(shard, ms, bytes, "snapshot {number}");
        }
        if !summary.not_finite.is_empty() {
            let tensors = summary.not_finite.join(", ");
            tracing::warn!(shard, "snapshot {} has NaN or infinity in {tensors}", summary.generation);
        }
        Ok(summary)
    }

    /// Fails while a snapshot is being written: a cut would wait for it, longer than writes may be held.
    /// Automatic snapshots wait for the cut now, or for its next attempt.
    pub(crate) fn check_can_cut(&self) -> Result<()> {
        let Some(Kept { writing, deferral, .. }) = self.0.as_deref() else { return Ok(()) };
        deferral.note_attempt(Instant::now());
        if writing.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let why = "a snapshot is being written, and a cut would wait for it";
        Err(Error::new(Kind::Unavailable, why).retry_after_ms(CUT_RETRY_MS))
    }

    /// Time for which automatic snapshots should still wait for a cut, if any.
    pub(crate) fn deferral(&self, now: Instant) -> Option<Duration> {
        self.0.as_ref()?.deferral.left(now)
    }

    /// Records a change. Returns the log's position after it.
    pub(crate) fn note(&self, event: impl FnOnce() -> Event) -> u64 {
        self.journal().map_or(0, |journal| journal.note(&event()))
    }

    /// Records a step of a registration, on which others rely. Returns the log's position after it.
    pub(crate) fn step(&self, event: impl FnOnce() -> Event) -> u64 {
        let Some(Kept { journal, steps, .. }) = self.0.as_deref() else { return 0 };
        let position = journal.note(&event());
        steps.fetch_max(position, Ordering::AcqRel);
        position
    }

    /// Fails unless the log keeps history.
    pub(crate) fn check_history(&self) -> Result<()> {
        if self.keeps_history() {
            return Ok(());
        }
        let error = Error::new(Kind::Precondition, "this server keeps no history, which marks belong to");
        Err(error.expected("a server with --keep-history", "one without"))
    }

    /// Returns whether the log keeps history.
    pub(crate) fn keeps_history(&self) -> bool {
        self.journal().is_some_and(|journal| journal.keeps_history())
    }

    /// Records a moment with a name. Returns the log's position after it.
    pub(crate) fn mark(&self, id: u64, name: &str) -> Result<u64> {
        self.check_history()?;
        let Some(Kept { journal, deferral, .. }) = self.0.as_deref() else { return Ok(0) };
        journal.mark(id, name).inspect(|_| deferral.end())
    }

    /// Makes all records so far count as a step.
    pub(crate) fn steps_end_here(&self) {
        if let Some(Kept { journal, steps, .. }) = self.0.as_deref() {
            steps.fetch_max(journal.position(), Ordering::AcqRel);
        }
    }

    /// Fails if a step could not be made durable.
    pub(crate) fn check_steps(&self) -> Result<()> {
        self.journal().map_or(Ok(()), |journal| journal.check())
    }

    /// The position after all steps so far.
    pub(crate) fn steps(&self) -> u64 {
        self.0.as_ref().map_or(0, |kept| kept.steps.load(Ordering::Acquire))
    }

    /// Waits until everything before a position is durable; fails if the log cannot be written.
    pub(crate) async fn durable_to(&self, position: u64) -> Result<()> {
        let Some(journal) = self.journal() else { return Ok(()) };
        let (sender, mut receiver) = oneshot::channel();
        journal.when_durable(position, move || notify(sender));
        // A broken log wakes no waiter.
        while tokio::time::timeout(LOG_CHECK_INTERVAL, &mut receiver).await.is_err() {
            journal.check()?;
        }
        Ok(())
    }

    /// Waits until the loss of this machine takes nothing before a position: until it is durable and, if the log is
    /// copied, copied. Fails if the log cannot be written, or not be copied for long.
    pub(crate) async fn safe_to(&self, position: u64) -> Result<()> {
        self.durable_to(position).await?;
        self.copied_to(position).await
    }

    /// Waits until everything before a position is copied, if the log is. Fails once this server does not own its
    /// shard, and after some time, so that the reason is known: the call is repeated.
    pub(crate) async fn copied_to(&self, position: u64) -> Result<()> {
        let (Some(journal), Some(copy)) = (self.journal(), self.log_copy()) else { return Ok(()) };
        let (sender, mut receiver) = oneshot::channel();
        self.when_copied(position, move || notify(sender));
        let begin = Instant::now();
        // A broken log wakes no waiter.
        while tokio::time::timeout(LOG_CHECK_INTERVAL, &mut receiver).await.is_err() {
            journal.check()?;
            self.owner().map_or(Ok(()), |owner| owner.check())?;
            if begin.elapsed() >= MAX_COPY_WAIT {
                let failed = if copy.succeeds() { "" } else { ", which fails at present" };
                let why =
                    format!("the change is answered when it is copied to the bucket{failed} (--copy-log)");
                return Err(Error::new(Kind::Unavailable, why).retry_after_ms(COPY_RETRY_MS));
            }
        }
        Ok(())
    }

    /// Calls `then` once everything before a position is durable and copied. Without a copy of the log: once it is
    /// durable.
    pub(crate) fn when_copied(&self, position: u64, then: impl FnOnce() + Send + 'static) {
        match (self.journal(), self.log_copy().cloned()) {
            (Some(journal), Some(copy)) => {
                journal.when_durable(position, move || copy.when_copied(position, then));
            }
            (Some(journal), None) => journal.when_durable(position, then),
            (None, _) => then(),
        }
    }

    /// Calls `then` once everything before a position is in what every later owner of the shard has, whatever the clocks
    /// do: it is copied, and a renewal of the owner's record that was sent after that is confirmed.
    pub(crate) fn when_kept(&self, position: u64, then: impl FnOnce() + Send + 'static) {
        let owner = self.owner().cloned();
        self.when_copied(position, move || match owner {
            Some(owner) => owner.when_renewed(then),
            None => then(),
        });
    }

    /// The position after all records so far.
    pub(crate) fn position(&self) -> u64 {
        self.journal().map_or(0, |journal| journal.position())
    }

    /// Fails unless receipts can promise this. The error of a broken log has no retry time, so that a push
    /// fails with the reason at once: only an operator knows when there is space.
    pub(crate) fn check(&self, ack: Ack) -> Result<()> {
        if ack <= self.strongest_ack() {
            let checked =
                self.journal().filter(|_| ack > Ack::Applied).map_or(Ok(()), |journal| journal.check());
            return checked.map_err(|mut error| {
                error.retry_after_ms = None;
                error
            });
        }
        let (why, expected, got) = match ack {
            Ack::Applied | Ack::Logged => {
                ("this server keeps no log", "a server with --data-dir, or ack=\"applied\"", "ack=\"logged\"")
            }
            Ack::Copied => (
                "this server does not copy its log",
                "a server with --copy-log, or ack=\"logged\"",
                "ack=\"copied\"",
            ),
        };
        Err(Error::new(Kind::Precondition, why).expected(expected, got))
    }

    /// Fails if writers should wait because the log is too long and a snapshot that will shorten it is being
    /// written, or waits for a cut. A failing snapshot does not stop writers.
    pub(crate) fn check_room(&self) -> Result<()> {
        let Some(Kept { journal, writing, deferral, .. }) = self.0.as_deref() else { return Ok(()) };
        if !journal.is_at_limit() {
            return Ok(());
        }
        let comes = writing.load(Ordering::Acquire) > 0 || deferral.left(Instant::now()).is_some();
        if !comes || journal.check().is_err() {
            return Ok(());
        }
        let why = "the log is much longer than --snapshot-after allows, until a snapshot is complete";
        Err(Error::new(Kind::Unavailable, why).retry_after_ms(LOG_RETRY_MS))
    }

    /// Flushes the log before the shard's thread sleeps.
    pub(crate) fn rest(&self) {
        if let Some(journal) = self.journal() {
            journal.rest();
        }
    }

    /// Waits while too many records are unwritten; each caller that proceeds adds one message.
    pub(crate) async fn wait_for_space(&self) {
        while let Some(journal) = self.journal().filter(|journal| journal.is_full()) {
            let (sender, receiver) = oneshot::channel();
            journal.when_room(move || notify(sender));
            let _ = receiver.await;
        }
    }
}

/// The waiter may have left.
fn notify(sender: oneshot::Sender<()>) {
    let _ = sender.send(());
}
