//! What a shard keeps of itself on disk: the one face of this crate. As a [`Sink`] it takes every change of an `exact`
//! slice; of `hogwild` slices assignments alone.

mod snapshots;

use crate::catalog::{Catalog, Event};
use crate::files::directory::Directory;
use crate::frame::{self, Author, Origin, random};
use crate::journal::snapshots::Why;
use crate::log::Log;
use crate::log::segment::Segment;
use crate::recovery::growth::Growth;
use crate::recovery::history::{Lineage, Name, Used};
use crate::recovery::{self, Kept, Progress, Report, Settings};
use crate::snapshot::generation::{Generation, Summary};
use crate::snapshot::manifest::Cut;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::{Action, Identity};
use fastps_core::record::{Record, Sink};
use fastps_core::shard::Shard;
use fastps_core::tensor::{Apply, SliceId};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The files of one shard.
#[derive(Debug)]
pub struct Journal {
    directory: Directory,
    settings: Settings,
    /// Of this server.
    incarnation: u64,
    log: Arc<Log>,
    files: Mutex<Option<Files>>,
    progress: Progress,
}

/// Held by whoever makes files.
#[derive(Debug)]
struct Files {
    origin: Origin,
    author: Author,
    /// This server, and those whose files it went on from.
    lineage: Lineage,
    /// Numbers that are free.
    segment: u64,
    generation: u64,
    kept: Kept,
    growth: Growth,
    /// The newest snapshot of [`Journal::shorten`] by this process.
    overgrown: Option<u64>,
    writer: Option<JoinHandle<()>>,
}

impl Journal {
    /// Takes the directory, which no other process may have. Nothing is read, and nothing logged, before
    /// [`Journal::recover`].
    pub fn open(settings: Settings) -> Result<Arc<Self>> {
        let directory = Directory::open(&settings.path)?;
        Ok(Arc::new(Self {
            directory,
            settings,
            incarnation: random()?.max(1),
            log: Log::new(),
            files: Mutex::default(),
            progress: Progress::default(),
        }))
    }

    /// Drawn when the journal was opened, and written into each of its files.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    fn files(&self) -> MutexGuard<'_, Option<Files>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an empty shard what it was, and begins to log. Once.
    pub fn recover(&self, shard: &Shard) -> Result<Report> {
        let mut files = self.files();
        if files.is_some() {
            return Err(Error::new(Kind::Internal, "the shard was recovered already"));
        }
        let mut found = recovery::recover(&self.directory, &self.settings, shard, &self.progress)?;
        let mut notes = Vec::new();
        for (number, why) in &found.damaged {
            let aside = self.directory.set_aside(*number)?;
            notes.push(format!("snapshot {number} cannot be used: {why}; it is now {}", aside.display()));
        }
        found.report.notes.splice(..0, notes);
        for other in &found.others {
            let aside = match other {
                Name::Generation(number) => self.directory.set_aside(*number)?,
                Name::Segment(number) => self.directory.set_segment_aside(*number)?,
            };
            found.report.notes.push(format!("what another server wrote is kept as {}", aside.display()));
        }
        found.kept.retain(|(number, _)| !found.others.contains(&Name::Generation(*number)));
        let author = Author { incarnation: self.incarnation, predecessor: found.history.newest() };
        let lineage = found.history.lineage(&Used::default()).followed_by(found.origin.id, author);
        let segment = Segment::create(&self.directory, found.segment, false, found.origin, author)?;
        if let Some((last, end)) = found.last {
            Segment::reopen(&self.directory, last, end)?.end(&mut [], found.segment)?;
        }
        let write = self.log.open(found.catalog, segment);
        let writer = std::thread::Builder::new().name(format!("fastps-log-{}", self.settings.shard));
        let writer = writer
            .spawn(write)
            .map_err(|error| Error::new(Kind::Internal, format!("cannot start a thread: {error}")))?;
        *files = Some(Files {
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
        if found.renew {
            // What cannot be read again must not be needed again.
            self.snapshot(shard)?;
        }
        Ok(found.report)
    }

    /// How far [`Journal::recover`] is: bytes that it has read, and bytes to be read.
    pub fn progress(&self) -> (u64, u64) {
        let Progress { done, total } = &self.progress;
        let total = total.load(Ordering::Relaxed);
        (done.load(Ordering::Relaxed).min(total), total)
    }

    /// The catalog as it is.
    pub fn catalog(&self) -> Catalog {
        self.log.catalog()
    }

    /// A change of the catalog; gives the position behind it.
    pub fn note(&self, event: &Event) -> u64 {
        self.log.note(event)
    }

    /// Bytes of changes that are not durable yet.
    pub fn pending(&self) -> u64 {
        self.log.pending()
    }

    /// How often the log was made durable: once for all changes that waited.
    pub fn syncs(&self) -> u64 {
        self.log.syncs()
    }

    /// The newest snapshot that is kept; `None`: there is none yet.
    pub fn newest(&self) -> Option<Summary> {
        let (number, _) = *self.files().as_ref()?.kept.back()?;
        Generation::open(self.directory.path(), number).ok().map(|generation| generation.summary())
    }

    /// Whether the log behind the newest snapshot is longer than so many times the state (0: never), or has many segments: a
    /// start would have to repeat it.
    pub fn is_overgrown(&self, times: u64) -> bool {
        let growth = self.files().as_ref().map(|files| files.growth);
        growth.is_some_and(|growth| growth.is_much(self.log.position(), times, || self.log.catalog_bytes()))
    }

    /// The position behind all that was logged so far.
    pub fn position(&self) -> u64 {
        self.log.position()
    }

    /// Fails while nothing new can be made durable; says why.
    pub fn check(&self) -> Result<()> {
        self.log.check()
    }

    /// Calls `then` once, when all before `position` is durable: now, or from another thread. While the log cannot be
    /// written it waits, for the snapshot that makes up for it.
    pub fn when_durable(&self, position: u64, then: impl FnOnce() + Send + 'static) {
        self.log.when_durable(position, Box::new(then));
    }

    /// Waits until all before `position` is durable; fails when that is not to be.
    pub fn sync(&self, position: u64) -> Result<()> {
        self.log.sync(position)
    }

    /// Who changes the shard has nothing else to do just now: a good moment to write what waits.
    pub fn rest(&self) {
        self.log.rest();
    }

    /// Whether so much waits to be written that more should wait for [`Journal::when_room`].
    pub fn is_full(&self) -> bool {
        self.log.is_full()
    }

    /// Calls `then` once, when there is room.
    pub fn when_room(&self, then: impl FnOnce() + Send + 'static) {
        self.log.when_room(Box::new(then));
    }

    /// Writes a snapshot while pushes go on, and removes what is older than those to be kept.
    pub fn snapshot(&self, shard: &Shard) -> Result<Summary> {
        self.write(shard, Why::Asked, None, &|| Ok(()))
    }

    /// The same, only because the log is long: the snapshot takes the place of the last one of this kind, and of no other.
    pub fn shorten(&self, shard: &Shard) -> Result<Summary> {
        self.write(shard, Why::Overgrown, None, &|| Ok(()))
    }

    /// The same, in which the `exact` tensors of a group are as they were at one moment. `begun` is called right behind that
    /// moment; where it fails, there is no snapshot.
    pub fn snapshot_of_cut(
        &self,
        shard: &Shard,
        cut: Cut,
        begun: &dyn Fn() -> Result<()>,
    ) -> Result<Summary> {
        self.write(shard, Why::Asked, Some(cut), begun)
    }

    /// Makes everything durable, as far as that is to be, and ends. Later changes are not logged.
    pub fn close(&self) {
        self.log.close();
        let writer = self.files().as_mut().and_then(|files| files.writer.take());
        if let Some(writer) = writer {
            let _ = writer.join();
        }
        self.directory.release();
    }

    /// The whole generations in a shard's directory, the newest first; of others, what is wrong with them.
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
            self.log.append(|to| frame::push(to, record));
        }
    }

    fn fenced(&self, slice: SliceId, identity: Identity) {
        self.log.append(|to| {
            frame::fence(to, slice, identity);
            true
        });
    }
}
