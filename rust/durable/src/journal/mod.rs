//! The durable state of a running shard, and the entry point of this crate. As a [`Sink`] it logs every
//! change of `exact` slices, and assignments to `hogwild` slices.

mod copied;
mod kept;
mod snapshots;

pub use kept::KeptHistory;

use crate::catalog::{Catalog, Event};
use crate::files::directory::Directory;
use crate::frame::{self, Author, Origin, random_id};
use crate::journal::snapshots::SnapshotReason;
use crate::log::Log;
use crate::log::segment::Segment;
use crate::owner::LockedFile;
use crate::recovery::growth::{Bounds, Growth};
use crate::recovery::history::{FileId, Lineage, UsedFiles};
use crate::recovery::moment::begins_empty;
use crate::recovery::{self, KeptSnapshots, Progress, Recovered, Report, Settings};
use crate::snapshot::generation::{Generation, Summary};
use crate::snapshot::manifest::Cut;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::{Action, Identity};
use fastps_core::record::{ProgramRecord, Record, Sink};
use fastps_core::shard::Shard;
use fastps_core::tensor::{Apply, SliceId, Space, SpaceId};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The system's identifier of the boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The log and snapshots of one shard.
#[derive(Debug)]
pub struct Journal {
    directory: Directory,
    settings: Settings,
    /// The incarnation of this server.
    incarnation: u64,
    log: Arc<Log>,
    files: Mutex<Option<JournalState>>,
    history: Mutex<Span>,
    progress: Progress,
    /// Times the state beyond which the log is too long; 0: it never is.
    times: AtomicU64,
    /// The position at which the log may grow no more until a snapshot is complete.
    limit: AtomicU64,
}

/// The history that is kept, as of the last snapshot or the start.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    /// Bytes of its snapshots and log.
    bytes: u64,
    /// Its beginning, in seconds since 1970.
    since: u64,
    /// The log's position then.
    position: u64,
}

/// State of the files. Its lock is held while files are created or removed.
#[derive(Debug)]
struct JournalState {
    origin: Origin,
    author: Author,
    /// This server, and those whose files it took over.
    lineage: Lineage,
    /// The next free numbers.
    segment: u64,
    generation: u64,
    kept: KeptSnapshots,
    growth: Growth,
    /// The newest snapshot that [`Journal::shorten`] wrote in this process.
    overgrown: Option<u64>,
    writer: Option<JoinHandle<()>>,
}

impl Journal {
    /// Opens and locks the directory. Nothing is read or logged before [`Journal::recover`].
    pub fn open(settings: Settings) -> Result<Arc<Self>> {
        let directory = Directory::open(&settings.path)?;
        Ok(Arc::new(Self {
            directory,
            settings,
            incarnation: random_id()?.max(1),
            log: Log::new(),
            files: Mutex::default(),
            history: Mutex::default(),
            progress: Progress::default(),
            times: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
        }))
    }

    /// Random number drawn when the journal was opened; written to each of its files.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The locked file of the directory: no other process holds its lock.
    pub fn locked_file(&self) -> Option<LockedFile> {
        let (device, inode) = self.directory.lock().inode()?;
        let boot = std::fs::read_to_string(BOOT_ID).ok()?.trim().to_owned();
        Some(LockedFile { boot, device, inode })
    }

    fn files(&self) -> MutexGuard<'_, Option<JournalState>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Restores an empty shard from the files and starts to log. To be called once.
    pub fn recover(&self, shard: &Shard) -> Result<Report> {
        let mut files = self.files();
        if files.is_some() {
            return Err(Error::new(Kind::Internal, "the shard was already recovered"));
        }
        let mut found = recovery::recover(&self.directory, &self.settings, shard, &self.progress)?;
        self.set_unusable_aside(&mut found)?;
        let author = Author { incarnation: self.incarnation, predecessor: found.history.newest() };
        let lineage = found.history.lineage(&UsedFiles::default()).followed_by(found.origin.id, author);
        let segment = self.first_segment(&found, author)?;
        let logs = found.kept.iter().map(|(_, log)| *log);
        if self.settings.history > 0 && begins_empty(&self.directory.segments()?, logs) {
            found.kept.push_front((0, 1));
        }
        let writer = self.start_writer(found.catalog, segment, shard.meter().limit())?;
        self.measure_history(&found.kept);
        *files = Some(JournalState {
            origin: found.origin,
            author,
            lineage,
            segment: found.segment + 1,
            generation: found.generation,
            kept: found.kept,
            growth: found.growth,
            overgrown: None,
            writer: Some(writer),
        });
        drop(files);
        if found.renew
            && let Err(error) = self.snapshot(shard)
        {
            // A new snapshot would make the unreadable parts unnecessary.
            self.wait_for_space(error)?;
        }
        Ok(found.report)
    }

    /// Creates the segment in which the log continues. Without space for it, the log starts broken.
    fn first_segment(&self, found: &Recovered, author: Author) -> Result<Segment> {
        let after_gap = found.renew && found.last.is_none();
        let created = Segment::create(&self.directory, found.segment, after_gap, found.origin, author);
        let segment = match created {
            Ok(segment) => segment,
            Err(error) => {
                self.wait_for_space(error)?;
                return Segment::missing(&self.directory, found.segment);
            }
        };
        if let Some((last, end)) = found.last
            && let Err(error) = Segment::reopen(&self.directory, last, end)?.end(&mut [], found.segment)
        {
            self.wait_for_space(error)?;
        }
        Ok(segment)
    }

    /// Marks the log as broken if the disk is full, until a snapshot fits; fails for any other reason.
    fn wait_for_space(&self, error: Error) -> Result<()> {
        if error.kind != Kind::Unavailable {
            return Err(error);
        }
        self.log.give_up(&error);
        Ok(())
    }

    /// Renames damaged snapshots and the files of other servers, and reports that.
    fn set_unusable_aside(&self, found: &mut Recovered) -> Result<()> {
        let mut notes = Vec::new();
        for (number, why) in &found.damaged {
            let aside = self.directory.set_aside(*number)?;
            notes.push(format!(
                "snapshot {number} cannot be used and was moved to {}: {why}",
                aside.display()
            ));
        }
        found.report.notes.splice(..0, notes);
        for other in &found.others {
            let aside = match other {
                FileId::Generation(number) => self.directory.set_aside(*number)?,
                FileId::Segment(number) => self.directory.set_segment_aside(*number)?,
            };
            found.report.notes.push(format!("files of another server were moved to {}", aside.display()));
        }
        found.kept.retain(|(number, _)| !found.others.contains(&FileId::Generation(*number)));
        Ok(())
    }

    fn start_writer(&self, catalog: Catalog, segment: Segment, memory_limit: u64) -> Result<JoinHandle<()>> {
        let run = self.log.open(catalog, segment, memory_limit, self.settings.history > 0);
        let thread = std::thread::Builder::new().name(format!("fastps-log-{}", self.settings.shard));
        let failed = |error| Error::new(Kind::Internal, format!("cannot start the log thread: {error}"));
        thread.spawn(run).map_err(failed)
    }

    /// Progress of [`Journal::recover`]: bytes read, and bytes to read in all.
    pub fn progress(&self) -> (u64, u64) {
        let Progress { done, total } = &self.progress;
        let total = total.load(Ordering::Relaxed);
        (done.load(Ordering::Relaxed).min(total), total)
    }

    /// A copy of the catalog.
    pub fn catalog(&self) -> Catalog {
        self.log.catalog()
    }

    /// Applies an event to the catalog and logs it. Returns the log position after it.
    pub fn note(&self, event: &Event) -> u64 {
        self.log.note(event)
    }

    /// Notes the name of a client, if history is kept.
    pub fn name(&self, client: u64, name: &str) {
        if self.keeps_history() {
            self.note(&Event::Named(client, name.into()));
        }
    }

    /// Returns whether history is kept.
    pub fn keeps_history(&self) -> bool {
        self.settings.history > 0
    }

    fn history(&self) -> MutexGuard<'_, Span> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of the history that is kept, and its beginning in seconds since 1970. `None`: none is kept.
    pub fn history_kept(&self) -> Option<(u64, u64)> {
        let Span { bytes, since, position } = *self.history();
        let grown = self.log.position().saturating_sub(position);
        self.keeps_history().then_some((bytes + grown, since))
    }

    /// Notes a moment that a user has named, in a log that keeps history. Returns the log position after it.
    pub fn mark(&self, id: u64, name: &str) -> Result<u64> {
        self.log.check()?;
        self.log.append(|to| frame::mark(to, frame::Mark { id, name }));
        Ok(self.log.position())
    }

    /// Bytes of changes that are not durable yet.
    pub fn pending(&self) -> u64 {
        self.log.pending_bytes()
    }

    /// Number of syncs of the log. One sync covers all changes that wait.
    pub fn syncs(&self) -> u64 {
        self.log.syncs()
    }

    /// The number of the newest snapshot, and its time in seconds since 1970. `None`: there is none yet.
    pub fn newest(&self) -> Option<(u64, u64)> {
        let (number, _) = *self.files().as_ref()?.kept.back()?;
        let generation = Generation::open_head(self.directory.path(), number).ok()?;
        Some((number, generation.manifest.written))
    }

    /// From now on the log is too long beyond `times` the state (0: never); `alarmed` is called at that
    /// moment, and must not block.
    pub fn watch(&self, times: u64, alarmed: impl Fn() + Send + Sync + 'static) {
        self.times.store(times, Ordering::Relaxed);
        self.log.on_alarm(alarmed);
        if let Some(files) = self.files().as_ref() {
            self.bound(&files.growth);
        }
    }

    /// Returns whether the log after the newest snapshot is too long, or has too many segments: a start would
    /// have to replay it. If not, the next alarm is set.
    pub fn is_overgrown(&self) -> bool {
        let files = self.files();
        let due = files.as_ref().and_then(|files| self.bound(&files.growth)).map(|bounds| bounds.due);
        due.is_some_and(|due| self.log.position() >= due)
    }

    /// Returns whether the log has grown so far beyond that that writers should wait for a snapshot.
    pub fn is_at_limit(&self) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        limit != u64::MAX && self.log.position() >= limit
    }

    /// Sets the bounds of the log, and an alarm for when it is too long.
    fn bound(&self, growth: &Growth) -> Option<Bounds> {
        let times = self.times.load(Ordering::Relaxed);
        let bounds = growth.bounds(times, if times > 0 { self.log.catalog_bytes() } else { 0 })?;
        self.limit.store(bounds.limit, Ordering::Relaxed);
        if self.log.position() < bounds.due {
            self.log.alarm_at(bounds.due);
        }
        Some(bounds)
    }

    /// The log position after everything logged so far.
    pub fn position(&self) -> u64 {
        self.log.position()
    }

    /// Fails while new changes cannot become durable, and says why.
    pub fn check(&self) -> Result<()> {
        self.log.check()
    }

    /// Why changes could not become durable at some moment since the last call, even if they can now.
    pub fn take_failure(&self) -> Option<Error> {
        self.log.take_failure()
    }

    /// Calls `then` once everything before `position` is durable: immediately, or on another thread. While
    /// the log is broken, it waits for the snapshot that closes the gap.
    pub fn when_durable(&self, position: u64, then: impl FnOnce() + Send + 'static) {
        self.log.when_durable(position, Box::new(then));
    }

    /// Blocks until everything before `position` is durable. Fails if that cannot happen.
    pub fn sync(&self, position: u64) -> Result<()> {
        self.log.sync(position)
    }

    /// The caller is idle for now: a good moment to write pending changes.
    pub fn rest(&self) {
        self.log.rest();
    }

    /// Returns whether callers should wait for [`Journal::when_room`], since too many bytes are unwritten.
    pub fn is_full(&self) -> bool {
        self.log.is_full()
    }

    /// Calls `then` once the queue has room.
    pub fn when_room(&self, then: impl FnOnce() + Send + 'static) {
        self.log.when_room(Box::new(then));
    }

    /// Writes a snapshot while pushes continue, then removes the files that are no longer kept.
    pub fn snapshot(&self, shard: &Shard) -> Result<Summary> {
        self.write(shard, SnapshotReason::Requested, None, &|| Ok(()))
    }

    /// Writes a snapshot because the log is long. It replaces only the last snapshot of this kind, as long as
    /// the log that all snapshots need stays short.
    pub fn shorten(&self, shard: &Shard) -> Result<Summary> {
        self.write(shard, SnapshotReason::LogTooLong, None, &|| Ok(()))
    }

    /// Writes a snapshot in which the `exact` tensors of a group are at one moment. `begun` is called right
    /// after that moment; if it fails, no snapshot is written.
    pub fn snapshot_of_cut(
        &self,
        shard: &Shard,
        cut: Cut,
        begun: &dyn Fn() -> Result<()>,
    ) -> Result<Summary> {
        self.write(shard, SnapshotReason::Requested, Some(cut), begun)
    }

    /// Makes everything durable if possible, and releases the directory. Later changes are not logged.
    pub fn close(&self) {
        self.log.close();
        let writer = self.files().as_mut().and_then(|files| files.writer.take());
        if let Some(writer) = writer {
            let _ = writer.join();
        }
        self.directory.release();
    }

    /// The snapshots in a shard's directory, newest first; for each that is damaged, what is wrong.
    pub fn generations(path: &Path) -> Result<Vec<Result<Generation>>> {
        Generation::list(path)
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.close();
    }
}

impl Sink for Journal {
    fn record(&self, record: &Record<'_>) {
        if record.apply == Apply::Exact || record.action != Action::Gradient {
            // Earlier versions, whose servers have no history, read neither.
            let kept =
                if self.keeps_history() { *record } else { Record { note: "", acknowledged: 0, ..*record } };
            self.log.append(|to| frame::push(to, &kept));
        }
    }

    fn fenced(&self, slice: SliceId, identity: Identity) {
        self.log.append(|to| {
            frame::fence(to, slice, identity);
            true
        });
    }

    fn program(&self, record: &ProgramRecord<'_>) {
        self.log.append(|to| frame::program(to, record));
    }

    fn space_opened(&self, slice: SliceId, space: &Space) {
        self.log.append(|to| frame::space_opened(to, slice, space));
    }

    fn space_closed(&self, slice: SliceId, space: SpaceId) {
        self.log.append(|to| frame::space_closed(to, slice, space));
    }
}
