//! A start: the newest whole generation, and the records behind it.

pub(crate) mod growth;
pub(crate) mod history;

use crate::catalog::{Catalog, Event};
use crate::files::directory::Directory;
use crate::frame::{Content, Origin};
use crate::journal::{Progress, Settings};
use crate::log::segment::{self, Beginning, End};
use crate::recovery::growth::Growth;
use crate::recovery::history::{History, Name, Used};
use crate::snapshot::generation::{Generation, Manifest, Unusable};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_core::identity::Remembered;
use fastps_core::record::Record;
use fastps_core::shard::Shard;
use fastps_core::tensor::SliceId;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What a start found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The snapshot that was loaded.
    pub generation: Option<u64>,
    /// Slices that are here.
    pub slices: u64,
    /// Records that were repeated.
    pub repeated: u64,
    /// What was not as it should be, a sentence each.
    pub notes: Vec<String>,
    /// What was durable and is lost, as [`Settings::accept_loss`] allows: a sentence each, with counts.
    pub lost: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slices, repeated, .. } = self;
        match self.generation {
            Some(generation) => write!(f, "snapshot {generation}")?,
            None => write!(f, "no snapshot")?,
        }
        write!(f, ", {slices} slices, {repeated} later changes")
    }
}

/// The files as they were found, and what to go on with.
pub(crate) struct Found {
    pub(crate) report: Report,
    pub(crate) catalog: Catalog,
    pub(crate) origin: Origin,
    /// The next segment, which is free.
    pub(crate) segment: u64,
    /// The segment that the log so far ends in, and the length of it that is whole.
    pub(crate) last: Option<(u64, u64)>,
    /// The log that was read.
    pub(crate) growth: Growth,
    /// The next generation.
    pub(crate) generation: u64,
    pub(crate) kept: Kept,
    /// Generations that cannot be used, and why.
    pub(crate) damaged: Vec<(u64, String)>,
    /// Files of another server that are not used.
    pub(crate) others: Vec<Name>,
    /// Where the others come from.
    pub(crate) history: History,
    /// Something could not be read: what is here must be written anew.
    pub(crate) renew: bool,
}

/// Whole generations, the oldest first, and the first segment that each needs.
pub(crate) type Kept = VecDeque<(u64, u64)>;

/// Reads the files of a shard, and changes nothing in them. The empty shard becomes what they say.
pub(crate) fn recover(
    directory: &Directory,
    settings: &Settings,
    shard: &Shard,
    progress: &Progress,
) -> Result<Found> {
    let mut recovery = Recovery::new(directory, settings, Some(shard), progress)?;
    let numbers = directory.generations()?;
    let next = |last: Option<&u64>| last.map_or(1, |last| last + 1);
    let (generation, segment) = (next(numbers.last()), next(recovery.segments.last()));
    let kept = recovery.load(&numbers)?;
    recovery.check_history()?;
    reach("recovery_loaded");
    let log = kept.back().map(|(_, log)| *log).or_else(|| recovery.segments.first().copied());
    recovery.replay(log).map_err(|unusable| match unusable {
        Unusable::Damaged(why) => lost(&why),
        Unusable::Failed(error) => error,
    })?;
    reach("recovery_replayed");
    recovery.settle();
    let others = recovery.note_others()?;
    recovery.history = std::mem::take(&mut recovery.history).without(&others);
    recovery.find_origin()?;
    let Recovery { mut report, catalog, origin, last, renew, damaged, history, growth, .. } = recovery;
    report.slices = catalog.slices().count() as u64;
    let origin = match origin {
        Some(origin) => origin,
        None => Origin { id: random()?, shard: settings.shard, shards: settings.shards },
    };
    Ok(Found {
        report,
        catalog,
        origin,
        segment,
        last,
        growth,
        generation,
        kept,
        damaged,
        others,
        history,
        renew,
    })
}

/// Reads the log from a segment on, and uses nothing of it. What a start would say of it: the number of a segment, and what
/// is wrong with it.
pub(crate) fn check_log(
    directory: &Directory,
    settings: &Settings,
    first: Option<u64>,
) -> Result<Vec<(u64, String)>> {
    let (mut wrong, mut next) = (Vec::new(), first);
    let progress = Progress::default();
    let mut recovery = Recovery::new(directory, settings, None, &progress)?;
    let listed = Generation::list(directory.path())?;
    recovery.note_promises(listed.iter().flatten().map(|generation| &generation.manifest));
    while let Some(number) = next.take() {
        if let Err(unusable) = recovery.replay(Some(number)) {
            wrong.push((recovery.reached, Error::from(unusable).message.clone()));
            next = recovery.segments.range(recovery.reached + 1..).next().copied();
        }
    }
    Ok(wrong)
}

/// Which shard's files a directory has, of how many, as far as they tell.
pub(crate) fn origin(directory: &Directory) -> Result<Option<Origin>> {
    for number in directory.generations()?.into_iter().rev() {
        match Generation::open(directory.path(), number) {
            Ok(generation) => return Ok(Some(generation.manifest.origin())),
            Err(Unusable::Damaged(_)) => {}
            Err(Unusable::Failed(error)) => return Err(error),
        }
    }
    for number in directory.segments()?.into_iter().rev() {
        if let Some(beginning) = segment::beginning(&directory.segment(number))? {
            return Ok(Some(beginning.origin));
        }
    }
    Ok(None)
}

/// Why files are not of one history, if they are not.
pub(crate) fn fork(history: &History, directory: &Directory) -> Option<String> {
    let (a, b) = history.fork()?;
    Some(format!(
        "{} has two histories: {} and {} are of servers neither of which went on from the other's files",
        directory.path().display(),
        history::shown(directory, a),
        history::shown(directory, b)
    ))
}

pub(crate) fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(Kind::Internal, format!("no random numbers: {error}")))?;
    Ok(u64::from_le_bytes(bytes))
}

fn lost(why: &str) -> Error {
    let message = format!(
        "{why}. Changes that were durable cannot be read: restore the directory from a backup, or go on without them by --accept-loss"
    );
    Error::new(Kind::Config, message)
}

struct Recovery<'a> {
    directory: &'a Directory,
    settings: &'a Settings,
    /// What becomes what the files say; `None`: they are only read.
    shard: Option<&'a Shard>,
    segments: BTreeSet<u64>,
    report: Report,
    catalog: Catalog,
    origin: Option<Origin>,
    /// All that changed a slice.
    clients: BTreeSet<u64>,
    /// Slices that were freed while the snapshot was written.
    gone: BTreeSet<u64>,
    damaged: Vec<(u64, String)>,
    renew: bool,
    /// Which servers wrote what is here, and what of it is used.
    history: History,
    used: Used,
    /// How much of each segment was durable, as snapshots tell.
    promised: BTreeMap<u64, u64>,
    /// The segment that is being read, the byte, a byte between the last frame that was repeated and those that were not, and
    /// how much of it was durable as far as its frames tell.
    reached: u64,
    at: u64,
    rest: u64,
    durable: u64,
    progress: &'a Progress,
    last: Option<(u64, u64)>,
    growth: Growth,
}

impl<'a> Recovery<'a> {
    fn new(
        directory: &'a Directory,
        settings: &'a Settings,
        shard: Option<&'a Shard>,
        progress: &'a Progress,
    ) -> Result<Self> {
        Ok(Self {
            directory,
            settings,
            shard,
            segments: directory.segments()?.into_iter().collect(),
            report: Report::default(),
            catalog: Catalog::default(),
            origin: None,
            clients: BTreeSet::new(),
            gone: BTreeSet::new(),
            damaged: Vec::new(),
            renew: false,
            history: History::default(),
            used: Used::default(),
            promised: BTreeMap::new(),
            reached: 0,
            at: 0,
            rest: 0,
            durable: 0,
            progress,
            last: None,
            growth: Growth::default(),
        })
    }

    /// Loads the newest generation that is whole. Gives the whole ones: it and older ones.
    fn load(&mut self, numbers: &[u64]) -> Result<Kept> {
        let (mut kept, mut damaged, mut manifests) = (Kept::new(), Vec::new(), Vec::new());
        for number in numbers.iter().rev() {
            let opened = Generation::open(self.directory.path(), *number);
            // Older ones are opened, too, and read when they are needed.
            let whole = match opened {
                Ok(generation) if kept.is_empty() => self.take(&generation).map(|()| generation),
                opened => opened,
            };
            match whole {
                Ok(generation) => {
                    kept.push_front((*number, generation.manifest.log));
                    manifests.push(generation.manifest);
                }
                Err(Unusable::Failed(error)) => return Err(error),
                Err(Unusable::Damaged(why)) => damaged.push((*number, why)),
            }
        }
        let beginning = self.segments.first().map_or(numbers.is_empty(), |first| *first == 1);
        if kept.is_empty() && !beginning {
            let mut why = format!(
                "no snapshot in {} is whole, and the log does not reach back to the beginning: restore the directory from a backup",
                self.directory.path().display()
            );
            for (_, damage) in damaged {
                why = format!("{why}; {damage}");
            }
            return Err(Error::new(Kind::Config, why));
        }
        self.renew = !damaged.is_empty();
        self.damaged = damaged;
        self.report.generation = kept.back().map(|(number, _)| *number);
        self.used.generation = self.report.generation;
        self.history = History::read(self.directory, manifests.iter())?;
        self.note_promises(manifests.iter());
        Ok(kept)
    }

    fn note_promises<'m>(&mut self, manifests: impl Iterator<Item = &'m Manifest>) {
        for (number, bytes) in manifests.filter_map(|manifest| manifest.durable) {
            let promised = self.promised.entry(number).or_default();
            *promised = bytes.max(*promised);
        }
    }

    /// Files of two servers that wrote at once are not gone on from: either has what the other lacks.
    fn check_history(&self) -> Result<()> {
        match fork(&self.history, self.directory) {
            Some(why) if !self.settings.accept_loss => Err(Error::new(
                Kind::Config,
                format!(
                    "{why}. Move the files of one of them elsewhere, or go on with the newest snapshot and the log behind it, \
                     without what only the other has, by --accept-loss"
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Files that are not used since another server wrote them, and what is lost with them.
    fn note_others(&mut self) -> Result<Vec<Name>> {
        if self.history.fork().is_none() {
            return Ok(Vec::new());
        }
        let others = self.history.others(&self.used);
        for name in &others {
            let shown = history::shown(self.directory, *name);
            let what = match name {
                Name::Segment(number) => {
                    let pushes = segment::count_pushes(&self.directory.segment(*number), 0)?;
                    format!("{pushes} pushes")
                }
                Name::Generation(number) => {
                    let generation = Generation::open(self.directory.path(), *number)?;
                    let (versions, _) = generation.changes()?;
                    format!("{} slices with {versions} changes in all", generation.summary().slices)
                }
            };
            self.report.lost.push(format!("{shown} is of another server and is not used: {what} in it"));
        }
        self.renew |= !others.is_empty();
        Ok(others)
    }

    /// Where nothing was read to its end, the files still tell which directory this is.
    fn find_origin(&mut self) -> Result<()> {
        if self.origin.is_none()
            && let Some(origin) = self.history.origin()
        {
            self.check_origin(origin)?;
            self.origin = Some(origin);
        }
        Ok(())
    }

    fn take(&mut self, generation: &Generation) -> Result<(), Unusable> {
        self.check_origin(generation.manifest.origin())?;
        let Some(shard) = self.shard else { return Ok(()) };
        let catalog = &generation.manifest.catalog;
        let log =
            self.segments.range(generation.manifest.log..).map(|number| self.directory.segment(*number));
        let log: u64 = log.filter_map(|path| std::fs::metadata(path).ok()).map(|found| found.len()).sum();
        self.progress.done.store(0, Ordering::Relaxed);
        self.progress.total.store(generation.summary().bytes + log, Ordering::Relaxed);
        let loaded = generation.load(shard, |standing, bytes| {
            self.progress.done.fetch_add(bytes, Ordering::Relaxed);
            self.clients.extend(standing.clients.iter().map(|Remembered { client, .. }| *client));
        });
        if let Err(unusable) = loaded {
            let all: Vec<_> = catalog.slices().map(|(id, ..)| SliceId(id)).collect();
            shard.remove(&all);
            self.clients.clear();
            return Err(unusable);
        }
        self.growth.state = Some(generation.summary().bytes);
        self.catalog = catalog.clone();
        self.gone.clone_from(&generation.manifest.gone);
        self.origin = Some(generation.manifest.origin());
        Ok(())
    }

    fn check_origin(&self, origin: Origin) -> Result<()> {
        let Settings { shard, shards, path, .. } = self.settings;
        if (origin.shard, origin.shards) == (*shard, *shards) {
            return Ok(());
        }
        let mut why = format!("{} belongs to another shard", path.display());
        if origin.shards != *shards {
            let all = path.parent().unwrap_or(path).display();
            why = format!(
                "{} belongs to a cluster of another size; for {shards}: fastps checkpoint restore {all} {all}-{shards} --shards {shards}",
                path.display()
            );
        }
        let say = |shard, shards| format!("shard {shard} of {shards}");
        Err(Error::new(Kind::Config, why).expected(say(*shard, *shards), say(origin.shard, origin.shards)))
    }

    /// Repeats what the log says from a segment on.
    fn replay(&mut self, first: Option<u64>) -> Result<(), Unusable> {
        let mut next = first;
        while let Some(number) = next.take() {
            self.reached = number;
            match self.replay_segment(number) {
                Ok(End::Continued(following)) => next = Some(following),
                Ok(End::Open { whole, torn }) => {
                    self.last = Some((number, whole));
                    if torn > 0 {
                        self.note_torn(number, whole, torn);
                    }
                    self.look_behind(number)?;
                }
                Err(Unusable::Damaged(why)) if self.settings.accept_loss => {
                    self.renew = true;
                    let pushes = self.count_behind(number)?;
                    self.report.lost.push(format!(
                        "{why}: what comes behind it is lost, as --accept-loss allows, and {pushes} pushes of it that can be read"
                    ));
                }
                Err(unusable) => return Err(unusable),
            }
        }
        Ok(())
    }

    /// Says what is known of the bytes behind the last whole frame.
    fn note_torn(&mut self, number: u64, whole: u64, torn: u64) {
        let (path, durable) = (self.directory.segment(number), self.durable);
        self.report.notes.push(format!(
            "{} ends in {torn} bytes that are no whole record, from byte {whole} on: they are left out. The last sync that the \
             file tells of made its first {durable} bytes durable; whether a later one was complete before the server ended, \
             nothing tells",
            path.display()
        ));
    }

    /// Pushes behind the place where reading a segment has stopped.
    fn count_behind(&self, number: u64) -> Result<u64> {
        let path = |number: &u64| self.directory.segment(*number);
        let mut pushes = 0;
        if self.segments.contains(&number) {
            pushes += segment::count_pushes(&path(&number), self.rest)?;
        }
        // Those of another server are told by themselves.
        let one = self.history.fork().is_none();
        for later in self.segments.range(number + 1..).filter(|_| one) {
            pushes += segment::count_pushes(&path(later), 0)?;
        }
        Ok(pushes)
    }

    /// Nothing should follow the segment that is open. One that was just begun may.
    fn look_behind(&mut self, number: u64) -> Result<(), Unusable> {
        for later in self.segments.range(number + 1..) {
            let path = self.directory.segment(*later);
            let why = match segment::beginning(&path)? {
                Some(Beginning { more: false, .. }) => continue,
                Some(Beginning { after_hole: true, .. }) => {
                    "the log could not be written any more, and no snapshot was completed since"
                }
                _ if self.settings.accept_loss => "what lies between is missing, as --accept-loss allows",
                _ => {
                    let open = self.directory.segment(number);
                    let (open, path) = (open.display(), path.display());
                    return Err(Unusable::Damaged(format!("{open} has lost its end: {path} follows it")));
                }
            };
            (self.last, self.renew) = (None, true);
            if self.history.fork().is_some() {
                // It is told with the others.
                continue;
            }
            let pushes = segment::count_pushes(&path, 0)?;
            let left_out = format!("{} is left out: {why}; {pushes} pushes in it", path.display());
            self.report.lost.push(left_out);
        }
        Ok(())
    }

    fn replay_segment(&mut self, number: u64) -> Result<End, Unusable> {
        let path = self.directory.segment(number);
        if !self.segments.contains(&number) {
            return Err(Unusable::Damaged(format!("{} is missing", path.display())));
        }
        let known = self.origin;
        let mut before = 0;
        self.used.segments.insert(number);
        (self.at, self.rest, self.durable) = (0, 0, 0);
        let (origin, end) = segment::read(&path, number, known, |at, content| {
            self.at = at;
            if let Content::Durable(offset) = content {
                self.durable = self.durable.max(offset);
            }
            self.progress.done.fetch_add(at - before, Ordering::Relaxed);
            before = at;
            self.repeat(content).map_err(|error| match error.kind {
                Kind::Capacity => Unusable::Failed(error),
                _ => Unusable::Damaged(format!("{} does not fit at byte {at}: {error}", path.display())),
            })?;
            self.rest = at + 1;
            Ok(())
        })?;
        let promised = self.promised.get(&number).copied().unwrap_or(0);
        if let End::Open { whole, .. } = end
            && whole < promised
        {
            let why = format!(
                "{} is damaged at byte {whole}: its first {promised} bytes were durable, as a snapshot tells",
                path.display()
            );
            return Err(Unusable::Damaged(why));
        }
        self.durable = self.durable.max(promised);
        self.growth.replayed += self.at;
        self.growth.segments += 1;
        self.check_origin(origin)?;
        self.origin = Some(origin);
        Ok(end)
    }

    fn repeat(&mut self, content: Content<'_>) -> Result<()> {
        let Some(shard) = self.shard else { return Ok(()) };
        match content {
            Content::Push(record) => self.repeat_push(shard, &record)?,
            Content::Fence(slice, identity) => {
                self.clients.insert(identity.client);
                if !self.gone.contains(&slice.0) {
                    shard.slice(slice)?.replay_fence(identity)?;
                }
            }
            Content::Event(event) => self.repeat_event(shard, &event)?,
            Content::Segment { .. } | Content::Durable(_) | Content::End(_) | Content::Slice(_) => {}
        }
        Ok(())
    }

    fn repeat_push(&mut self, shard: &Shard, record: &Record<'_>) -> Result<()> {
        self.clients.insert(record.identity.client);
        self.clients.extend(record.shared_by.iter().map(|identity| identity.client));
        if self.gone.contains(&record.slice.0) {
            return Ok(());
        }
        let new = shard.slice(record.slice)?.replay(record)?;
        self.report.repeated += u64::from(new);
        Ok(())
    }

    fn repeat_event(&mut self, shard: &Shard, event: &Event) -> Result<()> {
        match event {
            Event::SessionEnded(client) => shard.forget_client(*client),
            Event::Reserved(_, reservation) => {
                let spec = Arc::new(reservation.spec.clone());
                let slices: Vec<_> =
                    reservation.slices.iter().map(|(id, k)| (SliceId(*id), *k as usize)).collect();
                shard.create(&spec, reservation.group, &slices)?;
            }
            Event::Dropped(slices) => {
                let slices: Vec<_> = slices.iter().map(|id| SliceId(*id)).collect();
                shard.remove(&slices);
            }
            _ => {}
        }
        self.catalog.apply(event);
        Ok(())
    }

    /// What the last snapshot had freed is gone, and clients without a session are forgotten: their pushes can come no
    /// more.
    fn settle(&mut self) {
        let gone = self.gone.iter().copied().collect();
        self.catalog.apply(&Event::Dropped(gone));
        for client in self.clients.difference(&self.catalog.sessions) {
            if let Some(shard) = self.shard {
                shard.forget_client(*client);
            }
        }
    }
}
