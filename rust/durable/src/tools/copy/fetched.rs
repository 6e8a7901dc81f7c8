//! Building a data directory from fetched copies.

use crate::catalog::Catalog;
use crate::files::directory::Directory;
use crate::files::io::{failed, sync_directory};
use crate::files::names::{generation_in, shard_folder};
use crate::files::output::Output;
use crate::files::removal::remove;
use crate::frame::{Author, random_id};
use crate::log::segment::Segment;
use crate::snapshot::generation::Generation;
use crate::snapshot::manifest::{MANIFEST, Manifest};
use crate::tools::copy::described::Described;
use crate::tools::copy::note_copied;
use crate::tools::target::{begin, parent};
use fastps_core::error::{Error, Kind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A data directory built from fetched snapshots, one per shard. It appears when all of it is durable; on
/// failure, nothing is left.
#[derive(Debug)]
pub struct Fetched {
    target: PathBuf,
    unfinished: PathBuf,
    shards: Vec<Manifest>,
}

impl Fetched {
    /// Begins a directory. `target` must not exist or must be empty.
    pub fn begin(target: &Path) -> Result<Self> {
        let unfinished = begin(target)?;
        let made = DirBuilder::new().mode(0o700).create(&unfinished);
        made.map_err(|error| failed("create", &unfinished, &error))?;
        Ok(Self { target: target.to_owned(), unfinished, shards: Vec::new() })
    }

    /// An empty folder for the files of a shard's snapshot, except the manifest.
    pub fn folder(&self, described: &Described) -> Result<PathBuf> {
        let shard = shard_folder(&self.unfinished, described.manifest.shard);
        remove(&shard)?;
        let folder = generation_in(&shard, described.manifest.generation);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|error| failed("create", &folder, &error))?;
        Ok(folder)
    }

    /// Completes a folder of [`Fetched::folder`], whose files must be durable. The result is a directory of
    /// its own, which remembers the folder that it was copied from.
    pub fn complete(&mut self, described: &Described, folder: &str) -> Result<()> {
        let mut manifest = described.manifest.clone();
        let catalog = Catalog::clone(&manifest.catalog).identified(manifest.shard, manifest.id);
        manifest.catalog = Arc::new(catalog);
        manifest.id = random_id()?;
        let author = Author { incarnation: random_id()?, predecessor: 0 };
        (manifest.incarnation, manifest.predecessor) = (author.incarnation, author.predecessor);
        manifest.durable = None;
        let path = shard_folder(&self.unfinished, manifest.shard);
        let directory = Directory::open(&path)?;
        let generation = directory.generation(manifest.generation);
        let mut output = Output::create(&generation.join(MANIFEST))?;
        output.write(&manifest.text()?)?;
        output.finish()?;
        sync_directory(&generation)?;
        let Manifest { log, generation, .. } = manifest;
        // The log starts empty: later changes are not part of the copy.
        Segment::create(&directory, log, false, manifest.origin(), author)?;
        note_copied(&path, folder)?;
        Generation::open(&path, generation)?;
        self.shards.push(manifest);
        Ok(())
    }

    /// Gives the directory its name, if the shards' snapshots belong together.
    pub fn finish(self) -> Result<()> {
        self.check()?;
        sync_directory(&self.unfinished)?;
        let renamed = std::fs::rename(&self.unfinished, &self.target);
        renamed.map_err(|error| failed("rename", &self.unfinished, &error))?;
        sync_directory(parent(&self.target))
    }

    /// Every tensor in the map of shard 0 must be complete: the shards' snapshots are taken at different
    /// times.
    fn check(&self) -> Result<()> {
        let has = |manifest: &Manifest| {
            let slices = manifest.catalog.slices().map(|(id, ..)| id);
            let slices: BTreeSet<_> = slices.filter(|id| !manifest.gone.contains(id)).collect();
            (manifest.shard, slices)
        };
        let slices: BTreeMap<_, _> = self.shards.iter().map(has).collect();
        let first = self.shards.iter().find(|manifest| manifest.shard == 0);
        for holding in first.into_iter().flat_map(|manifest| manifest.catalog.map.values()) {
            for (id, shard) in holding.slices.iter().zip(&holding.shards) {
                if !slices.get(shard).is_some_and(|slices| slices.contains(id)) {
                    let why = format!(
                        "the shards' copies are from different times: shard {shard} lacks a part of the tensor. Run \
                         fastps checkpoint save, wait until its snapshots are copied, and fetch again"
                    );
                    return Err(Error::new(Kind::Config, why).tensor(holding.spec.name.clone()));
                }
            }
        }
        Ok(())
    }
}

impl Drop for Fetched {
    fn drop(&mut self) {
        // After the rename, nothing is here.
        let _ = remove(&self.unfinished);
    }
}
