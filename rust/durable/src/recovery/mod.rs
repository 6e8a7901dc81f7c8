//! Recovery: restores a shard from its newest intact snapshot and the log after it. Reads files and changes
//! none; the journal and the tools call it.

pub(crate) mod growth;
pub(crate) mod history;
mod load;
pub(crate) mod moment;
mod replay;
mod report;
mod settings;

pub use report::Report;
pub(crate) use report::{KeptSnapshots, Recovered};
pub(crate) use settings::Progress;
pub use settings::Settings;

use crate::catalog::Catalog;
use crate::files::damage::Unusable;
use crate::files::directory::Directory;
use crate::frame::{Origin, random_id};
use crate::log::read::beginning;
use crate::recovery::growth::Growth;
use crate::recovery::history::{History, UsedFiles};
use crate::recovery::moment::Stop;
use crate::snapshot::generation::Generation;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_core::shard::Shard;
use fastps_core::tensor::SliceId;
use std::collections::{BTreeMap, BTreeSet};

/// Restores an empty shard from the files in a directory. Changes no file.
pub(crate) fn recover(
    directory: &Directory,
    settings: &Settings,
    shard: &Shard,
    progress: &Progress,
) -> Result<Recovered> {
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
    recovery.forget_stale();
    let others = recovery.report_foreign_files()?;
    recovery.history = std::mem::take(&mut recovery.history).without(&others);
    recovery.find_origin()?;
    let Recovery { mut report, catalog, origin, last, renew, damaged, history, growth, .. } = recovery;
    report.slices = catalog.slices().count() as u64;
    let origin = match origin {
        Some(origin) => origin,
        None => Origin { id: random_id()?, shard: settings.shard, shards: settings.shards },
    };
    Ok(Recovered {
        report,
        catalog: catalog.identified(origin.shard, origin.id),
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

/// Restores an empty shard as it was at a moment, without its clients. The catalog still names the cluster, as far
/// as the shard knows it. Takes no lock and changes no file.
pub(crate) fn recover_at(
    directory: &Directory,
    settings: &Settings,
    shard: &Shard,
    (base, stop): (Option<u64>, &Stop),
) -> Result<Catalog> {
    let progress = Progress::default();
    let mut recovery = Recovery::new(directory, settings, Some(shard), &progress)?;
    let numbers = directory.generations()?.into_iter().filter(|number| Some(*number) <= base);
    let kept = recovery.load(&numbers.collect::<Vec<_>>())?;
    recovery.check_history()?;
    recovery.stop = Some(stop.clone());
    let log = kept.back().map(|(_, log)| *log).or_else(|| recovery.segments.first().copied());
    recovery.replay(log).map_err(Error::from)?;
    let cluster_id = match (settings.shard, recovery.catalog.cluster_id) {
        (0, 0) => origin(directory)?.map_or(0, |origin| origin.id),
        (_, known) => known,
    };
    recovery.catalog.leave_clients();
    recovery.catalog.cluster_id = cluster_id;
    recovery.forget_stale();
    for (id, ..) in recovery.catalog.slices() {
        let slice = shard.slice(SliceId(id))?;
        if let Some((space, _)) = slice.space() {
            slice.close_space(space.id);
        }
    }
    Ok(recovery.catalog)
}

/// Checks the log from a segment on without applying it. Returns what a start would report: segment numbers,
/// and what is wrong with each.
pub(crate) fn check_log(
    directory: &Directory,
    settings: &Settings,
    first: Option<u64>,
) -> Result<Vec<(u64, String)>> {
    let (mut wrong, mut next) = (Vec::new(), first);
    let progress = Progress::default();
    let mut recovery = Recovery::new(directory, settings, None, &progress)?;
    let listed = Generation::list(directory.path())?;
    recovery.note_durable_lengths(listed.iter().flatten().map(|generation| &generation.manifest));
    while let Some(number) = next.take() {
        if let Err(unusable) = recovery.replay(Some(number)) {
            wrong.push((recovery.reached, Error::from(unusable).message.clone()));
            next = recovery.segments.range(recovery.reached + 1..).next().copied();
        }
    }
    Ok(wrong)
}

/// State of a shard besides its slices, as far as the files can be read. Needs no shard, and takes no lock.
pub(crate) fn catalog(directory: &Directory, settings: &Settings) -> Result<Catalog> {
    let progress = Progress::default();
    let mut recovery = Recovery::new(directory, settings, None, &progress)?;
    let kept = recovery.load(&directory.generations()?)?;
    let log = kept.back().map(|(_, log)| *log).or_else(|| recovery.segments.first().copied());
    match recovery.replay(log) {
        Err(Unusable::Failed(error)) => return Err(error),
        Ok(()) | Err(Unusable::Damaged(_)) => {}
    }
    recovery.forget_stale();
    Ok(recovery.catalog)
}

/// The shard that a directory belongs to, if its files say so.
pub(crate) fn origin(directory: &Directory) -> Result<Option<Origin>> {
    for number in directory.generations()?.into_iter().rev() {
        match Generation::open_head(directory.path(), number) {
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

/// Describes two files of different histories, if there are any.
pub(crate) fn fork(history: &History, directory: &Directory) -> Option<String> {
    let (a, b) = history.fork()?;
    Some(format!(
        "{} has two histories: {} and {} were written by servers that did not take over from each other",
        directory.path().display(),
        history::display_path(directory, a),
        history::display_path(directory, b)
    ))
}

fn lost(why: &str) -> Error {
    let message = format!(
        "{why}. Durable changes cannot be read: restore the directory from a backup, or start without them with --accept-loss"
    );
    Error::new(Kind::Config, message)
}

struct Recovery<'a> {
    directory: &'a Directory,
    settings: &'a Settings,
    /// The shard to restore. `None`: the files are only checked.
    shard: Option<&'a Shard>,
    segments: BTreeSet<u64>,
    report: Report,
    catalog: Catalog,
    origin: Option<Origin>,
    /// All clients that changed a slice.
    clients: BTreeSet<u64>,
    /// Slices that were freed while the snapshot was written.
    gone: BTreeSet<u64>,
    damaged: Vec<(u64, String)>,
    renew: bool,
    /// The provenance of all files, and which are used.
    history: History,
    used: UsedFiles,
    /// For each segment, the number of bytes that were durable according to snapshots.
    known_durable: BTreeMap<u64, u64>,
    /// The segment being read; the position in it; a position after the last replayed frame and before the
    /// next; and the durable length according to its own frames.
    reached: u64,
    at: u64,
    rest: u64,
    durable: u64,
    progress: &'a Progress,
    last: Option<(u64, u64)>,
    growth: Growth,
    /// The moment to restore; `None`: the last one.
    stop: Option<Stop>,
    /// At the moment: slices that lack changes that belong to it.
    behind: Option<BTreeSet<SliceId>>,
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
            used: UsedFiles::default(),
            known_durable: BTreeMap::new(),
            reached: 0,
            at: 0,
            rest: 0,
            durable: 0,
            progress,
            last: None,
            growth: Growth::default(),
            stop: None,
            behind: None,
        })
    }
}
