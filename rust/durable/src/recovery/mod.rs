//! A start: the newest whole generation, and the records behind it.

pub(crate) mod growth;
pub(crate) mod history;
mod load;
mod replay;
mod report;
mod settings;

pub use report::Report;
pub(crate) use report::{Found, Kept};
pub(crate) use settings::Progress;
pub use settings::Settings;

use crate::catalog::Catalog;
use crate::files::damage::Unusable;
use crate::files::directory::Directory;
use crate::frame::{Origin, random};
use crate::log::read::beginning;
use crate::recovery::growth::Growth;
use crate::recovery::history::{History, Used};
use crate::snapshot::generation::Generation;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_core::shard::Shard;
use std::collections::{BTreeMap, BTreeSet};

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
        if let Some(begun) = beginning(&directory.segment(number))? {
            return Ok(Some(begun.origin));
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
}
