//! `fastps history` and `fastps rewind`: the past of a data directory, or of what is copied of it to a bucket.

use crate::command::{self, in_json, note, say};
use crate::past_place::PastPlace;
use clap::{ArgGroup, Parser};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::Identity;
use fastps_core::isa::Isa;
use fastps_core::store;
use fastps_core::text::nearest;
use fastps_durable::checkpoint::{self, Snapshot};
use fastps_durable::{
    Change, ChangeKind, Moment, Past, PastMark, Reading, Restored, ShardSpan, restore, store_of,
};
use fastps_server::backup::{Bucket, fetch_past};
use fastps_server::human::size;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use time::format_description::well_known::Rfc3339;
use time::{OffsetDateTime, Time};

/// Show what the data directory DIR can be rewound to: versions, times, and the pushes of each worker. It reads
/// the whole log that is kept; servers may be running. DIR may be the URL of a bucket with copies of the history.
#[derive(Debug, Parser)]
#[command(name = "fastps history")]
pub(crate) struct HistoryArgs {
    /// The --data-dir of the servers, or their --copy-to if they have --copy-history.
    dir: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Also draw the norm and the staleness of each push by worker over the span (PNG); the fastps of the Python
    /// package does, and needs matplotlib.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Write a new data directory with the parameters and optimizer state of an earlier moment, bit for bit. The old
/// one is not changed, and servers may be running. The new one is another cluster: it knows no clients. DIR may be
/// the URL of a bucket with copies of the history.
#[derive(Debug, Parser)]
#[command(name = "fastps rewind", group(ArgGroup::new("moment").required(true).args(["to", "to_time", "to_push", "to_mark", "to_snapshot"])))]
pub(crate) struct RewindArgs {
    /// The --data-dir of the servers, or their --copy-to if they have --copy-history.
    dir: PathBuf,
    /// A version, of all tensors or of one; others are as of when that one reached it.
    #[arg(long, value_name = "[TENSOR=]VERSION", value_parser = version)]
    to: Option<Moment>,
    /// A time, such as 2026-01-31T14:03:00Z, or in seconds since 1970; 14:03 is the last one of the history, in UTC.
    #[arg(long, value_name = "TIME", value_parser = when)]
    to_time: Option<When>,
    /// Right after a push: the name of a worker, or its number, and the number of its push.
    #[arg(long, value_name = "WORKER:PUSH")]
    to_push: Option<String>,
    /// A mark, by its name; the newest of that name.
    #[arg(long, value_name = "NAME")]
    to_mark: Option<String>,
    /// A consistent snapshot (fastps checkpoint save --consistent), by its number on shard 0.
    #[arg(long, value_name = "NUMBER")]
    to_snapshot: Option<u64>,
    /// The data directory to write; it must not exist or must be empty.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number of shards of the new directory [default: as many as the old one has].
    #[arg(long, value_name = "COUNT")]
    shards: Option<u32>,
}

fn version(text: &str) -> Result<Moment, String> {
    let (tensor, version) = match text.rsplit_once('=') {
        Some((tensor, version)) => (Some(tensor), version),
        None => (None, text),
    };
    let version = version.replace(['_', ','], "");
    let version =
        version.parse().map_err(|_| format!("{text:?} is not a version, such as 4711 or w=4711"))?;
    Ok(tensor.map_or(Moment::Version(version), |tensor| Moment::Tensor(tensor.into(), version)))
}

/// A time as people write it, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// Since 1970.
    Time(u64),
    /// Since midnight in UTC, on the last day on which the history has that time.
    OfDay(u64),
}

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

impl When {
    /// `last`: the last time of the history, in milliseconds since 1970.
    fn time(self, last: u64) -> u64 {
        match self {
            Self::Time(time) => time,
            Self::OfDay(time) => {
                let today = last - last % DAY_MS + time;
                if today <= last { today } else { today.saturating_sub(DAY_MS) }
            }
        }
    }

    fn moment(self, place: &PastPlace) -> Result<Moment> {
        let last = match self {
            Self::Time(_) => 0,
            Self::OfDay(_) => {
                let shards = place.past(|_| ())?.shards;
                let last = shards.iter().filter_map(|span| Some(span.times?.1)).max();
                last.ok_or_else(|| {
                    Error::new(Kind::Config, format!("the log in {} has no times", place.shown()))
                        .expected("servers that ran with --keep-history", "a time of the day")
                })?
            }
        };
        Ok(Moment::Time(self.time(last)))
    }
}

fn when(text: &str) -> Result<When, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=1e12).contains(seconds));
    let date = || {
        let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
        u64::try_from(time.unix_timestamp_nanos() / 1_000_000).ok()
    };
    let since_1970 = seconds.map(|seconds| (seconds * 1000.0) as u64).or_else(date);
    since_1970.map(When::Time).or_else(|| of_day(text).map(When::OfDay)).ok_or_else(|| {
        format!("{text:?} is not a time: write 2026-01-31T14:03:00Z, 14:03, or seconds since 1970")
    })
}

/// Reads 14:03 or 14:03:20.
fn of_day(text: &str) -> Option<u64> {
    let numbers: Vec<u8> = text.split(':').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    let (hour, minute, second) = match numbers[..] {
        [hour, minute] => (hour, minute, 0),
        [hour, minute, second] => (hour, minute, second),
        _ => return None,
    };
    let (hour, minute, second) = Time::from_hms(hour, minute, second).ok()?.as_hms();
    Some(1000 * (u64::from(second) + 60 * (u64::from(minute) + 60 * u64::from(hour))))
}

/// Runs `fastps history` and returns the exit status.
pub(crate) fn history(args: impl IntoIterator<Item = OsString>) -> i32 {
    command::show(args, |args: HistoryArgs| {
        if args.plot.is_some() {
            let error = Error::new(Kind::Config, "this program draws no pictures");
            return Err(error.expected("the command fastps of the Python package", "--plot"));
        }
        let mut workers: BTreeMap<u64, Pushes> = BTreeMap::new();
        let past = PastPlace::open(&args.dir)?.past(|change| {
            if change.kind == ChangeKind::Gradient {
                for Identity { client, sequence } in change.makers() {
                    workers.entry(client).or_default().add(change, sequence);
                }
            }
        })?;
        if args.json {
            return Ok((vec![in_json(&as_json(&past, &workers))?], true));
        }
        let shards = past.shards.iter().map(shard);
        let named = |(client, pushes): (&u64, &Pushes)| {
            let Pushes { first, last, versions, note } = pushes;
            let name = past.names.get(client).map_or(String::new(), |name| format!(" {name:?}"));
            let versions = format!("versions {} to {}", versions.0, versions.1);
            let note = if note.is_empty() { String::new() } else { format!(", the last one {note:?}") };
            format!("worker {client:016x}{name}: pushes {first} to {last}{note}, {versions}")
        };
        let marks = past.marks.iter().map(mark);
        Ok((shards.chain(marks).chain(workers.iter().map(named)).collect(), true))
    })
}

/// The pushes of one client.
#[derive(Debug, Default)]
struct Pushes {
    first: u64,
    last: u64,
    versions: (u64, u64),
    /// Of the last push.
    note: String,
}

impl Pushes {
    fn add(&mut self, change: &Change<'_>, sequence: u64) {
        let Change { version, note, .. } = *change;
        if self.last == 0 {
            (self.first, self.versions.0) = (sequence, version);
        }
        self.first = self.first.min(sequence);
        if sequence >= self.last {
            note.clone_into(&mut self.note);
        }
        self.last = self.last.max(sequence);
        self.versions = (self.versions.0.min(version), self.versions.1.max(version));
    }
}

fn shard(span: &ShardSpan) -> String {
    let ShardSpan { shard, versions, times, snapshots, bytes, .. } = span;
    let times = times.map_or(String::new(), |(first, last)| format!(", {} to {}", show(first), show(last)));
    let (first, last) = versions;
    let kept = format!("{snapshots} snapshots of {}, {} of log", size(bytes.0), size(bytes.1));
    format!("shard {shard}: versions {first} to {last}{times}; {kept}")
}

fn mark(PastMark { id: _, name, time, version }: &PastMark) -> String {
    let time = if *time > 0 { format!(", {}", show(*time)) } else { String::new() };
    format!("mark {name:?}: version {version}{time}")
}

fn show(milliseconds: u64) -> String {
    let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(milliseconds) * 1_000_000).ok();
    time.and_then(|time| time.format(&Rfc3339).ok()).unwrap_or_else(|| milliseconds.to_string())
}

fn as_json(past: &Past, workers: &BTreeMap<u64, Pushes>) -> serde_json::Value {
    let shards = past.shards.iter().map(|span| {
        let ShardSpan { shard, path, versions, times, snapshots, bytes } = span;
        serde_json::json!({
            "shard": shard, "path": path, "versions": versions, "times_ms": times, "snapshots": snapshots,
            "snapshot_bytes": bytes.0, "log_bytes": bytes.1,
        })
    });
    let marks = past.marks.iter().map(|PastMark { id: _, name, time, version }| {
        serde_json::json!({ "name": name, "version": version, "time_ms": time })
    });
    let workers = workers.iter().map(|(client, Pushes { first, last, versions, note })| {
        serde_json::json!({
            "client": format!("{client:016x}"), "name": past.names.get(client), "pushes": [first, last],
            "versions": versions, "last_note": note,
        })
    });
    serde_json::json!({
        "shards": shards.collect::<Vec<_>>(), "marks": marks.collect::<Vec<_>>(),
        "workers": workers.collect::<Vec<_>>(),
    })
}

/// The past of a data directory for programs.
#[derive(Debug, Default)]
pub struct Recorded {
    /// For each shard its index, first and last version, and first and last time (milliseconds since 1970; 0:
    /// unknown).
    pub shards: Vec<(u32, u64, u64, u64, u64)>,
    /// Names of tensors, which rows count from 0.
    pub tensors: Vec<String>,
    /// Names of clients.
    pub clients: BTreeMap<u64, String>,
    /// For each mark its name, the newest version then, and its time (milliseconds since 1970; 0: unknown).
    pub marks: Vec<(String, u64, u64)>,
    /// The notes of pushes, which rows count from 0; the first is empty.
    pub notes: Vec<String>,
    /// A row of 88 bytes for each change, and each client that has a part in it, little-endian: shard, tensor, slice
    /// (u32), flags (u32; 1: a gradient, 2: all elements are finite, 4: optimizer state, 8: a program), version,
    /// client, sequence, time, note, number of such clients (u64), staleness (i64; -1: unknown), learning rate and
    /// Euclidean norm (f64; NaN: not asked for).
    pub rows: Vec<u8>,
}

/// Reads the whole log that a data directory keeps. `norms` also decodes every change.
pub fn recorded(dir: &Path, norms: bool) -> Result<Recorded> {
    let isa = Isa::get()?;
    let (mut recorded, mut numbers) = (Recorded::default(), BTreeMap::new());
    recorded.notes.push(String::new());
    let mut notes = HashMap::from([(String::new(), 0)]);
    let past = PastPlace::open(dir)?.past(|change| {
        let note = notes.get(change.note).copied().unwrap_or_else(|| {
            let number = recorded.notes.len() as u64;
            recorded.notes.push(change.note.to_owned());
            notes.insert(change.note.to_owned(), number);
            number
        });
        let tensors = &mut recorded.tensors;
        let tensor = *numbers.entry(change.spec.name.clone()).or_insert_with(|| {
            tensors.push(change.spec.name.to_string());
            tensors.len() as u32 - 1
        });
        let (norm, finite) = if norms { change.norm(isa) } else { (f64::NAN, true) };
        let kind = match change.kind {
            ChangeKind::Gradient => 1,
            ChangeKind::Values => 0,
            ChangeKind::State => 4,
            ChangeKind::Program => 8,
        };
        let (flags, together) = (kind | u32::from(finite) << 1, change.makers().count() as u64);
        let rows = &mut recorded.rows;
        for Identity { client, sequence } in change.makers() {
            for number in [change.shard, tensor, change.slice as u32, flags] {
                rows.extend_from_slice(&number.to_le_bytes());
            }
            for number in [change.version, client, sequence, change.time, note, together] {
                rows.extend_from_slice(&number.to_le_bytes());
            }
            rows.extend_from_slice(&change.staleness.map_or(-1, |staleness| staleness as i64).to_le_bytes());
            rows.extend_from_slice(&change.lr.to_le_bytes());
            rows.extend_from_slice(&norm.to_le_bytes());
        }
    })?;
    recorded.clients = past.names.into_iter().map(|(client, name)| (client, name.to_string())).collect();
    let mark = |mark: PastMark| (mark.name.to_string(), mark.version, mark.time);
    recorded.marks = past.marks.into_iter().map(mark).collect();
    recorded.shards = past.shards.iter().map(row).collect();
    Ok(recorded)
}

fn row(span: &ShardSpan) -> (u32, u64, u64, u64, u64) {
    let (first, last) = span.times.unwrap_or_default();
    (span.shard, span.versions.0, span.versions.1, first, last)
}

/// Where [`rewind_to`] goes.
#[derive(Clone, Debug)]
pub enum Target {
    /// A version of every `exact` tensor.
    Version(u64),
    /// The newest mark of this name.
    Mark(String),
    /// Right after a push, `WORKER:PUSH`.
    Push(String),
    /// On each shard right after the last of these that it has, by client and number.
    Pushes(BTreeSet<(u64, u64)>),
}

impl Target {
    fn moment(self, place: &PastPlace) -> Result<Moment> {
        match self {
            Self::Version(version) => Ok(Moment::Version(version)),
            Self::Mark(name) => marked(place, &name),
            Self::Push(text) => push(place, &text).map(Moment::Pushes),
            Self::Pushes(pushes) => Ok(Moment::Pushes(pushes)),
        }
    }
}

/// Writes a directory with every `exact` tensor as it was; `shards`: `None` for as many as the old one has.
/// Returns what people should know, one sentence each.
pub fn rewind_to(dir: &Path, out: &Path, to: Target, shards: Option<u32>) -> Result<Vec<String>> {
    let place = PastPlace::open(dir)?;
    let moment = to.moment(&place)?;
    place.at(&moment, |dir| Ok(restored(dir, out, moment.clone(), shards)?.0.notes))
}

/// `shards`: `None` for as many as the old directory has.
fn restored(dir: &Path, out: &Path, moment: Moment, shards: Option<u32>) -> Result<(Restored, u32)> {
    let shards = match shards {
        Some(shards) => shards,
        None => checkpoint::list(dir)?.len() as u32,
    };
    Ok((restore(dir, out, shards, Reading::At(moment))?, shards))
}

/// The tensors of a directory as they were, in memory, and what people should know, one sentence each.
pub fn moment_of(dir: &Path, to: Target) -> Result<(store::Past, Vec<String>)> {
    let place = PastPlace::open(dir)?;
    let moment = to.moment(&place)?;
    place.at(&moment, |dir| store_of(dir, Reading::At(moment.clone())))
}

/// Fetches the log of the history that is copied to a bucket into a folder, which [`recorded`] and [`rewind_to`] read
/// as a data directory; or, with the log there, the values that a moment is made from.
pub fn fetch_history(url: &str, folder: &Path, to: Option<Target>) -> Result<()> {
    let moment = to.map(|to| to.moment(&PastPlace::open(folder)?)).transpose()?;
    fetch_past(&Bucket::open(url)?, folder, moment.as_ref())
}

/// Runs `fastps rewind` and returns the exit status.
pub(crate) fn rewind(args: impl IntoIterator<Item = OsString>) -> i32 {
    command::run(args, |args: RewindArgs| {
        let RewindArgs { dir, to, to_time, to_push, to_mark, to_snapshot, out, shards } = args;
        let place = PastPlace::open(&dir)?;
        let moment = match (to, to_time, to_mark, to_snapshot) {
            (Some(moment), ..) => moment,
            (None, Some(time), ..) => time.moment(&place)?,
            (None, None, Some(name), _) => marked(&place, &name)?,
            (None, None, None, Some(number)) => snapshot(&place, number)?,
            (None, None, None, None) => Moment::Pushes(push(&place, &to_push.unwrap_or_default())?),
        };
        let (done, shards) = place.at(&moment, |dir| restored(dir, &out, moment.clone(), shards))?;
        done.notes.iter().for_each(note);
        let (tensors, bytes, out) = (done.tensors, size(done.bytes), out.display());
        say(&[format!("{out}: {tensors} tensors, {bytes}, for {shards} shards")])?;
        Ok(true)
    })
}

/// The newest mark of a name.
fn marked(place: &PastPlace, name: &str) -> Result<Moment> {
    let marks = place.past(|_| ())?.marks;
    let newest = marks.iter().rfind(|mark| *mark.name == *name);
    newest.map(|mark| Moment::Mark(mark.id)).ok_or_else(|| {
        let near = nearest(name, marks.iter().map(|mark| &*mark.name));
        let near = near.map_or(String::new(), |near| format!("; did you mean {near:?}?"));
        Error::new(Kind::Config, format!("{} has no such mark", place.shown()))
            .expected("a mark that `fastps history` shows", format!("{name:?}{near}"))
    })
}

/// The cut of a consistent snapshot, by its number on shard 0.
fn snapshot(place: &PastPlace, number: u64) -> Result<Moment> {
    let shards = place.snapshots()?;
    let first = shards.first().map_or(&[][..], |first| &first.snapshots);
    let cut_of = |snapshot: &Snapshot| snapshot.cut.as_ref().map(|cut| cut.id);
    let found = first.iter().find(|snapshot| snapshot.number == number).and_then(cut_of);
    found.map(Moment::Cut).ok_or_else(|| {
        let cuts: Vec<_> = first.iter().filter(|one| one.cut.is_some()).map(|one| one.number).collect();
        let known = if cuts.is_empty() {
            "one that `fastps checkpoint save --consistent` has taken, and there is none".to_owned()
        } else {
            format!("one of {cuts:?}")
        };
        Error::new(Kind::Config, format!("{} has no such consistent snapshot", place.shown()))
            .expected(known, number)
    })
}

/// A push by a worker's name or number, by client and number: a worker is another client of each shard.
fn push(place: &PastPlace, text: &str) -> Result<BTreeSet<(u64, u64)>> {
    let wrong = |got: String| {
        Error::new(Kind::Config, "no such push").expected("WORKER:PUSH, as `fastps history` shows", got)
    };
    let (worker, number) = text.rsplit_once(':').ok_or_else(|| wrong(format!("{text:?}")))?;
    let sequence = number.replace(['_', ','], "").parse().map_err(|_| wrong(format!("{text:?}")))?;
    let (mut with_it, mut pushes) = (BTreeSet::new(), BTreeMap::<u64, (u64, u64)>::new());
    let past = place.past(|change| {
        if change.kind == ChangeKind::Program {
            return;
        }
        for by in change.makers() {
            if by.sequence == sequence {
                with_it.insert((change.shard, by.client));
            }
            let span = pushes.entry(by.client).or_insert((by.sequence, by.sequence));
            *span = (span.0.min(by.sequence), span.1.max(by.sequence));
        }
    })?;
    // A worker is another client of each shard, under one name.
    let called = past.names.iter().filter(|(_, name)| ***name == *worker).map(|(client, _)| *client);
    let mut clients: BTreeSet<_> = called.collect();
    if clients.is_empty() {
        let number = u64::from_str_radix(worker, 16).ok();
        clients.extend(number.filter(|client| pushes.contains_key(client)));
    }
    let spans = || clients.iter().filter_map(|client| pushes.get(client));
    let Some(first) = spans().map(|span| span.0).min() else {
        let known = past.names.iter().filter(|(client, _)| pushes.contains_key(client));
        let near = nearest(worker, known.map(|(_, name)| &**name));
        let near = near.map_or(String::new(), |near| format!("; did you mean {near:?}?"));
        return Err(wrong(format!("{worker:?}, which pushed nothing{near}")));
    };
    let last = spans().map(|span| span.1).max().unwrap_or(first);
    with_it.retain(|(_, client)| clients.contains(client));
    let shards: BTreeSet<_> = with_it.iter().map(|(shard, _)| shard).collect();
    if with_it.is_empty() {
        let why = format!("no such push of {worker:?}");
        return Err(Error::new(Kind::Config, why).expected(
            format!("one of its pushes {first} to {last}"),
            format!("push {sequence}, which is not in the history"),
        ));
    }
    if shards.len() < with_it.len() {
        let numbers: Vec<_> = with_it.iter().map(|(_, client)| format!("{client:016x}")).collect();
        let several = format!("several workers named {worker:?}: {}", numbers.join(", "));
        return Err(Error::new(Kind::Config, "no such push").expected("the number of one of them", several));
    }
    Ok(with_it.iter().map(|(_, client)| (*client, sequence)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn moments_are_read() {
        RewindArgs::command().debug_assert();
        HistoryArgs::command().debug_assert();
        assert_eq!(version("48_200"), Ok(Moment::Version(48_200)));
        assert_eq!(version("a=b=7"), Ok(Moment::Tensor("a=b".into(), 7)));
        assert_eq!(when("1970-01-01T00:01:00Z"), Ok(When::Time(60_000)));
        assert_eq!(when("1.5"), Ok(When::Time(1500)));
        assert_eq!(when("14:03"), Ok(When::OfDay(50_580_000)));
        assert_eq!(when("00:00:59"), Ok(When::OfDay(59_000)));
        for wrong in ["", "w=", "yesterday", "-1", "24:00", "14:60", "14:3:2:1", "14:"] {
            assert!(version(wrong).is_err() && when(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_time_of_day_is_the_last_one_of_the_history() {
        let noon = DAY_MS / 2;
        for (last, time, expected) in [
            (9 * DAY_MS + noon, noon, 9 * DAY_MS + noon),
            (9 * DAY_MS + noon, noon + 1, 8 * DAY_MS + noon + 1),
            (9 * DAY_MS, 0, 9 * DAY_MS),
            (noon, noon + 1, 0),
        ] {
            assert_eq!(When::OfDay(time).time(last), expected);
        }
    }
}
