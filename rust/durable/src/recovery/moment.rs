//! A moment in the past of a shard: where it lies in the log, and which snapshot precedes it.

use crate::catalog::{Catalog, Event};
use crate::files::damage::Unusable;
use crate::files::directory::Directory;
use crate::frame::Content;
use crate::log::STAMP_INTERVAL;
use crate::log::read::{SegmentEnd, read};
use crate::snapshot::generation::Generation;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::{Apply, SliceId};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

/// A moment that a data directory can be rewound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Every slice of an `exact` tensor at this version, or at its last one if it never had so many changes.
    Version(u64),
    /// The slices of one tensor at this version, and others as of when the last of them reached it.
    Tensor(Arc<str>, u64),
    /// Milliseconds since 1970.
    Time(u64),
    /// On each shard right after the last of these pushes that it has, by client and number. A worker is another
    /// client of each shard.
    Pushes(BTreeSet<(u64, u64)>),
    /// A mark, by the number that it has on every shard.
    Mark(u64),
    /// A consistent snapshot, by the number of its cut.
    Cut(u64),
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(f, "version {version}"),
            Self::Tensor(name, version) => write!(f, "version {version} of {name:?}"),
            Self::Time(ms) => write!(f, "{}.{:03} s since 1970", ms / 1000, ms % 1000),
            Self::Pushes(pushes) => {
                let numbers: BTreeSet<_> = pushes.iter().map(|(_, number)| number.to_string()).collect();
                write!(f, "push {}", numbers.into_iter().collect::<Vec<_>>().join(", "))
            }
            Self::Mark(_) => write!(f, "a mark"),
            Self::Cut(_) => write!(f, "a consistent snapshot"),
        }
    }
}

/// What is expected of a moment that is before the history, where nothing more is known.
pub(crate) const EARLIEST: &str = "a moment that `fastps history` shows";

/// A segment, and a position in it.
pub(crate) type Place = (u64, u64);

/// Behind everything that was logged.
pub(crate) const END: Place = (u64::MAX, u64::MAX);

/// A moment in one shard's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stop {
    /// The first frame after the moment.
    pub(crate) at: Place,
    /// When it was at the latest, in milliseconds since 1970; 0: the log has no times.
    pub(crate) time: u64,
    /// The version of each slice at the moment, where the moment says it.
    caps: Caps,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Caps {
    All(u64),
    Of(BTreeMap<u64, u64>),
}

impl Stop {
    /// The version of a slice of an `exact` tensor at the moment. `None`: that before `at`.
    pub(crate) fn cap(&self, slice: SliceId) -> Option<u64> {
        match &self.caps {
            Caps::All(version) => Some(*version),
            Caps::Of(slices) => slices.get(&slice.0).copied(),
        }
    }
}

/// What a search of one shard's files has found.
pub(crate) struct Found {
    /// Where the moment is; `None`: this shard does not know it.
    pub(crate) stop: Option<Stop>,
    /// The snapshot to start from; `None`: the log begins with the shard.
    pub(crate) base: Option<u64>,
    /// The newest version of a slice of an `exact` tensor that was met.
    pub(crate) newest: u64,
    /// Set if the shard does not know the moment, and is as of the same time.
    pub(crate) by_time: bool,
}

impl Found {
    fn nowhere(newest: u64) -> Self {
        Self { stop: None, base: None, newest, by_time: false }
    }
}

/// Searches a shard's files, beginning with the newest snapshot that may precede the moment. Reads the log
/// only from there on.
pub(crate) fn find(directory: &Directory, moment: &Moment) -> Result<Found> {
    if let Moment::Cut(id) = moment {
        return find_cut(directory, *id);
    }
    let mut candidates = Vec::new();
    for number in directory.generations()?.into_iter().rev() {
        match Generation::open(directory.path(), number) {
            Ok(generation) => candidates.push(Some(generation)),
            Err(Unusable::Damaged(_)) => {}
            Err(Unusable::Failed(error)) => return Err(error),
        }
    }
    let logs = candidates.iter().flatten().map(|generation| generation.manifest.log);
    let segments = directory.segments()?;
    if begins_empty(&segments, logs) {
        candidates.push(None);
    }
    check_beginning(directory, &segments, candidates.is_empty())?;
    let (mut stop, mut newest, mut oldest, mut read_from) = (None, 0, 0, u64::MAX);
    let mut bases = 0;
    for candidate in &candidates {
        let mut search = Search::new(moment, candidate.as_ref())?;
        (newest, oldest) = (newest.max(search.newest), search.newest);
        if !search.may_begin {
            continue;
        }
        bases += 1;
        let first = candidate.as_ref().map_or(1, |generation| generation.manifest.log);
        if stop.is_none() {
            search.read(directory, first, read_from).map_err(Error::from)?;
            (newest, read_from) = (newest.max(search.newest), first);
            stop = search.stop();
        }
        let Some(stop) = &stop else { continue };
        let precedes = match candidate {
            None => true,
            Some(_) if matches!(moment, Moment::Version(_)) => true,
            Some(generation) => generation.manifest.durable.is_some_and(|durable| durable <= stop.at),
        };
        if precedes {
            let base = candidate.as_ref().map(|generation| generation.manifest.generation);
            return Ok(Found { stop: Some(stop.clone()), base, newest, by_time: false });
        }
    }
    if bases == 0 || stop.is_some() {
        let base = candidates.last().and_then(Option::as_ref).map_or(String::new(), |generation| {
            format!("; the oldest snapshot is {}", generation.manifest.generation)
        });
        let why = format!("the moment is before the history in {}{base}", directory.path().display());
        let expected = match moment {
            Moment::Version(_) => format!("version {oldest} or a later one"),
            _ => EARLIEST.to_owned(),
        };
        return Err(Error::new(Kind::Config, why).expected(expected, moment));
    }
    Ok(Found::nowhere(newest))
}

/// The snapshot of a cut is its state.
fn find_cut(directory: &Directory, id: u64) -> Result<Found> {
    for number in directory.generations()? {
        let generation = match Generation::open(directory.path(), number) {
            Ok(generation) => generation,
            Err(Unusable::Damaged(_)) => continue,
            Err(Unusable::Failed(error)) => return Err(error),
        };
        if generation.manifest.cut.as_ref().is_some_and(|cut| cut.id == id) {
            let time = generation.manifest.written.saturating_mul(1000);
            let stop = Stop { at: (generation.manifest.log, 0), time, caps: Caps::Of(BTreeMap::new()) };
            return Ok(Found { stop: Some(stop), base: Some(number), newest: 0, by_time: false });
        }
    }
    Ok(Found::nowhere(0))
}

/// The segment from which the log is needed for a moment, or for all (`None`), if all later ones are there; `begins`:
/// the log begins with an empty shard. `None`: the moment is before all that is kept.
pub(crate) fn first_segment(
    directory: &Directory,
    moment: Option<&Moment>,
    begins: bool,
) -> Result<Option<u64>> {
    let mut first = None;
    // A snapshot that was being written at a time may have changes after it: the one before it has none.
    let mut more = match moment {
        Some(Moment::Version(_)) => 1,
        Some(Moment::Time(_)) => 2,
        _ => usize::MAX,
    };
    for number in directory.generations()?.into_iter().rev() {
        let generation = Generation::open(directory.path(), number).map_err(Error::from)?;
        let may_begin = match moment {
            Some(moment @ (Moment::Version(_) | Moment::Time(_))) => {
                Search::new(moment, Some(&generation))?.may_begin
            }
            _ => true,
        };
        if may_begin {
            first = Some(generation.manifest.log);
            more -= 1;
        }
        if more == 0 {
            return Ok(first);
        }
    }
    Ok(if begins { Some(1) } else { first })
}

/// Fails if there is a log that nothing begins: neither an empty shard (`no_base`) nor a snapshot.
pub(crate) fn check_beginning(directory: &Directory, segments: &[u64], no_base: bool) -> Result<()> {
    let Some(first) = segments.first().filter(|_| no_base) else { return Ok(()) };
    let (missing, first) = (directory.segment(first.saturating_sub(1)), directory.segment(*first));
    let (missing, first) = (missing.display(), first.display());
    let why = format!("{missing} is missing: {first} follows it, and no intact snapshot precedes that");
    Err(Unusable::Damaged(why).into())
}

/// Returns whether the log begins with an empty shard: none of the snapshots, which need the log from these
/// segments on, came before it, as in a restored directory.
pub(crate) fn begins_empty(segments: &[u64], mut logs: impl Iterator<Item = u64>) -> bool {
    segments.first() == Some(&1) && logs.all(|log| log > 1)
}

/// A pass over a shard's log that looks for a moment.
struct Search<'a> {
    moment: &'a Moment,
    /// False: the snapshot to begin with has changes after the moment.
    may_begin: bool,
    /// The slices of the tensor that the moment names.
    slices: BTreeSet<u64>,
    /// Versions that the push made, by slice.
    made: BTreeMap<u64, u64>,
    at: Option<Place>,
    /// The last time noted, and that at `at`.
    time: u64,
    found_time: u64,
    /// When the snapshot to begin with was written; 0: unknown, or followed by frames without a time.
    base_time: u64,
    newest: u64,
    /// Those of `slices` that have not reached the version yet; `None`: the tensor is not known.
    awaited: Option<BTreeSet<u64>>,
}

impl<'a> Search<'a> {
    fn new(moment: &'a Moment, base: Option<&Generation>) -> Result<Self> {
        let mut search = Self {
            moment,
            may_begin: true,
            slices: BTreeSet::new(),
            made: BTreeMap::new(),
            at: None,
            time: 0,
            found_time: 0,
            base_time: 0,
            newest: 0,
            awaited: None,
        };
        if let Some(generation) = base {
            search.begin(generation)?;
        }
        Ok(search)
    }

    fn begin(&mut self, base: &Generation) -> Result<()> {
        let catalog = &base.manifest.catalog;
        let exact = exact_slices(catalog);
        if let Moment::Tensor(name, _) = self.moment {
            let named = catalog.slices().filter(|(_, _, held)| held.spec.name == *name);
            self.slices = named.map(|(id, ..)| id).collect();
        }
        if let Moment::Time(time) = self.moment {
            // The manifest has whole seconds.
            self.base_time = base.manifest.written.saturating_add(1).saturating_mul(1000);
            self.may_begin = self.base_time <= *time;
            return Ok(());
        }
        let (mut latest, mut awaited) = (0, BTreeSet::new());
        base.each_standing(|slice, standing| {
            if !exact.contains(&slice) {
                return;
            }
            latest = latest.max(standing.version);
            self.may_begin &= match self.moment {
                Moment::Version(version) => standing.version <= *version,
                Moment::Tensor(_, version) if self.slices.contains(&slice) => {
                    if standing.version < *version {
                        awaited.insert(slice);
                    }
                    standing.version <= *version
                }
                Moment::Pushes(pushes) => !standing.clients.iter().any(|known| {
                    let of_client = pushes.range((known.client, 0)..=(known.client, u64::MAX));
                    of_client
                        .last()
                        .is_some_and(|(_, number)| known.outcomes.iter().any(|(later, _)| later >= number))
                }),
                Moment::Tensor(..) | Moment::Time(_) | Moment::Mark(_) | Moment::Cut(_) => true,
            };
        })
        .map_err(Error::from)?;
        self.newest = latest;
        if !self.slices.is_empty() {
            // A tensor that is there already may have been there for long.
            self.may_begin &= !awaited.is_empty();
            self.awaited = Some(awaited);
        }
        Ok(())
    }

    /// Reads the segments from `first` on, up to `end`.
    fn read(&mut self, directory: &Directory, first: u64, end: u64) -> Result<(), Unusable> {
        let mut next = Some(first);
        while let Some(number) = next.take().filter(|number| *number < end) {
            let path = directory.segment(number);
            let (_, ended) = read(&path, number, None, |at, content| Ok(self.take((number, at), &content)))?;
            if let SegmentEnd::Continued(following) = ended {
                next = Some(following);
            }
        }
        Ok(())
    }

    fn take(&mut self, at: Place, content: &Content<'_>) -> ControlFlow<()> {
        if self.awaited.as_ref().is_some_and(BTreeSet::is_empty) {
            return self.stop_at(at);
        }
        if self.time == 0 && !matches!(content, Content::Time(_) | Content::Durable(_)) {
            self.base_time = 0;
        }
        match content {
            Content::Time(time) => {
                if matches!(self.moment, Moment::Time(wanted) if time > wanted) {
                    return self.stop_at(at);
                }
                self.time = self.time.max(*time);
            }
            Content::Mark(mark) if matches!(self.moment, Moment::Mark(wanted) if mark.id == *wanted) => {
                return self.stop_at(at);
            }
            Content::Event(Event::Reserved(_, reservation)) => {
                if let Moment::Tensor(name, version) = self.moment
                    && *name == reservation.spec.name
                {
                    self.slices = reservation.slices.iter().map(|(id, _)| *id).collect();
                    self.awaited = Some(if *version > 0 { self.slices.clone() } else { BTreeSet::new() });
                }
            }
            Content::Push(record) if record.apply == Apply::Exact => {
                let mut push = [record.identity].into_iter().chain(record.shared_by.iter());
                if let Moment::Pushes(pushes) = self.moment
                    && push.any(|by| pushes.contains(&(by.client, by.sequence)))
                {
                    self.made.insert(record.slice.0, record.version);
                    // The push may have changed further slices.
                    self.at = None;
                } else if !self.made.is_empty() && self.at.is_none() {
                    (self.at, self.found_time) = (Some(at), self.time);
                }
                return self.change(at, record.slice.0, record.version);
            }
            Content::Program(ran) => return self.change(at, ran.slice.0, ran.version),
            _ => {}
        }
        ControlFlow::Continue(())
    }

    fn change(&mut self, at: Place, slice: u64, version: u64) -> ControlFlow<()> {
        self.newest = self.newest.max(version);
        match self.moment {
            Moment::Version(last) if version > *last => self.stop_at(at),
            Moment::Tensor(_, last) if version == *last => {
                if let Some(awaited) = &mut self.awaited {
                    awaited.remove(&slice);
                }
                ControlFlow::Continue(())
            }
            _ => ControlFlow::Continue(()),
        }
    }

    fn stop_at(&mut self, at: Place) -> ControlFlow<()> {
        (self.at, self.found_time) = (Some(at), self.time);
        ControlFlow::Break(())
    }

    fn stop(&self) -> Option<Stop> {
        let (at, noted) = self.at.map_or((END, self.time), |at| (at, self.found_time));
        let noted = if noted > 0 { noted } else { self.base_time };
        let time = if noted > 0 { noted.saturating_add(STAMP_INTERVAL.as_millis() as u64) } else { 0 };
        let caps = match self.moment {
            Moment::Version(version) => Caps::All(*version),
            Moment::Mark(_) if self.at.is_none() => return None,
            Moment::Time(_) | Moment::Mark(_) | Moment::Cut(_) => Caps::Of(BTreeMap::new()),
            Moment::Tensor(_, version) => {
                self.awaited.as_ref().filter(|awaited| awaited.is_empty())?;
                Caps::Of(self.slices.iter().map(|slice| (*slice, *version)).collect())
            }
            Moment::Pushes(_) if self.made.is_empty() => return None,
            Moment::Pushes(_) => Caps::Of(self.made.clone()),
        };
        Some(Stop { at, time, caps })
    }
}

/// The slices of `exact` tensors.
pub(crate) fn exact_slices(catalog: &Catalog) -> BTreeSet<u64> {
    let exact = catalog.slices().filter(|(_, _, held)| held.spec.apply == Apply::Exact);
    exact.map(|(id, ..)| id).collect()
}
