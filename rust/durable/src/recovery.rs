//! A start: the newest whole generation, and the records behind it.

use crate::catalog::{Catalog, Event};
use crate::directory::Directory;
use crate::frame::{Content, Origin};
use crate::generation::{Generation, Unusable};
use crate::journal::Settings;
use crate::segment::{self, End};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::identity::Remembered;
use fastps_core::record::Record;
use fastps_core::shard::Shard;
use fastps_core::tensor::SliceId;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

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
    /// The next generation.
    pub(crate) generation: u64,
    pub(crate) kept: Kept,
    /// Something could not be read: what is here must be written anew.
    pub(crate) renew: bool,
}

/// Whole generations, the oldest first, and the first segment that each needs.
pub(crate) type Kept = VecDeque<(u64, u64)>;

pub(crate) fn recover(directory: &Directory, settings: &Settings, shard: &Shard) -> Result<Found> {
    let (numbers, segments) = (directory.generations()?, directory.segments()?);
    let next = |numbers: &[u64]| numbers.last().map_or(1, |last| last + 1);
    let (generation, segment) = (next(&numbers), next(&segments));
    let mut recovery = Recovery {
        directory,
        settings,
        shard,
        segments: segments.into_iter().collect(),
        report: Report::default(),
        catalog: Catalog::default(),
        origin: None,
        clients: BTreeSet::new(),
        gone: BTreeSet::new(),
        renew: false,
        last: None,
    };
    let kept = recovery.load(&numbers)?;
    let log = kept.back().map(|(_, log)| *log).or_else(|| recovery.segments.first().copied());
    recovery.replay(log)?;
    recovery.settle();
    let Recovery { mut report, catalog, origin, last, renew, .. } = recovery;
    report.slices = catalog.slices().count() as u64;
    let origin = match origin {
        Some(origin) => origin,
        None => Origin { id: random()?, shard: settings.shard, shards: settings.shards },
    };
    Ok(Found { report, catalog, origin, segment, last, generation, kept, renew })
}

fn random() -> Result<u64> {
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
    shard: &'a Shard,
    segments: BTreeSet<u64>,
    report: Report,
    catalog: Catalog,
    origin: Option<Origin>,
    /// All that changed a slice.
    clients: BTreeSet<u64>,
    /// Slices that were freed while the snapshot was written.
    gone: BTreeSet<u64>,
    renew: bool,
    last: Option<(u64, u64)>,
}

impl Recovery<'_> {
    /// Loads the newest generation that is whole. Gives the whole ones: it and older ones.
    fn load(&mut self, numbers: &[u64]) -> Result<Kept> {
        let (mut kept, mut damaged) = (Kept::new(), Vec::new());
        for number in numbers.iter().rev() {
            let opened = Generation::open(self.directory.path(), *number);
            // Older ones are opened, too, and read when they are needed.
            let whole = match opened {
                Ok(generation) if kept.is_empty() => self.take(&generation).map(|()| generation),
                opened => opened,
            };
            match whole {
                Ok(generation) => kept.push_front((*number, generation.manifest.log)),
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
        for (number, why) in damaged {
            let aside = self.directory.set_aside(number)?;
            let note = format!("snapshot {number} cannot be used: {why}; it is now {}", aside.display());
            self.report.notes.push(note);
            self.renew = true;
        }
        self.report.generation = kept.back().map(|(number, _)| *number);
        Ok(kept)
    }

    fn take(&mut self, generation: &Generation) -> Result<(), Unusable> {
        self.check_origin(generation.manifest.origin())?;
        let catalog = &generation.manifest.catalog;
        let loaded = generation.load(self.shard, |standing| {
            self.clients.extend(standing.clients.iter().map(|Remembered { client, .. }| *client));
        });
        if let Err(unusable) = loaded {
            let all: Vec<_> = catalog.slices().map(|(id, ..)| SliceId(id)).collect();
            self.shard.remove(&all);
            self.clients.clear();
            return Err(unusable);
        }
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
        let why = format!("{} belongs to another shard, or to a cluster of another size", path.display());
        let say = |shard, shards| format!("shard {shard} of {shards}");
        Err(Error::new(Kind::Config, why).expected(say(*shard, *shards), say(origin.shard, origin.shards)))
    }

    /// Repeats what the log says from a segment on.
    fn replay(&mut self, first: Option<u64>) -> Result<()> {
        let mut next = first;
        while let Some(number) = next.take() {
            match self.replay_segment(number) {
                Ok(End::Continued(following)) => next = Some(following),
                Ok(End::Open { whole, torn }) => {
                    self.last = Some((number, whole));
                    if torn > 0 {
                        let path = self.directory.segment(number);
                        self.report.notes.push(format!(
                            "{} ends in {torn} bytes that were never written in full: they are left out",
                            path.display()
                        ));
                    }
                    self.look_behind(number)?;
                }
                Err(Unusable::Failed(error)) => return Err(error),
                Err(Unusable::Damaged(why)) if self.settings.accept_loss => {
                    self.renew = true;
                    self.report
                        .notes
                        .push(format!("{why}: what comes behind it is lost, as --accept-loss allows"));
                }
                Err(Unusable::Damaged(why)) => {
                    return Err(lost(&why));
                }
            }
        }
        Ok(())
    }

    /// Nothing should follow the segment that is open. One that was just begun may.
    fn look_behind(&mut self, number: u64) -> Result<()> {
        for later in self.segments.range(number + 1..) {
            let path = self.directory.segment(*later);
            let why = match segment::beginning(&path)? {
                Some((_, false)) => continue,
                Some((true, true)) => {
                    "the log could not be written any more, and no snapshot was completed since"
                }
                _ if self.settings.accept_loss => "what lies between is missing, as --accept-loss allows",
                _ => {
                    let open = self.directory.segment(number);
                    let (open, path) = (open.display(), path.display());
                    return Err(lost(&format!("{open} has lost its end: {path} follows it")));
                }
            };
            (self.last, self.renew) = (None, true);
            self.report.notes.push(format!("{} is left out: {why}", path.display()));
        }
        Ok(())
    }

    fn replay_segment(&mut self, number: u64) -> Result<End, Unusable> {
        let path = self.directory.segment(number);
        if !self.segments.contains(&number) {
            return Err(Unusable::Damaged(format!("{} is missing", path.display())));
        }
        let known = self.origin;
        let (origin, end) = segment::read(&path, number, known, |at, content| {
            self.repeat(content).map_err(|error| match error.kind {
                Kind::Capacity => Unusable::Failed(error),
                _ => Unusable::Damaged(format!("{} does not fit at byte {at}: {error}", path.display())),
            })
        })?;
        self.check_origin(origin)?;
        self.origin = Some(origin);
        Ok(end)
    }

    fn repeat(&mut self, content: Content<'_>) -> Result<()> {
        match content {
            Content::Push(record) => self.repeat_push(&record)?,
            Content::Fence(slice, identity) => {
                self.clients.insert(identity.client);
                if !self.gone.contains(&slice.0) {
                    self.shard.slice(slice)?.replay_fence(identity)?;
                }
            }
            Content::Event(event) => self.repeat_event(&event)?,
            Content::Segment { .. } | Content::Durable(_) | Content::End(_) | Content::Slice(_) => {}
        }
        Ok(())
    }

    fn repeat_push(&mut self, record: &Record<'_>) -> Result<()> {
        self.clients.insert(record.identity.client);
        if self.gone.contains(&record.slice.0) {
            return Ok(());
        }
        let new = self.shard.slice(record.slice)?.replay(record)?;
        self.report.repeated += u64::from(new);
        Ok(())
    }

    fn repeat_event(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::SessionEnded(client) => self.shard.forget_client(*client),
            Event::Reserved(_, reservation) => {
                let spec = Arc::new(reservation.spec.clone());
                let slices: Vec<_> =
                    reservation.slices.iter().map(|(id, k)| (SliceId(*id), *k as usize)).collect();
                self.shard.create(&spec, reservation.group, &slices)?;
            }
            Event::Dropped(slices) => {
                let slices: Vec<_> = slices.iter().map(|id| SliceId(*id)).collect();
                self.shard.remove(&slices);
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
            self.shard.forget_client(*client);
        }
    }
}
