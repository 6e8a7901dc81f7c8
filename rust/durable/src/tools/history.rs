//! The past of a data directory: the span that it can be rewound to, and every change in it. A server may be
//! running.

use crate::catalog::{Catalog, Event};
use crate::files::damage::Unusable;
use crate::files::directory::Directory;
use crate::frame::{Content, Origin, RanProgram};
use crate::log::read::{SegmentEnd, read};
use crate::recovery::moment::{begins_empty, check_beginning, exact_slices};
use crate::snapshot::generation::Generation;
use crate::tools::located::shards_of;
use crate::tools::source::check_one_cluster;
use fastps_core::codec::CodecId;
use fastps_core::error::{Error, Result};
use fastps_core::frame::{Action, Identity};
use fastps_core::isa::Isa;
use fastps_core::record::{Identities, Record};
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

/// What a change is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// An optimizer step with a gradient, or with several workers' gradients.
    Gradient,
    /// Assigned values, also those of a registration.
    Values,
    /// Assigned optimizer state.
    State,
    /// A program on the vectors of a space that wrote to the tensor.
    Program,
}

/// A change in the log.
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
    /// What it is.
    pub kind: ChangeKind,
    /// When it came, to some 100 milliseconds, in milliseconds since 1970; 0: unknown.
    pub time: u64,
    /// The learning rate that took effect; NaN for a program.
    pub lr: f64,
    /// Changes by others since the values that it was computed from, if known.
    pub staleness: Option<u64>,
    /// What it came from, in its sender's words; may be empty. Of a program, the name of its space.
    pub note: &'a str,
    /// The client and the number of its push; of a program, its coordinator and the number of its command.
    identity: Identity,
    /// What was pushed; a program has none.
    record: Option<&'a Record<'a>>,
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
    /// Who made it: the clients, and for each the number of its push. Several: the gradient is the sum of theirs, of
    /// which the log has no other trace. The client is 0 if the log does not know it.
    pub fn makers(&self) -> impl Iterator<Item = Identity> {
        let several = self.record.map_or(Identities::default(), |record| record.shared_by);
        several.iter().chain(several.is_empty().then_some(self.identity))
    }

    /// The Euclidean norm of the gradient or of what was assigned, and whether all elements are finite. The log does
    /// not have what a program wrote.
    pub fn norm(&self, isa: Isa) -> (f64, bool) {
        let Some(record) = self.record else { return (f64::NAN, true) };
        let Some(elements) = self.elements(record) else { return (f64::NAN, false) };
        let Record { codec, body, .. } = record;
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

    fn elements(&self, record: &Record<'_>) -> Option<usize> {
        if self.kind == ChangeKind::State {
            let width = if record.codec == CodecId::Float64 { 8 } else { 4 };
            return Some(record.body.len() / width);
        }
        let range = self.spec.slice_range(self.slice);
        match record.indices {
            None => Some(range.len()),
            Some(rows) => RowLayout::new(range.start, range.len(), self.spec.row_width()).elements(rows).ok(),
        }
    }
}

/// Reads the log that a data directory keeps, and calls `each` for every change in it, shard by shard.
pub fn past(data_dir: &Path, mut each: impl FnMut(&Change<'_>)) -> Result<Past> {
    let (mut past, mut clusters) = (Past::default(), Vec::new());
    let mut known = Known::default();
    for (shard, directory, origin) in shards_of(data_dir)? {
        let named = |error: Error| error.shard(shard);
        let mut reading = ShardReading::begin(shard, &directory, origin, &mut known).map_err(named)?;
        reading.run(&directory, &mut known, &mut each).map_err(Error::from).map_err(named)?;
        clusters.push((shard, reading.cluster));
        past.shards.push(reading.span);
        past.add_marks(reading.marks);
    }
    check_one_cluster(data_dir, clusters)?;
    past.names = known.names;
    Ok(past)
}

/// What all shards have said of clients and of spaces so far: the first one knows the coordinators.
#[derive(Default)]
struct Known {
    names: BTreeMap<u64, Arc<str>>,
    spaces: HashMap<u64, Arc<str>>,
    /// The client that had the seat of a space in a term.
    seats: HashMap<(u64, u64), u64>,
}

impl Known {
    fn learn(&mut self, catalog: &Catalog) {
        self.names.extend(catalog.names.iter().map(|(client, name)| (*client, name.clone())));
        for (id, space) in &catalog.spaces {
            self.spaces.insert(*id, space.name.clone());
            self.seat(*id, space.term, space.coordinator, &space.holder);
        }
    }

    fn seat(&mut self, space: u64, term: u64, client: u64, holder: &Arc<str>) {
        if client != 0 {
            self.seats.insert((space, term), client);
            self.names.entry(client).or_insert_with(|| holder.clone());
        }
    }
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
    origin: Option<Origin>,
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
    fn begin(shard: u32, directory: &Directory, origin: Option<Origin>, known: &mut Known) -> Result<Self> {
        let path = directory.path().to_owned();
        let mut reading = Self {
            span: ShardSpan { shard, path, ..ShardSpan::default() },
            origin,
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
            (0, 0) => origin.map_or(0, |origin| origin.id),
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
            known.learn(catalog);
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
        check_beginning(directory, &segments, reading.first.is_none())?;
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
        known: &mut Known,
        each: &mut impl FnMut(&Change<'_>),
    ) -> Result<(), Unusable> {
        let mut next = self.first;
        while let Some(number) = next.take() {
            let (_, ended) = read(&directory.segment(number), number, self.origin, |_, content| {
                self.take(content, known, each);
                Ok(ControlFlow::Continue(()))
            })?;
            if let SegmentEnd::Continued(following) = ended {
                next = Some(following);
            }
        }
        Ok(())
    }

    fn take(&mut self, content: Content<'_>, known: &mut Known, each: &mut impl FnMut(&Change<'_>)) {
        match content {
            Content::Time(time) => {
                self.time = self.time.max(time);
                let (first, _) = self.span.times.unwrap_or((time, time));
                self.span.times = Some((first, self.time));
            }
            Content::Event(event) => self.event(event, known),
            Content::Mark(mark) => self.marks.push(PastMark {
                id: mark.id,
                name: mark.name.into(),
                time: self.time,
                version: self.span.versions.1,
            }),
            Content::SpaceOpened(_, space) => drop(known.spaces.insert(space.id.0, space.name.clone())),
            Content::Program(ran) if ran.program.commits() => self.program(&ran, known, each),
            Content::Push(record) => self.push(&record, each),
            _ => {}
        }
    }

    fn event(&mut self, event: Event, known: &mut Known) {
        match event {
            Event::Named(client, name) => drop(known.names.insert(client, name)),
            Event::ClusterLearned(id) => self.cluster = id,
            Event::Reserved(_, reservation) => {
                let spec = Arc::new(reservation.spec);
                for (id, k) in reservation.slices {
                    self.slices.insert(id, (spec.clone(), k as usize));
                }
            }
            Event::SpaceOpened(id, space) => drop(known.spaces.insert(id, space.name)),
            Event::SeatTaken { space, term, holder, client, .. } => {
                known.seat(space, term, client, &holder);
            }
            _ => {}
        }
    }

    fn program(&mut self, ran: &RanProgram<'_>, known: &Known, each: &mut impl FnMut(&Change<'_>)) {
        let RanProgram { slice, version, command, .. } = ran;
        self.span.versions.1 = self.span.versions.1.max(*version);
        let client = known.seats.get(&(command.space.0, command.term)).copied().unwrap_or(0);
        self.remember(slice.0, *version, client);
        let Some((spec, k)) = self.slices.get(&slice.0) else { return };
        each(&Change {
            shard: self.span.shard,
            spec,
            slice: *k,
            version: *version,
            kind: ChangeKind::Program,
            time: self.time,
            lr: f64::NAN,
            staleness: None,
            note: known.spaces.get(&command.space.0).map_or("", AsRef::as_ref),
            identity: Identity { client, sequence: command.number },
            record: None,
        });
    }

    fn push(&mut self, record: &Record<'_>, each: &mut impl FnMut(&Change<'_>)) {
        let Record { slice, version, identity, lr, .. } = record;
        if record.apply == Apply::Exact {
            self.span.versions.1 = self.span.versions.1.max(*version);
        }
        let staleness = self.staleness(record);
        self.remember(slice.0, *version, identity.client);
        let Some((spec, k)) = self.slices.get(&slice.0) else { return };
        each(&Change {
            shard: self.span.shard,
            spec,
            slice: *k,
            version: *version,
            kind: match record.action {
                Action::Gradient => ChangeKind::Gradient,
                Action::Assign => ChangeKind::Values,
                Action::AssignState { .. } => ChangeKind::State,
            },
            time: self.time,
            lr: *lr,
            staleness,
            note: record.note,
            identity: *identity,
            record: Some(record),
        });
    }

    /// Changes by others since the values that a push was computed from, if that is known.
    fn staleness(&self, record: &Record<'_>) -> Option<u64> {
        let (base, client) = (record.base?, record.identity.client);
        let Some(recent) = self.recent.get(&record.slice.0) else { return Some(0) };
        let reaches_back = recent.front().is_none_or(|(oldest, _)| *oldest <= base.version + 1);
        let others = recent.iter().filter(|(at, by)| *at > base.version && *by != client).count();
        reaches_back.then_some(others as u64)
    }

    fn remember(&mut self, slice: u64, version: u64, client: u64) {
        let recent = self.recent.entry(slice).or_default();
        recent.push_back((version, client));
        if recent.len() > RECENT_CHANGES {
            recent.pop_front();
        }
    }
}
