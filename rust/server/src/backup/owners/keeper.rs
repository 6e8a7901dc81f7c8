//! Claims the shards of a server and keeps them: a thread that sends what the claims ask for.

use super::records::random;
use crate::backup::bucket::{Bucket, block};
use crate::backup::fetch::{described, shards};
use crate::backup::pieces::take;
use crate::config::ServerConfig;
use crate::human::now;
use crate::owner::{Ownership, since_boot};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_durable::copy::{Described, Latest};
use fastps_durable::owner::{
    Answer, Candidate, Claim, LockedFile, LogPosition, Phase, Piece, Record, Request, Stage, Timing, history,
};
use fastps_durable::{Journal, copy};
use futures_util::future::join_all;
use object_store::UpdateVersion;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// The shortest lease: a request to the record ends within an eighth of it.
const MIN_LEASE: Duration = Duration::from_secs(1);
/// The longest lease.
const MAX_LEASE: Duration = Duration::from_hours(24);
/// Pause between two looks at the claims during the start.
const START_CHECK_INTERVAL: Duration = Duration::from_millis(2);
/// Least time for the release of the shards, even past the deadline.
const MIN_RELEASE_TIME: Duration = Duration::from_secs(1);

/// The claims of a server's shards.
#[derive(Debug)]
pub(crate) struct Owners {
    shards: Vec<Arc<Ownership>>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

/// A shard to claim, whose files have been read.
#[derive(Debug)]
pub(crate) struct Claiming {
    pub(crate) owner: Arc<Ownership>,
    pub(crate) shard: u32,
    pub(crate) directory: PathBuf,
    /// Identity of the cluster; `None`: that of shard 0.
    pub(crate) cluster: Option<u64>,
    pub(crate) address: String,
    pub(crate) incarnation: u64,
    pub(crate) locked: Option<LockedFile>,
    /// The log, which may have been copied.
    pub(crate) journal: Option<Arc<Journal>>,
    /// Whether this server copies its log.
    pub(crate) copies_log: bool,
    /// The number of shards, if this server has nothing of its shard yet and takes it over from the bucket.
    pub(crate) takes_over: Option<u32>,
}

/// A claim with its surroundings.
struct Keeper {
    bucket: Bucket,
    timing: Timing,
    accept_loss: bool,
    claiming: Claiming,
}

/// How many requests to the record have failed since the last that did not.
#[derive(Default)]
struct Failing {
    reads: u32,
    writes: u32,
}

impl Failing {
    /// Tells when requests begin to fail, and why, and when they no longer do.
    fn tell<V, T>(&mut self, shard: u32, request: &Request<V>, asked: &Result<T>) {
        // A write fails once if another server has asked for the shard.
        let (failed, most, what) = match request {
            Request::Read => (&mut self.reads, 1, "read"),
            Request::Swap(..) => (&mut self.writes, 2, "written"),
        };
        match asked {
            Ok(_) => {
                if std::mem::take(failed) >= most {
                    tracing::info!(shard, "the record of the shard's owner can be {what} again");
                }
            }
            Err(error) => {
                *failed = failed.saturating_add(1);
                if *failed == most {
                    tracing::warn!(shard, %error, "the record of the shard's owner cannot be {what}");
                }
            }
        }
    }
}

impl Owners {
    /// Fails unless the settings fit together.
    pub(crate) fn check(config: &ServerConfig, bucket: Option<&Bucket>) -> Result<()> {
        let Some(lease) = config.owner_lease else { return Ok(()) };
        let Some(bucket) = bucket else {
            return Err(Error::new(Kind::Config, "the record of a shard's owner lies with its copies")
                .expected("--owner-lease with --copy-to", "only --owner-lease"));
        };
        if bucket.folder.is_some() {
            return Err(bucket.lacks_conditions("is a folder, which has no conditional writes"));
        }
        let shortest = config.lease.max(MIN_LEASE);
        if (shortest..=MAX_LEASE).contains(&lease) {
            return Ok(());
        }
        let message = "the lease of an owner is too short or too long (--owner-lease)";
        let expected = format!(
            "{} s, three heartbeats of a client (--lease-ms), to {} s",
            shortest.as_secs_f64(),
            MAX_LEASE.as_secs()
        );
        Err(Error::new(Kind::Config, message).expected(expected, format!("{} s", lease.as_secs_f64())))
    }

    /// Claims the shards, and waits until this server owns all of them, or until somebody has given that up.
    pub(crate) fn claim(
        bucket: &Bucket,
        lease: Duration,
        accept_loss: bool,
        shards: Vec<Claiming>,
        given_up: &AtomicBool,
    ) -> Result<Self> {
        let owners: Vec<_> = shards.iter().map(|claiming| claiming.owner.clone()).collect();
        let failed = |error| Error::new(Kind::Internal, format!("cannot start a thread: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (stop, mut stopped) = watch::channel(false);
        let (bucket, timing) = (bucket.clone(), Timing::new(lease));
        let work = move || {
            runtime.block_on(async {
                let keepers = shards
                    .into_iter()
                    .map(|claiming| Keeper { bucket: bucket.clone(), timing, accept_loss, claiming }.run());
                let keepers = join_all(keepers);
                // Drops requests that are under way.
                tokio::select! {
                    _ = keepers => {}
                    _ = stopped.wait_for(|stop| *stop) => {}
                }
            });
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("fastps-owner".to_owned());
        let thread = Some(thread.spawn(work).map_err(failed)?);
        let claims = Self { shards: owners, stop, thread };
        for owner in &claims.shards {
            while !owner.holds() {
                if let Some(error) = owner.failure() {
                    return Err(error);
                }
                if owner.phase() == Some(Phase::Lost) {
                    return Err(owner.refusal());
                }
                if given_up.load(Ordering::Relaxed) {
                    claims.release(Instant::now());
                    return Err(Error::new(Kind::Unavailable, "the start was given up"));
                }
                std::thread::sleep(START_CHECK_INTERVAL);
            }
        }
        Ok(claims)
    }

    /// Gives the shards up, so that the next owner need not wait, unless that takes longer than until
    /// `deadline`.
    pub(crate) fn release(self, deadline: Instant) {
        for owner in &self.shards {
            owner.change(Claim::release);
        }
        let deadline = deadline.max(Instant::now() + MIN_RELEASE_TIME);
        let over = |owner: &Arc<Ownership>| {
            owner.failure().is_some()
                || matches!(owner.phase(), None | Some(Phase::Waiting | Phase::Released | Phase::Lost))
        };
        while !self.shards.iter().all(over) {
            if Instant::now() >= deadline {
                tracing::warn!(
                    "a shard is not given up: there was no time; its next owner waits for the lease"
                );
                return;
            }
            std::thread::sleep(START_CHECK_INTERVAL);
        }
    }
}

/// Fails unless the settings of a take-over fit together.
pub(crate) fn check_take_over(config: &ServerConfig) -> Result<()> {
    let wrong = |message: &str, expected: &str, got: &str| {
        Err(Error::new(Kind::Config, message).expected(expected, got))
    };
    let Some(url) = &config.take_over else {
        return match config.shard {
            None => Ok(()),
            Some(_) => wrong(
                "a server's place in --cluster is the index of its shard",
                "--shard with --take-over URL",
                "only --shard",
            ),
        };
    };
    if config.shard.is_none() {
        return wrong("which shard is taken over?", "--take-over with --shard INDEX", "only --take-over");
    }
    if config.data_dir.is_none() {
        let message = "a shard is taken over into a data directory, which may be empty";
        return wrong(message, "--take-over with --data-dir DIR", "only --take-over");
    }
    if config.owner_lease.is_none() {
        let message = "a shard is taken over by its record, which a server without a lease does not write";
        return wrong(message, "--take-over with --owner-lease SECONDS", "only --take-over");
    }
    if config.shards != 1 {
        let message = "a server takes over one shard";
        return wrong(message, "--shards 1", &format!("--shards {}", config.shards));
    }
    match config.copy_to.as_ref().filter(|other| *other != url) {
        None => Ok(()),
        Some(other) => wrong("the copies of a shard that is taken over stay where they are", url, other),
    }
}

/// The failpoints before and after a request to the record.
fn places(request: &Request<UpdateVersion>, phase: Option<Phase>) -> [&'static str; 2] {
    match (request, phase) {
        (Request::Read, _) => ["owner_read", "owner_found"],
        (Request::Swap(..), Some(Phase::Waiting)) => ["owner_take", "owner_taken"],
        (Request::Swap(..), Some(Phase::Opening)) => ["owner_open", "owner_opened"],
        (Request::Swap(..), _) => ["owner_renew", "owner_renewed"],
    }
}

impl Drop for Owners {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Keeper {
    async fn run(self) {
        let shard = self.claiming.shard;
        if let Err(error) = self.keep().await {
            tracing::error!(shard, %error, "the server does not own its shard");
            self.claiming.owner.fail(error.shard(shard));
        }
    }

    async fn keep(&self) -> Result<()> {
        self.again("whether the bucket writes conditionally", async || {
            self.bucket.try_conditions().await.map(Some)
        })
        .await?;
        if let Some(shards) = self.claiming.takes_over {
            self.again("which shards are in the bucket", async || self.check_taken(shards).await.map(Some))
                .await?;
        }
        let found = self.again("the record of the shard's owner", async || {
            self.bucket.owner(self.claiming.shard).await.map(Some)
        });
        if let Some((record, _)) = found.await? {
            self.check_directory(record.tip.term)?;
        }
        let latest = self.again("the name of the newest copy", async || {
            self.bucket.latest_or_fence(self.claiming.shard).await.map(Some)
        });
        let least_term = latest.await?.map_or(0, |(latest, _)| latest.term);
        let Claiming { owner, shard, address, incarnation, locked, .. } = &self.claiming;
        let candidate = Candidate {
            cluster: match self.claiming.takes_over {
                // That of the record.
                Some(_) => None,
                None => Some(self.cluster().await?),
            },
            shard: *shard,
            address: address.clone(),
            incarnation: *incarnation,
            since: now(),
            locked: locked.clone(),
            least_term,
        };
        owner.begin(candidate, self.timing);
        tokio::try_join!(self.renew(), self.open())?;
        Ok(())
    }

    /// Asks until there is an answer. Fails if only a person can remove the reason.
    async fn again<T>(&self, what: &str, ask: impl AsyncFn() -> Result<Option<T>>) -> Result<T> {
        let mut is_news = true;
        loop {
            match ask().await {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => {}
                Err(error) if error.kind != Kind::Unavailable => return Err(error),
                Err(error) => {
                    if std::mem::take(&mut is_news) {
                        tracing::warn!(shard = self.claiming.shard, %error, "the start waits to learn {what}");
                    }
                    self.claiming.owner.waits_for(format!("it waits to learn {what}: {error}"));
                }
            }
            sleep(self.timing.request()).await;
        }
    }

    /// Identity of the cluster. Only shard 0 makes a new one; the others find it in its record.
    async fn cluster(&self) -> Result<u64> {
        if let Some(cluster) = self.claiming.cluster {
            return Ok(cluster);
        }
        self.claiming.owner.waits_for("it waits until shard 0 has an owner".to_owned());
        let record = self.again("the identity of the cluster", async || self.bucket.owner(0).await);
        Ok(record.await?.0.cluster)
    }

    /// Fails if a shard cannot be taken over because of what the bucket is, or has.
    async fn check_taken(&self, count: u32) -> Result<()> {
        let shard = self.claiming.shard;
        let found = shards(&self.bucket).await?;
        let wrong = |message: &str| Error::new(Kind::Config, message).shard(shard);
        if !found.contains(&shard) {
            let error = wrong("the bucket has no such shard (--shard)");
            return Err(
                error.expected(format!("one of its {} shards", found.len()), format!("shard {shard}"))
            );
        }
        let latest = self.bucket.latest(shard).await?;
        if let Some((latest, _)) = latest.filter(|(latest, _)| latest.shards != count) {
            let error =
                wrong("the cluster has another number of shards: --cluster names the address of each");
            return Err(error.expected(format!("{} addresses", latest.shards), count));
        }
        let (own, first) = (self.bucket.owner(shard).await?, self.bucket.owner(0).await?);
        let cluster = |record: Option<(Box<Record>, UpdateVersion)>| record.map(|(record, _)| record.cluster);
        match (cluster(own), cluster(first)) {
            (Some(own), Some(first)) if own != first => {
                let message = "the bucket has shards of two clusters: move those of one to another URL";
                Err(wrong(message)
                    .expected(format!("cluster {first:016x}, as shard 0"), format!("{own:016x}")))
            }
            _ => Ok(()),
        }
    }

    /// Fails if another server has served the shard since the last one with this directory, which then lacks what
    /// that one has acknowledged. A directory that was fetched from the bucket says no term.
    fn check_directory(&self, newest: u64) -> Result<()> {
        let Claiming { shard, directory, takes_over, .. } = &self.claiming;
        if takes_over.is_some() {
            return Ok(());
        }
        let served = copy::served(directory)?;
        let Some(served) = served.filter(|served| *served < newest && !self.accept_loss) else {
            return Ok(());
        };
        let url = &self.bucket.url;
        let message = format!(
            "another server has owned the shard since {} was used, and has acknowledged what is not in there. Take the shard over into \
             an empty directory (--take-over {url} --shard {shard}), or fetch the newest copy (fastps checkpoint fetch {url} DIR)",
            directory.display()
        );
        Err(Error::new(Kind::Config, message)
            .shard(*shard)
            .expected(format!("term {newest}"), format!("term {served}")))
    }

    /// Sends what the claim asks for, until it is over.
    async fn renew(&self) -> Result<()> {
        let Claiming { owner, shard, .. } = &self.claiming;
        let mut changes = owner.changes();
        let mut failing = Failing::default();
        loop {
            changes.mark_unchanged();
            let (request, wake) = owner.poll(random()?);
            let Some(request) = request else {
                let Some(wake) = wake else {
                    self.tell_end();
                    return Ok(());
                };
                tokio::select! {
                    () = sleep(wake.saturating_sub(since_boot())) => {}
                    _ = changes.changed() => {}
                }
                continue;
            };
            let [before, after] = places(&request, owner.phase());
            reach(before);
            let asked = timeout(self.timing.request(), self.ask(&request)).await.unwrap_or_else(|_| {
                let message =
                    format!("{} has not answered within {:?}", self.bucket.url, self.timing.request());
                Err(Error::new(Kind::Unavailable, message))
            });
            failing.tell(*shard, &request, &asked);
            let answer = match asked {
                Ok(answer) => {
                    reach(after);
                    answer
                }
                // Of a swap that was refused or has no answer, the record tells what happened.
                Err(_) => Answer::Failed,
            };
            owner.answer(answer)?;
        }
    }

    fn tell_end(&self) {
        let Claiming { owner, shard, .. } = &self.claiming;
        match owner.record() {
            Some(Record { address, term, .. }) if owner.phase() == Some(Phase::Lost) => tracing::error!(
                shard,
                term,
                "the shard belongs to the server at {address} now: this one answers no more, and may be stopped"
            ),
            _ => tracing::info!(shard, "the shard is given up"),
        }
    }

    async fn ask(&self, request: &Request<UpdateVersion>) -> Result<Answer<UpdateVersion>> {
        match request {
            Request::Read => self.bucket.owner(self.claiming.shard).await.map(Answer::Found),
            Request::Swap(record, before) => {
                self.bucket.swap_owner(record, before.clone()).await.map(Answer::Swapped)
            }
        }
    }

    /// Takes the steps from the claim to an open shard.
    async fn open(&self) -> Result<()> {
        let Claiming { owner, shard, directory, .. } = &self.claiming;
        self.tell_whom_it_waits_for();
        if !self.until(Phase::Marking).await {
            return Ok(());
        }
        let Some(Record { term, tip, .. }) = owner.record() else { return Ok(()) };
        if let Err(error) = self.check_directory(tip.term) {
            return self.give_up(error).await;
        }
        self.again("whether the newest copy is marked", async || self.mark(term).await).await?;
        owner.change(Claim::marked);
        let Some(record) = owner.record() else { return Ok(()) };
        let read = self.again("how far the log is copied", async || self.read(&record).await.map(Some));
        let (end, begin) = match read.await {
            Ok(found) => found,
            Err(error) => return self.give_up(error).await,
        };
        copy::note_served(directory, term)?;
        let opened = owner.change(|claim| {
            if tip.copied == LogPosition::default() {
                // No log is copied, so no snapshot is followed by one.
                claim.forget(LogPosition { segment: u64::MAX, offset: u64::MAX });
            }
            claim.recovered(end, begin)
        });
        opened.unwrap_or(Ok(()))?;
        if self.until(Phase::Open).await {
            let lease = self.timing.lease.as_secs_f64();
            tracing::info!(shard, term, "the server owns its shard, with a lease of {lease} s");
        }
        Ok(())
    }

    /// Releases the shard, because of what only a person can remove.
    async fn give_up(&self, error: Error) -> Result<()> {
        self.claiming.owner.change(Claim::release);
        let _ = timeout(self.timing.lease, self.until(Phase::Released)).await;
        Err(error)
    }

    /// Reads what the former owners copied, while the lease is renewed. Returns where it ends.
    async fn take(&self, record: &Record) -> Result<LogPosition> {
        // The connections of a bucket end with the runtime that has opened them.
        let bucket = Bucket::open(&self.bucket.url).unwrap_or_else(|_| self.bucket.clone());
        let (record, directory) = (record.clone(), self.claiming.directory.clone());
        let taken = move || block(take(&bucket, &record, &directory));
        let failed = |error| Error::new(Kind::Internal, format!("cannot take the shard over: {error}"));
        tokio::task::spawn_blocking(taken).await.map_err(failed)?
    }

    /// Where the copied log ends, and where the log of this server goes on: at the same place, since it contains
    /// what was copied. Fails if it does not.
    async fn read(&self, record: &Record) -> Result<(LogPosition, LogPosition)> {
        let Claiming { shard, journal, copies_log, takes_over, .. } = &self.claiming;
        let (nowhere, copied) = (LogPosition::default(), record.tip.copied);
        if takes_over.is_some() {
            let end = self.take(record).await?;
            return Ok((end, end));
        }
        let Some(journal) = journal else { return Ok((nowhere, nowhere)) };
        if copied == nowhere {
            let begin = journal.begins_with_the_shard()?.filter(|_| *copies_log);
            return Ok((nowhere, begin.unwrap_or(nowhere)));
        }
        let latest = match self.bucket.latest(*shard).await? {
            Some((latest, _)) => {
                let folder = self.bucket.shard(*shard).join(latest.folder.as_str());
                Some(described(&self.bucket, &folder).await?)
            }
            None => None,
        };
        // The record may not say yet that a snapshot was copied.
        let from = latest.as_ref().map_or(copied, |latest| copied.max(latest.log()));
        let pieces = self.bucket.pieces(*shard).await?;
        let end = history(&pieces, record, from)?.end;
        if self.continues(journal, record, &pieces, latest.as_ref(), end).await? {
            return Ok((end, end));
        }
        let message = format!(
            "{} has a log of the shard that {} does not continue: it is a copy of another directory, or an older state. Take the \
             shard over into an empty directory (--take-over {} --shard {shard}), or choose another URL",
            self.bucket.url,
            self.claiming.directory.display(),
            self.bucket.url
        );
        let place = format!("segment {}, byte {}", end.segment, end.offset);
        Err(Error::new(Kind::Config, message)
            .shard(*shard)
            .expected(format!("the log of term {} up to {place}", record.tip.term), "another log"))
    }

    /// Returns whether the log here contains what was copied up to `end`. A segment and a byte do not tell that:
    /// a copied directory goes on from the same place.
    async fn continues(
        &self,
        journal: &Journal,
        record: &Record,
        pieces: &[Piece],
        latest: Option<&Described>,
        end: LogPosition,
    ) -> Result<bool> {
        // A later term knows where an earlier one ends.
        let ending = pieces.iter().filter(|piece| piece.end == end && piece.term <= record.tip.term);
        if let Some(last) = ending.max_by_key(|piece| piece.term) {
            return journal.has(last.begin, &self.bucket.piece(self.claiming.shard, *last).await?);
        }
        if let Some(latest) = latest.filter(|latest| latest.log() == end) {
            return journal.has_begun(end.segment, latest.incarnation());
        }
        // Nothing but the beginning of the shard was copied, which names its directory.
        Ok(end == LogPosition { segment: 1, offset: 0 })
    }

    fn tell_whom_it_waits_for(&self) {
        let Claiming { owner, shard, .. } = &self.claiming;
        let (owner, shard, mut changes) = (owner.clone(), *shard, owner.changes());
        tokio::spawn(async move {
            while owner.phase() == Some(Phase::Waiting) {
                let other = owner.record().filter(|record| record.stage != Stage::Released);
                if let Some(Record { address, term, lease_ms, .. }) = other {
                    reach("owner_waits");
                    let lease = Duration::from_millis(lease_ms).as_secs_f64();
                    tracing::info!(
                        shard,
                        term,
                        "the server at {address} owns the shard: waiting until it has not renewed its lease of {lease} s"
                    );
                    return;
                }
                if changes.changed().await.is_err() {
                    return;
                }
            }
        });
    }

    /// Waits for a phase. False: the claim is over.
    async fn until(&self, wanted: Phase) -> bool {
        let owner = &self.claiming.owner;
        let mut changes = owner.changes();
        loop {
            match owner.phase() {
                Some(phase) if phase == wanted => return true,
                None | Some(Phase::Lost | Phase::Released) => return false,
                Some(_) => {}
            }
            if changes.changed().await.is_err() {
                return false;
            }
        }
    }

    /// Writes the term into `latest`, so that no earlier owner writes it any more. `None`: to be tried again.
    async fn mark(&self, term: u64) -> Result<Option<()>> {
        let shard = self.claiming.shard;
        let (latest, before) = match self.bucket.latest_or_fence(shard).await? {
            Some((found, _)) if found.term > term => {
                let message = "the newest copy is of a later owner of the shard";
                return Err(Error::new(Kind::Unavailable, message));
            }
            Some((found, version)) => (found.in_term(term), Some(version)),
            None => (Latest::fence(shard, term), None),
        };
        reach("latest_fence");
        let swapped = self.bucket.swap(&latest, before).await?;
        reach("latest_fenced");
        Ok(swapped.then_some(()))
    }
}
