//! Checks that the shards of a data directory together have the tensors that shard 0 lists. A start checks
//! the same.

use crate::catalog::{Catalog, Holding};
use crate::files::directory::Directory;
use crate::files::names::shard_folder;
use crate::recovery::{self, Settings};
use fastps_core::error::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// Tensors that a message names.
const MAX_NAMED_TENSORS: usize = 5;

/// Losses, with the remedy, of each shard of the cluster that has lost something. `shards`: those with a
/// directory.
pub(super) fn losses(data_dir: &Path, shards: &[u32]) -> Result<BTreeMap<u32, String>> {
    let found = lost(data_dir, shards)?;
    // A server may have removed a tensor meanwhile.
    if found.is_empty() { Ok(found) } else { lost(data_dir, shards) }
}

fn lost(data_dir: &Path, shards: &[u32]) -> Result<BTreeMap<u32, String>> {
    let mut lost = BTreeMap::new();
    let (mut catalogs, mut all) = (BTreeMap::new(), 0);
    // Shard 0 first: a tensor is on its shards before it is in the map.
    for shard in shards {
        let directory = Directory::unlocked(&shard_folder(data_dir, *shard));
        let Some(origin) = recovery::origin(&directory)? else { continue };
        all = all.max(origin.shards);
        let path = directory.path().to_owned();
        let (shard, shards) = (*shard, origin.shards);
        let keep_for = Duration::ZERO;
        let settings = Settings { path, shard, shards, keep: 1, keep_for, history: 0, accept_loss: false };
        // Unreadable directories are reported as damage.
        if let Ok(catalog) = recovery::catalog(&directory, &settings) {
            catalogs.insert(shard, catalog.identified(origin.shard, origin.id));
        }
    }
    for shard in (0..all).filter(|shard| !shards.contains(shard)) {
        lost.insert(shard, "the directory is missing".to_owned());
    }
    let Some(first) = catalogs.get(&0) else { return Ok(lost) };
    for (shard, catalog) in &catalogs {
        let slices: BTreeSet<_> = catalog.slices().map(|(id, ..)| id).collect();
        let lacks = |holding: &&Holding| {
            let mut here = holding.slices.iter().zip(&holding.shards).filter(|(_, at)| *at == shard);
            here.any(|(id, _)| !slices.contains(id))
        };
        let names: Vec<_> =
            first.map.values().filter(lacks).map(|one| format!("{:?}", one.spec.name)).collect();
        if !names.is_empty() {
            let shown = names[..names.len().min(MAX_NAMED_TENSORS)].join(", ");
            let what = format!("lacks slices of {} tensors that shard 0 lists ({shown})", names.len());
            lost.insert(*shard, what);
        } else if is_of_another(first, catalog) && !slices.is_empty() {
            lost.insert(*shard, "shard 0 has lost the map of its slices".to_owned());
        }
    }
    Ok(lost)
}

/// Returns whether a shard's slices belong to another cluster than shard 0's.
fn is_of_another(first: &Catalog, catalog: &Catalog) -> bool {
    catalog.cluster_id != 0 && catalog.cluster_id != first.cluster_id
}
