//! Where a moment lies in the logs of all shards.

use crate::files::directory::Directory;
use crate::files::names::{shard_folder, shards_in};
use crate::frame::Origin;
use crate::log::STAMP_INTERVAL;
use crate::recovery;
use crate::recovery::moment::{self, EARLIEST, END, Found, Moment};
use crate::tools::copy::past::copied_until;
use crate::tools::history::past;
use crate::tools::source::{check_all_there, nothing};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::text::nearest;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// By how much the clocks of servers may be ahead of this machine's.
const CLOCKS_APART_MS: u64 = 60_000;

/// A shard, its directory, and where the moment is there.
pub(crate) type Located = (u32, Directory, Found);

/// The snapshot of each shard that a moment is reached from; `None`: it is reached from the beginning of the log.
pub fn bases(data_dir: &Path, moment: &Moment) -> Result<Vec<(u32, Option<u64>)>> {
    Ok(locate(data_dir, moment)?.into_iter().map(|(shard, _, found)| (shard, found.base)).collect())
}

/// The directories of all shards, and the shard that each says it is of. Fails if one is missing or of another shard.
pub(crate) fn shards_of(data_dir: &Path) -> Result<Vec<(u32, Directory, Option<Origin>)>> {
    let folders = shards_in(data_dir)?;
    let mut found = Vec::new();
    for shard in &folders {
        let directory = Directory::unlocked(&shard_folder(data_dir, *shard));
        let origin = recovery::origin(&directory)?;
        found.push((*shard, directory, origin));
    }
    let shards = found.iter().filter_map(|(.., origin)| Some(origin.as_ref()?.shards)).max();
    let shards = shards.ok_or_else(|| nothing(data_dir))?;
    check_all_there(data_dir, &folders, shards)?;
    found.truncate(shards as usize);
    for (shard, directory, origin) in &found {
        if let Some(origin) = origin.filter(|origin| origin.shard != *shard) {
            let why = format!("{} belongs to another shard", directory.path().display());
            let say = |shard| format!("shard {shard} of {shards}");
            return Err(Error::new(Kind::Config, why).expected(say(*shard), say(origin.shard)));
        }
    }
    Ok(found)
}

/// Finds a moment in the log of each shard. Where a shard does not know it, it is as of the same time.
pub(crate) fn locate(data_dir: &Path, moment: &Moment) -> Result<Vec<Located>> {
    check_is_past(data_dir, moment)?;
    let mut located = Vec::new();
    for (shard, directory, _) in shards_of(data_dir)? {
        let found = search(moment, shard, &directory).map_err(|error| with_span(error, data_dir, moment))?;
        located.push((shard, directory, found));
    }
    let newest = located.iter().map(|(_, _, found)| found.newest).max().unwrap_or(0);
    if let Moment::Version(version) = moment
        && *version > newest
    {
        return Err(later(data_dir).expected(format!("version {newest} or less"), version));
    }
    let without = located.iter().find(|(_, _, found)| found.stop.is_none()).map(|(shard, ..)| *shard);
    let missing = |why: String, expected: &str| {
        Err(Error::new(Kind::Config, format!("{why} in {}", data_dir.display()))
            .expected(expected, "one that it does not show"))
    };
    match (moment, without) {
        (Moment::Mark(_), Some(shard)) => {
            let why = format!("the mark is not in the log of shard {shard}");
            return missing(why, "a mark that `fastps history` shows");
        }
        (Moment::Cut(_), Some(shard)) => {
            let why = format!("shard {shard} no longer has the consistent snapshot");
            return missing(why, "a cut that `fastps checkpoint list` shows for all shards");
        }
        _ => {}
    }
    let times = located.iter().flat_map(|(_, _, found)| &found.stop).map(|stop| stop.time);
    let time = times.max().ok_or_else(|| unknown(data_dir, moment, newest))?;
    if time == 0 && matches!(moment, Moment::Time(_)) {
        let why = format!("the moment is before the first time noted in {}", data_dir.display());
        let expected = Known::read(data_dir).times();
        return Err(Error::new(Kind::Config, why).expected(expected, moment));
    }
    for (shard, directory, found) in &mut located {
        if found.stop.is_none() && time == 0 {
            let why = format!("shard {shard} does not know the moment, and the logs have no times");
            return Err(Error::new(Kind::Config, why)
                .expected("servers that ran with --keep-history", "logs without times"));
        }
        if found.stop.is_none() {
            *found = search(&Moment::Time(time), *shard, directory)?;
            found.by_time = true;
        }
    }
    located.iter().try_for_each(|one| check_copied(one, moment, &located))?;
    Ok(located)
}

fn search(moment: &Moment, shard: u32, directory: &Directory) -> Result<Found> {
    moment::find(directory, moment).map_err(|error| error.shard(shard))
}

/// Fails if the log of a copied shard ends before the moment: what follows in its server's log is not known.
fn check_copied((shard, directory, found): &Located, moment: &Moment, all: &[Located]) -> Result<()> {
    let Some(until) = copied_until(directory) else { return Ok(()) };
    if found.stop.as_ref().is_none_or(|stop| stop.at < END) {
        return Ok(());
    }
    let time = match moment {
        Moment::Version(version) if found.newest >= *version => return Ok(()),
        Moment::Version(version) => {
            let others = all.iter().filter(|(_, _, found)| found.newest >= *version);
            let times = others.flat_map(|(_, _, found)| &found.stop).map(|stop| stop.time);
            times.max().unwrap_or(0).saturating_sub(STAMP_INTERVAL.as_millis() as u64)
        }
        Moment::Time(time) => *time,
        _ => all.iter().flat_map(|(_, _, found)| &found.stop).map(|stop| stop.time).max().unwrap_or(0),
    };
    if time <= until {
        return Ok(());
    }
    let seconds = |ms: u64| format!("{}.{:03} s since 1970", ms / 1000, ms % 1000);
    let message = format!(
        "the copied log of shard {shard} ends before the moment, at version {}: the rest follows when its server's \
         next snapshot is copied",
        found.newest
    );
    Err(Error::new(Kind::Config, message)
        .shard(*shard)
        .expected(format!("a moment up to {}", seconds(until)), seconds(time)))
}

/// Error of a moment that no shard knows.
fn unknown(data_dir: &Path, moment: &Moment, newest: u64) -> Error {
    let why = |what: String| Error::new(Kind::Config, format!("{what} in {}", data_dir.display()));
    match moment {
        Moment::Tensor(name, version) => {
            let (known, is_known) = Known::read(data_dir).tensor(name);
            if is_known {
                why(format!("tensor {name:?} never had version {version}")).expected(known, version)
            } else {
                why(format!("no tensor is called {name:?}")).expected(known, format!("{name:?}"))
            }
        }
        Moment::Pushes(_) => why(format!("the worker has no {moment} in the history"))
            .expected("a worker and a push that `fastps history` shows", moment),
        Moment::Version(_) | Moment::Time(_) | Moment::Mark(_) | Moment::Cut(_) => {
            later(data_dir).expected(format!("version {newest} or less"), "none")
        }
    }
}

/// A time that has not come yet is a mistake: nobody knows what servers will have then.
fn check_is_past(data_dir: &Path, moment: &Moment) -> Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(u64::MAX, |now| now.as_millis() as u64);
    // A copied log says itself up to when it is.
    match moment {
        Moment::Time(time) if *time > now.saturating_add(CLOCKS_APART_MS) && !is_copied(data_dir) => {
            let why = format!("the moment has not come yet in {}", data_dir.display());
            Err(Error::new(Kind::Config, why).expected(Known::read(data_dir).times(), moment))
        }
        _ => Ok(()),
    }
}

fn is_copied(data_dir: &Path) -> bool {
    copied_until(&Directory::unlocked(&shard_folder(data_dir, 0))).is_some()
}

/// Says from when on there is history, if a moment is before it.
fn with_span(mut error: Error, data_dir: &Path, moment: &Moment) -> Error {
    let is_before = error.expected.as_ref().is_some_and(|expected| &**expected == EARLIEST);
    if is_before && matches!(moment, Moment::Time(_)) {
        error = error.expected(Known::read(data_dir).times(), moment);
    }
    error
}

/// What the whole log has, to tell a user who asked for something else. Empty if it cannot be read.
#[derive(Default)]
struct Known {
    times: Option<(u64, u64)>,
    tensors: BTreeMap<Arc<str>, (u64, u64)>,
}

impl Known {
    fn read(data_dir: &Path) -> Self {
        let mut tensors = BTreeMap::new();
        let found = past(data_dir, |change| {
            let versions =
                tensors.entry(change.spec.name.clone()).or_insert((change.version, change.version));
            *versions = (versions.0.min(change.version), versions.1.max(change.version));
        });
        let spans = found.map(|past| past.shards).unwrap_or_default();
        let times = spans.iter().filter_map(|span| span.times);
        let times = times.reduce(|(first, last), other| (first.min(other.0), last.max(other.1)));
        Self { times, tensors }
    }

    fn times(&self) -> String {
        self.times.map_or("servers that ran with --keep-history: the log has no times".to_owned(), |span| {
            format!("a time from {} to {}", Moment::Time(span.0), Moment::Time(span.1))
        })
    }

    /// What may be asked of a tensor, and whether it has any changes.
    fn tensor(&self, name: &str) -> (String, bool) {
        if let Some((first, last)) = self.tensors.get(name) {
            return (format!("version {first} to {last}"), true);
        }
        let near = nearest(name, self.tensors.keys().map(|known| &**known));
        let near = near.map_or(String::new(), |near| format!("; did you mean {near:?}?"));
        (format!("the name of a tensor that changed{near}"), false)
    }
}

fn later(data_dir: &Path) -> Error {
    Error::new(Kind::Config, format!("the moment is after the last change in {}", data_dir.display()))
}
