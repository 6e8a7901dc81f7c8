//! The past of a data directory: the span that it can be rewound to, and every change in it. A server may be
//! running.

use crate::catalog::{Catalog, Event};
use crate::files::damage::Unusable;
use crate::files::directory::Directory;
use crate::files::names::{shard_folder, shards_in};
use crate::frame::Content;
use crate::log::read::{SegmentEnd, read};
use crate::recovery;
use crate::recovery::moment::{begins_empty, exact_slices};
use crate::snapshot::generation::Generation;
use crate::tools::source::check_one_cluster;
use fastps_core::codec::CodecId;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::Action;
use fastps_core::isa::Isa;
use fastps_core::record::Record;
use fastps_core::rows::RowLayout;
use fastps_core::tensor::{Apply, TensorSpec};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Changes that are remembered to tell how stale a later one was; an older base has no known staleness.
const RECENT_CHANGES: usize = 1024;

/// What one shard can be rewound to.
#[derive(Clone, Debug, Default)]
pub struct ShardSpan {
    /// Index of the shard.
    pub shard: u32,
    /// The shard's directory.
    pub path: PathBuf,
    /// The first and the last version that all slices of `exact` tensors can have.
    pub versions: (u64, u64),
    /// The first and the last time noted, in milliseconds since 1970. `None`: the log has none.
    pub times: Option<(u64, u64)>,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Bytes of the snapshots, and of the log.
    pub bytes: (u64, u64),
}

/// A gradient or an assignment in the log.
#[derive(Debug)]
pub struct Change<'a> {
    /// Index of the shard.
    pub shard: u32,
    /// The tensor.
    pub spec: &'a TensorSpec,
    /// The slice of the tensor.
    pub slice: usize,
    /// Its version after the change.
    pub version: u64,
    /// The client, and the number of its push.
    pub client: u64,
    /// See `client`.
    pub sequence: u64,
    /// When it came, to some 100 milliseconds, in milliseconds since 1970; 0: unknown.
    pub time: u64,
    /// Whether it is a gradient.
    pub is_gradient: bool,
    /// The learning rate that took effect.
    pub lr: f64,
    /// Changes by others since the values that it was computed from, if known.
    pub staleness: Option<u64>,
    /// What it came from, in its sender's words; may be empty.
    pub note: &'a str,
    record: &'a Record<'a>,
}

/// The past of all shards.
#[derive(Clone, Debug, Default)]
pub struct Past {
    /// Each shard's span.
    pub shards: Vec<ShardSpan>,
    /// Names of clients, as far as the log has them.
    pub names: BTreeMap<u64, Arc<str>>,
    /// The marks that all shards have, the oldest first.
    pub marks: Vec<PastMark>,
}

/// A moment that a user has named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastMark {
    /// Its number, the same on every shard.
    pub id: u64,
    /// Its name.
    pub name: Arc<str>,
    /// When it was made, to some 100 milliseconds, in milliseconds since 1970; 0: unknown.
    pub time: u64,
    /// The newest version of a slice of an `exact` tensor then.
    pub version: u64,
}

impl Change<'_> {
    /// The Euclidean norm of the gradient or of the assigned values, and whether all are finite.
    pub fn norm(&self, isa: Isa) -> (f64, bool) {
        let Some(elements) = self.elements() else { return (f64::NAN, false) };
        let Record { codec, body, .. } = self.record;
        if codec.validate(isa, body, elements).is_err() {
            return (f64::NAN, false);
        }
        let squares: f64 = if *codec == CodecId::Float64 {
            let (values, _) = body.as_chunks::<8>();
            values.iter().map(|bytes| f64::from_le_bytes(*bytes).powi(2)).sum()
        } else {
            let mut values = vec![0.0; elements];
            codec.decode(isa, body, &mut values);
            values.iter().map(|value| f64::from(*value).powi(2)).sum()
        };
        (squares.sqrt(), squares.is_finite())
    }

    fn elements(&self) -> Option<usize> {
        let range = self.spec.slice_range(self.slice);
        match self.record.indices {
            None => Some(range.len()),
            Some(rows) => RowLayout::new(range.start, range.len(), self.spec.row_width()).elements(rows).ok(),
        }
    }
}

/// Reads the log that a data directory keeps, and calls `each` for every change in it, shard by shard.
pub fn past(data_dir: &Path, mut each: impl FnMut(&Change<'_>)) -> Result<Past> {
    let (mut past, mut clusters) = (Past::default(), Vec::new());
    for shard in shards_in(data_dir)? {
        let directory = Directory::unlocked(&shard_folder(data_dir, shard));
        let mut reading = ShardReading::begin(shard, &directory, &mut past.names)?;
        reading
            .run(&directory, &mut past.names, &mut each)
            .map_err(|error| Error::from(error).shard(shard))?;
        clusters.push((shard, reading.cluster));
        past.shards.push(reading.span);
        past.add_marks(reading.marks);
    }
    if past.shards.is_empty() {
        let why = format!("{} contains no snapshot and no log", data_dir.display());
        return Err(Error::new(Kind::Config, why));
    }
    check_one_cluster(data_dir, clusters)?;
    Ok(past)
}

impl Past {
    /// Keeps the marks that the last shard has, too.
    fn add_marks(&mut self, marks: Vec<PastMark>) {
        if self.shards.len() == 1 {
            self.marks = marks;
            return;
        }
        let also: HashMap<_, _> = marks.iter().map(|mark| (mark.id, mark.version)).collect();
        self.marks.retain_mut(|mark| {
            let version = also.get(&mark.id);
            mark.version = mark.version.max(version.copied().unwrap_or(0));
            version.is_some()
        });
    }
}

/// One pass over the log of a shard.
struct ShardReading {
    span: ShardSpan,
    /// The identity of the cluster; 0: the shard does not know it.
    cluster: u64,
    first: Option<u64>,
    time: u64,
    /// The tensor of each slice, and its index there.
    slices: HashMap<u64, (Arc<TensorSpec>, usize)>,
    /// The last changes of each slice: version and client.
    recent: HashMap<u64, VecDeque<(u64, u64)>>,
    marks: Vec<PastMark>,
}

impl ShardReading {
    fn begin(shard: u32, directory: &Directory, names: &mut BTreeMap<u64, Arc<str>>) -> Result<Self> {
        let path = directory.path().to_owned();
        let mut reading = Self {
            span: ShardSpan { shard, path, ..ShardSpan::default() },
            cluster: 0,
            first: None,
            time: 0,
            slices: HashMap::new(),
            recent: HashMap::new(),
            marks: Vec::new(),
        };
        let listed = Generation::list(directory.path())?;
        let intact: Vec<_> = listed.into_iter().flatten().collect();
        let named = intact.first().map_or(0, |newest| newest.manifest.catalog.cluster_id);
        reading.cluster = match (shard, named) {
            (0, 0) => recovery::origin(directory)?.map_or(0, |origin| origin.id),
            _ => named,
        };
        reading.span.snapshots = intact.len() as u64;
        reading.span.bytes.0 = intact.iter().map(|generation| generation.summary().bytes).sum();
        let segments = directory.segments()?;
        if begins_empty(&segments, intact.iter().map(|generation| generation.manifest.log)) {
            reading.first = segments.first().copied();
        } else if let Some(oldest) = intact.last() {
            reading.first = Some(oldest.manifest.log);
            let catalog = &oldest.manifest.catalog;
            names.extend(catalog.names.iter().map(|(client, name)| (*client, name.clone())));
            reading.know(catalog);
            let (exact, mut oldest_version) = (exact_slices(catalog), 0);
            oldest
                .each_standing(|slice, standing| {
                    if exact.contains(&slice) {
                        oldest_version = oldest_version.max(standing.version);
                    }
                })
                .map_err(Error::from)?;
            reading.span.versions = (oldest_version, oldest_version);
        }
        let needed = segments.iter().filter(|number| Some(**number) >= reading.first);
        let length =
            |number: &u64| std::fs::metadata(directory.segment(*number)).map_or(0, |file| file.len());
        reading.span.bytes.1 = needed.map(length).sum();
        Ok(reading)
    }

    fn know(&mut self, catalog: &Catalog) {
        for (id, k, held) in catalog.slices() {
            self.slices.insert(id, (Arc::new(held.spec.clone()), k));
        }
    }

    fn run(
        &mut self,
        directory: &Directory,
        names: &mut BTreeMap<u64, Arc<str>>,
        each: &mut impl FnMut(&Change<'_>),
    ) -> Result<(), Unusable> {
        let mut next = self.first;
        while let Some(number) = next.take() {
            let (_, ended) = read(&directory.segment(number), number, None, |_, content| {
                self.take(content, names, each);
                Ok(ControlFlow::Continue(()))
            })?;
            if let SegmentEnd::Continued(following) = ended {
                next = Some(following);
            }
        }
        Ok(())
    }

    fn take(
        &mut self,
        content: Content<'_>,
        names: &mut BTreeMap<u64, Arc<str>>,
        each: &mut impl FnMut(&Change<'_>),
    ) {
        match content {
            Content::Time(time) => {
                self.time = self.time.max(time);
                let (first, _) = self.span.times.unwrap_or((time, time));
                self.span.times = Some((first, self.time));
            }
            Content::Event(Event::Named(client, name)) => drop(names.insert(client, name)),
            Content::Event(Event::ClusterLearned(id)) => self.cluster = id,
            Content::Event(Event::Reserved(_, reservation)) => {
                let spec = Arc::new(reservation.spec);
                for (id, k) in reservation.slices {
                    self.slices.insert(id, (spec.clone(), k as usize));
                }
            }
            Content::Mark(mark) => self.marks.push(PastMark {
                id: mark.id,
                name: mark.name.into(),
                time: self.time,
                version: self.span.versions.1,
            }),
            Content::Program(ran) => self.span.versions.1 = self.span.versions.1.max(ran.version),
            Content::Push(record) => self.push(&record, each),
            _ => {}
        }
    }

    fn push(&mut self, record: &Record<'_>, each: &mut impl FnMut(&Change<'_>)) {
        let Record { slice, version, identity, base, lr, .. } = record;
        if record.apply == Apply::Exact {
            self.span.versions.1 = self.span.versions.1.max(*version);
        }
        let Some((spec, k)) = self.slices.get(&slice.0) else { return };
        let recent = self.recent.entry(slice.0).or_default();
        let staleness = base.and_then(|base| {
            let others =
                recent.iter().filter(|(at, by)| *at > base.version && *by != identity.client).count();
            let reaches_back = recent.front().is_none_or(|(oldest, _)| *oldest <= base.version + 1);
            reaches_back.then_some(others as u64)
        });
        recent.push_back((*version, identity.client));
        if recent.len() > RECENT_CHANGES {
            recent.pop_front();
        }
        each(&Change {
            shard: self.span.shard,
            spec,
            slice: *k,
            version: *version,
            client: identity.client,
            sequence: identity.sequence,
            time: self.time,
            is_gradient: record.action == Action::Gradient,
            lr: *lr,
            staleness,
            note: record.note,
            record,
        });
    }
}
