//! Rewrites a data directory for another number of shards. Each slice is placed by load and keeps its state.

use crate::catalog::{Catalog, Holding, Reservation, Stage};
use crate::files::directory::Directory;
use crate::files::io::{failed, sync_directory};
use crate::files::names::shard_folder;
use crate::files::removal::remove;
use crate::frame::{Author, Origin, random_id};
use crate::log::segment::Segment;
use crate::snapshot::{self, SnapshotInput};
use crate::tools::source::{Reading, Source};
use crate::tools::target::{begin, parent};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::placement::Load;
use fastps_core::slice::Slice;
use fastps_core::tensor::SliceId;
use std::collections::HashMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;

/// Maximum number of shards in a cluster.
const MAX_SHARDS: u32 = 1 << 16;
/// Number of the first snapshot and of the first log segment.
const FIRST_NUMBER: u64 = 1;

/// The result of a restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Number of tensors.
    pub tensors: u64,
    /// Number of slices.
    pub slices: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Irregularities and omissions, one sentence each.
    pub notes: Vec<String>,
}

/// Writes the content of `source` as a new data directory for `shards` shards. The directory appears when all
/// of it is durable.
pub fn restore(source: &Path, target: &Path, shards: u32, reading: Reading) -> Result<Restored> {
    if shards == 0 || shards > MAX_SHARDS {
        let error = Error::new(Kind::Config, "invalid number of shards");
        return Err(error.expected(format!("1 to {MAX_SHARDS}"), shards));
    }
    let unfinished = begin(target)?;
    let source = Source::open(source, reading)?;
    let mut builder = DirBuilder::new();
    builder.mode(0o700).create(&unfinished).map_err(|error| failed("create", &unfinished, &error))?;
    let written = write(&source, &unfinished, shards).and_then(|written| {
        source.rewound.iter().try_for_each(|rewound| rewound.write(&unfinished))?;
        sync_directory(&unfinished)?;
        std::fs::rename(&unfinished, target).map_err(|error| failed("rename", &unfinished, &error))?;
        sync_directory(parent(target))?;
        Ok(written)
    });
    if written.is_err() {
        let _ = remove(&unfinished);
    }
    written
}

fn write(source: &Source, folder: &Path, shards: u32) -> Result<Restored> {
    let tensors = source.tensors()?;
    let mut load = Load::new(shards as usize);
    let ended = source.ended();
    let sessions = source.sessions(&ended);
    let secrets = source.secrets(&sessions);
    let (cluster_id, others) = (source.cluster_id(), Catalog::default());
    let mut catalogs = vec![Catalog { sessions, secrets, ended, cluster_id, ..others }; shards as usize];
    let mut slices: HashMap<SliceId, Arc<Slice>> = HashMap::new();
    for tensor in &tensors {
        let Holding { spec, group, .. } = tensor.holding;
        let mut holding = tensor.holding.clone();
        for (index, slice) in tensor.slices.iter().enumerate() {
            let shard = load.place(spec, index);
            holding.shards[index] = shard;
            let place = catalogs[shard as usize].reservations.entry(tensor.reservation);
            let stage = Stage::Committed;
            let empty = || Reservation { spec: spec.clone(), group: *group, slices: Vec::new(), stage };
            place.or_insert_with(empty).slices.push((slice.id().0, index as u64));
            slices.insert(slice.id(), slice.clone());
        }
        catalogs[0].map.insert(tensor.reservation, holding);
    }
    for (shard, catalog) in catalogs.iter_mut().enumerate() {
        (catalog.members, catalog.complete) = source.members(shard == 0);
    }
    catalogs[0].spaces = source.spaces();
    let mut restored =
        Restored { tensors: tensors.len() as u64, notes: source.notes.clone(), ..Restored::default() };
    for (shard, catalog) in (0..).zip(catalogs) {
        let directory = Directory::open(&shard_folder(folder, shard))?;
        let origin = Origin { id: random_id()?, shard, shards };
        let author = Author { incarnation: random_id()?, predecessor: 0 };
        Segment::create(&directory, FIRST_NUMBER, false, origin, author)?;
        let subject = SnapshotInput {
            slice: &|id| slices.get(&id).cloned(),
            catalog: catalog.into(),
            origin,
            author,
            log: FIRST_NUMBER,
            cut: None,
            synced: &|| (0, 0),
            logging: &|| false,
        };
        let summary = snapshot::write(&directory, FIRST_NUMBER, &subject, || {})?.summary();
        restored.slices += summary.slices;
        restored.bytes += summary.bytes;
    }
    Ok(restored)
}
