//! All shards of a data directory, restored in memory as a start would restore them. Changes no file.

use crate::catalog::secret::SecretHash;
use crate::catalog::{Catalog, Ended, Holding, ListedSpace, Member, Stage};
use crate::files::directory::Directory;
use crate::files::io::failed;
use crate::files::names::{shard_folder, shards_in};
use crate::recovery::moment::Moment;
use crate::recovery::{self, Progress, Settings};
use crate::snapshot::generation::Generation;
use crate::tools::copy::past;
use crate::tools::located::{Located, locate};
use crate::tools::rewound::Rewound;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::isa::Isa;
use fastps_core::mode::Mode;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::Slice;
use fastps_core::store::Past;
use fastps_core::tensor::{Apply, SliceId};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Memory limit per byte on disk: a client remembered by a slice takes 3 KiB in memory and as little as 40
/// bytes on disk. The limit bounds the memory that a damaged file can claim.
const MEMORY_BYTES_PER_FILE_BYTE: u64 = 128;
/// Minimum memory limit of a shard.
const MIN_SHARD_MEMORY_BYTES: u64 = 64 << 20;

/// Which part of a data directory is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Everything that is durable.
    All,
    /// Everything that can be read, even if durable changes are lost.
    WhatIsLeft,
    /// The newest cut that all shards have, and nothing later. A server may be running.
    Cut,
    /// Everything as it was at a moment, without clients: another cluster begins from there. A server may be
    /// running.
    At(Moment),
}

/// The content of a data directory. Its shards stay locked, unless a cut or a moment is read.
#[derive(Default)]
pub(crate) struct Source {
    shards: Vec<(Shard, Catalog)>,
    /// Irregularities and omissions, one sentence each.
    pub(crate) notes: Vec<String>,
    /// Of a moment: what is known of its origin.
    pub(crate) rewound: Option<Rewound>,
    /// The locks, until everything is written.
    _locked: Vec<Directory>,
}

/// A tensor and its slices, in order.
pub(crate) struct Tensor<'a> {
    /// The tensor's reservation.
    pub(crate) reservation: u64,
    pub(crate) holding: &'a Holding,
    pub(crate) slices: Vec<Arc<Slice>>,
}

/// Error of a directory that a server uses.
fn in_use(mut error: Error) -> Error {
    if error.kind == Kind::Config {
        error.message.push_str(
            ". Stop it first, or read from it with `fastps checkpoint export ADDRESSES FILE`; \
             --consistent reads its newest consistent snapshot",
        );
    }
    error
}

/// The tensors of a data directory in memory, for reading, and what people should know, one sentence each. Changes
/// no file.
pub fn store_of(data_dir: &Path, reading: Reading) -> Result<(Past, Vec<String>)> {
    let source = Source::open(data_dir, reading)?;
    let tensors = source.tensors()?.into_iter().map(|tensor| (tensor.holding.spec.clone(), tensor.slices));
    let shown = past::source(data_dir).unwrap_or_else(|| data_dir.to_owned());
    Ok((Past::new(tensors, shown.display().to_string())?, source.notes.clone()))
}

impl Source {
    pub(crate) fn open(data_dir: &Path, reading: Reading) -> Result<Self> {
        match reading {
            Reading::All => Self::of_all(data_dir, false),
            Reading::WhatIsLeft => Self::of_all(data_dir, true),
            Reading::Cut => Self::of_cut(data_dir),
            Reading::At(moment) => Self::of_moment(data_dir, &moment),
        }
    }

    fn of_all(data_dir: &Path, accept_loss: bool) -> Result<Self> {
        let folders = shards_in(data_dir)?;
        let (mut locked, mut origins) = (Vec::new(), Vec::new());
        for shard in &folders {
            let directory = Directory::lock_existing(&shard_folder(data_dir, *shard)).map_err(in_use)?;
            origins.push(recovery::origin(&directory)?);
            locked.push(directory);
        }
        let Some(shards) = origins.iter().flatten().map(|origin| origin.shards).max() else {
            return Err(nothing(data_dir));
        };
        check_all_there(data_dir, &folders, shards)?;
        let (mut cores, mut notes) = (Vec::new(), Vec::new());
        for (shard, directory) in folders.into_iter().zip(&locked).take(shards as usize) {
            let path = directory.path().to_owned();
            let core = empty(shard, &path)?;
            let settings =
                Settings { path, shard, shards, keep: 1, keep_for: Duration::ZERO, history: 0, accept_loss };
            let found = recovery::recover(directory, &settings, &core, &Progress::default())
                .map_err(|error| error.shard(shard))?;
            let damaged = found.damaged.iter();
            notes.extend(damaged.map(|(number, why)| format!("snapshot {number} is not used: {why}")));
            notes.extend(found.report.notes);
            notes.extend(found.report.lost);
            cores.push((core, found.catalog));
        }
        let mut source = Self { shards: cores, notes, rewound: None, _locked: locked };
        source.note_what_is_left_out();
        Ok(source)
    }

    fn of_cut(data_dir: &Path) -> Result<Self> {
        let folders = shards_in(data_dir)?;
        let mut generations = Vec::new();
        for shard in &folders {
            let listed = Generation::list(&shard_folder(data_dir, *shard))?;
            generations.push(listed.into_iter().flatten().collect::<Vec<_>>());
        }
        let newest = generations.iter().flatten().next();
        check_all_there(data_dir, &folders, newest.map_or(0, |newest| newest.manifest.shards))?;
        let id_of = |generation: &Generation| generation.manifest.cut.as_ref().map(|cut| cut.id);
        let is_everywhere =
            |id: &u64| generations.iter().all(|shard| shard.iter().any(|one| id_of(one) == Some(*id)));
        let Some(cut) = generations.first().into_iter().flatten().filter_map(id_of).find(is_everywhere)
        else {
            let why = format!("{} has no cut over all shards", data_dir.display());
            return Err(Error::new(Kind::Config, why).expected(
                "snapshots taken with `fastps checkpoint save --consistent=GROUP`",
                "only snapshots without a common cut",
            ));
        };
        let mut source = Self::default();
        for (shard, generations) in folders.into_iter().zip(&generations) {
            let Some(generation) = generations.iter().find(|one| id_of(one) == Some(cut)) else { continue };
            let core = empty(shard, &shard_folder(data_dir, shard))?;
            generation.load(&core, |_, _| ()).map_err(|error| Error::from(error).shard(shard))?;
            let catalog = Catalog::clone(&generation.manifest.catalog);
            source.shards.push((core, catalog.identified(shard, generation.manifest.id)));
            if let (0, Some(cut)) = (shard, &generation.manifest.cut) {
                source.note_what_is_in_no_cut(&cut.group);
            }
        }
        source.note_what_is_left_out();
        Ok(source)
    }

    fn of_moment(data_dir: &Path, moment: &Moment) -> Result<Self> {
        let located = locate(data_dir, moment)?;
        let shards = located.len() as u32;
        let note = note_of_time(moment, &located);
        let (mut source, mut workers, mut clusters) = (Self::default(), BTreeSet::new(), Vec::new());
        for (shard, directory, found) in located {
            let Some(stop) = &found.stop else { continue };
            let path = directory.path().to_owned();
            let core = empty(shard, &path)?;
            let (keep_for, history, accept_loss) = (Duration::ZERO, 0, false);
            let settings = Settings { path, shard, shards, keep: 1, keep_for, history, accept_loss };
            let mut catalog = recovery::recover_at(&directory, &settings, &core, (found.base, stop))
                .map_err(|error| error.shard(shard))?;
            clusters.push((shard, std::mem::take(&mut catalog.cluster_id)));
            workers.extend(std::mem::take(&mut catalog.names).into_values());
            for generation in Generation::list(directory.path())?.into_iter().flatten() {
                workers.extend(generation.manifest.catalog.names.values().cloned());
            }
            source.shards.push((core, catalog));
        }
        check_one_cluster(data_dir, clusters)?;
        source.rewound = Some(Rewound::new(data_dir, workers.into_iter()));
        source.notes.extend(note);
        source.note_what_is_left_out();
        source.note_what_has_no_history();
        Ok(source)
    }

    fn note_what_has_no_history(&mut self) {
        let tensors = self.shards.first().into_iter().flat_map(|(_, catalog)| catalog.map.values());
        let hogwild = tensors.filter(|Holding { spec, .. }| spec.apply == Apply::Hogwild);
        let note = |Holding { spec, .. }: &Holding| {
            format!("tensor {:?} is hogwild: its values are from the snapshot before the moment", spec.name)
        };
        let notes: Vec<_> = hogwild.map(note).collect();
        self.notes.extend(notes);
    }

    fn note_what_is_in_no_cut(&mut self, group: &str) {
        let tensors = self.shards.first().into_iter().flat_map(|(_, catalog)| catalog.map.values());
        let others =
            tensors.filter(|Holding { spec, .. }| *spec.group != *group || spec.apply != Apply::Exact);
        let note = |Holding { spec, .. }: &Holding| {
            let why = if *spec.group == *group { "is hogwild" } else { "belongs to another group" };
            format!("tensor {:?} {why}: its values are not from the cut", spec.name)
        };
        let notes: Vec<_> = others.map(note).collect();
        self.notes.extend(notes);
    }

    fn note_what_is_left_out(&mut self) {
        let Some((_, first)) = self.shards.first() else { return };
        let mut left_out = BTreeSet::new();
        for (id, reservation) in self.shards.iter().flat_map(|(_, catalog)| &catalog.reservations) {
            if !first.map.contains_key(id) {
                let why = if reservation.stage == Stage::Committed {
                    "was removed"
                } else {
                    "was being registered"
                };
                left_out.insert(format!("tensor {:?} {why}: it is omitted", reservation.spec.name));
            }
        }
        self.notes.extend(left_out);
    }

    /// Incarnations that have ended on any shard.
    pub(crate) fn ended(&self) -> Ended {
        Ended::join(self.shards.iter().map(|(_, catalog)| &catalog.ended))
    }

    /// The identity of the cluster.
    pub(crate) fn cluster_id(&self) -> u64 {
        self.shards.first().map_or(0, |(_, catalog)| catalog.cluster_id)
    }

    /// Clients with a session on any shard. One that has ended on another has none: slices that come from
    /// there no longer remember its pushes.
    pub(crate) fn sessions(&self, ended: &Ended) -> BTreeSet<u64> {
        let mut sessions: BTreeSet<_> =
            self.shards.iter().flat_map(|(_, catalog)| &catalog.sessions).copied().collect();
        for (client, _) in ended.iter() {
            sessions.remove(&client);
        }
        sessions
    }

    /// Hashes of the secrets of these sessions. If a client used two secrets, the lowest shard's is kept.
    pub(crate) fn secrets(&self, sessions: &BTreeSet<u64>) -> BTreeMap<u64, SecretHash> {
        let all = self.shards.iter().rev().flat_map(|(_, catalog)| &catalog.secrets);
        let all = all.filter(|(client, _)| sessions.contains(client));
        all.map(|(client, secret)| (*client, *secret)).collect()
    }

    /// Group members and complete groups, as shard 0 knows them. Other shards store only members of `Sync`
    /// groups, whose pushes wait for each other.
    pub(crate) fn members(&self, first: bool) -> (Vec<Member>, BTreeSet<u32>) {
        let Some((_, catalog)) = self.shards.first() else { return (Vec::new(), BTreeSet::new()) };
        let mut members = catalog.members.clone();
        members.retain(|member| first || matches!(member.seat.mode, Mode::Sync(_)));
        (members, catalog.complete.clone())
    }

    /// The open spaces of vectors, as shard 0 lists them.
    pub(crate) fn spaces(&self) -> BTreeMap<u64, ListedSpace> {
        self.shards.first().map(|(_, catalog)| catalog.spaces.clone()).unwrap_or_default()
    }

    /// The tensors in the order of registration.
    pub(crate) fn tensors(&self) -> Result<Vec<Tensor<'_>>> {
        let map = self.shards.first().map(|(_, catalog)| &catalog.map);
        map.into_iter().flatten().map(|(reservation, holding)| self.tensor(*reservation, holding)).collect()
    }

    fn tensor<'a>(&self, reservation: u64, holding: &'a Holding) -> Result<Tensor<'a>> {
        let Holding { spec, slices, shards, .. } = holding;
        spec.validate()?;
        let torn = |what: String| {
            let why =
                format!("the shards' directories do not belong together or are from different times: {what}");
            Error::new(Kind::Config, why).tensor(spec.name.clone())
        };
        if slices.len() != spec.slice_count() || shards.len() != slices.len() {
            return Err(torn(format!("expected {} slices, got {}", spec.slice_count(), slices.len())));
        }
        let find = |(index, (id, shard)): (usize, (&u64, &u32))| {
            let found = self.shards.get(*shard as usize).and_then(|(core, _)| core.slice(SliceId(*id)).ok());
            let fits = |slice: &Arc<Slice>| slice.index() == index && **slice.spec() == *spec;
            found.filter(fits).ok_or_else(|| torn(format!("slice {id} is not on shard {shard}")))
        };
        let found = slices.iter().zip(shards).enumerate().map(find).collect::<Result<_>>()?;
        Ok(Tensor { reservation, holding, slices: found })
    }
}

/// What a moment that not every shard knows means for the others.
fn note_of_time(moment: &Moment, located: &[Located]) -> Option<String> {
    let by_time = |of: &dyn Fn(&Located) -> bool| {
        let shards = located.iter().filter(|one| of(one)).map(|(shard, ..)| shard.to_string());
        shards.collect::<Vec<_>>().join(", ")
    };
    let others = match moment {
        Moment::Time(_) if located.len() > 1 => by_time(&|_| true),
        _ => by_time(&|(_, _, found)| found.by_time),
    };
    let which = if others.contains(',') { "shards" } else { "shard" };
    (!others.is_empty()).then(|| {
        format!(
            "{which} {others}: slices are as of the time of the moment, to 0.1 s by the clocks of the servers; only a version, \
             a mark or a consistent snapshot is exact on all shards"
        )
    })
}

/// Fails if a shard's folder is missing.
pub(crate) fn check_all_there(data_dir: &Path, folders: &[u32], shards: u32) -> Result<()> {
    let Some(missing) = (0..shards).find(|shard| !folders.contains(shard)) else { return Ok(()) };
    let why = format!("{} is missing: all shards are needed", shard_folder(data_dir, missing).display());
    Err(Error::new(Kind::Config, why).expected(format!("{shards} shards"), folders.len()))
}

/// Fails if shards know different clusters; 0: a shard knows none.
pub(crate) fn check_one_cluster(
    data_dir: &Path,
    clusters: impl IntoIterator<Item = (u32, u64)>,
) -> Result<()> {
    let mut known = clusters.into_iter().filter(|(_, id)| *id != 0);
    let Some((first, expected)) = known.next() else { return Ok(()) };
    let Some((other, got)) = known.find(|(_, id)| *id != expected) else { return Ok(()) };
    let why = format!("{} has shards {first} and {other} of different clusters", data_dir.display());
    let say = |id| format!("cluster {id:016x}");
    Err(Error::new(Kind::Config, why).shard(other).expected(say(expected), say(got)))
}

/// An empty shard with a memory limit that fits the files in `folder`.
fn empty(shard: u32, folder: &Path) -> Result<Shard> {
    let limit =
        size(folder)?.saturating_mul(MEMORY_BYTES_PER_FILE_BYTE).saturating_add(MIN_SHARD_MEMORY_BYTES);
    Ok(Shard::new(ShardConfig::new(shard, limit, Isa::get()?)))
}

/// Bytes of all files of a shard, whose server may remove some of them meanwhile.
fn size(folder: &Path) -> Result<u64> {
    let read = |error: std::io::Error| failed("read", folder, &error);
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder).map_err(read)? {
        let entry = entry.map_err(read)?;
        let metadata = match entry.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            metadata => metadata.map_err(read)?,
        };
        if !metadata.is_dir() {
            bytes += metadata.len();
            continue;
        }
        match size(&entry.path()) {
            Err(_) if !entry.path().exists() => {}
            found => bytes += found?,
        }
    }
    Ok(bytes)
}

pub(crate) fn nothing(data_dir: &Path) -> Error {
    Error::new(Kind::Config, format!("{} contains no snapshot and no log", data_dir.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::size;
    use std::fs::{create_dir, remove_dir_all, write};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn files_that_a_server_removes_meanwhile_do_not_count() {
        let folder = std::env::temp_dir().join(format!("fastps-source-{}", std::process::id()));
        create_dir(&folder).unwrap();
        write(folder.join("stays"), [0; 100]).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let generation = folder.join("generation");
                    create_dir(&generation).unwrap();
                    for k in 0..64 {
                        write(generation.join(k.to_string()), [0; 10]).unwrap();
                    }
                    remove_dir_all(&generation).unwrap();
                }
            });
            let found: Vec<_> = (0..5000).map(|_| size(&folder)).collect();
            over.store(true, Ordering::Relaxed);
            for bytes in found {
                assert!((100..=740).contains(&bytes.unwrap()));
            }
        });
        remove_dir_all(&folder).unwrap();
    }
}
