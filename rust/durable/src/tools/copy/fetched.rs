//! A data directory that is made of copies.

use crate::files::directory::Directory;
use crate::files::io::{failed, sync_directory};
use crate::files::names::{generation_in, shard_folder};
use crate::files::output::Output;
use crate::files::removal::remove;
use crate::frame::{Author, random};
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

/// A data directory that is made of fetched snapshots, one of each shard. It has its name when all of it is durable; if that
/// is not to be, nothing is left of it.
#[derive(Debug)]
pub struct Fetched {
    target: PathBuf,
    unfinished: PathBuf,
    shards: Vec<Manifest>,
}

impl Fetched {
    /// The directory must be new, or empty.
    pub fn begin(target: &Path) -> Result<Self> {
        let unfinished = begin(target)?;
        let made = DirBuilder::new().mode(0o700).create(&unfinished);
        made.map_err(|error| failed("make", &unfinished, &error))?;
        Ok(Self { target: target.to_owned(), unfinished, shards: Vec::new() })
    }

    /// An empty folder for the files of a shard's snapshot, beside its manifest.
    pub fn folder(&self, described: &Described) -> Result<PathBuf> {
        let shard = shard_folder(&self.unfinished, described.manifest.shard);
        remove(&shard)?;
        let folder = generation_in(&shard, described.manifest.generation);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|error| failed("make", &folder, &error))?;
        Ok(folder)
    }

    /// Completes what [`Fetched::folder`] gave: the files are there and durable. From here on it is a directory of its own, which
    /// remembers the folder that it was made of.
    pub fn complete(&mut self, described: &Described, folder: &str) -> Result<()> {
        let mut manifest = described.manifest.clone();
        manifest.id = random()?;
        let author = Author { incarnation: random()?, predecessor: 0 };
        (manifest.incarnation, manifest.predecessor) = (author.incarnation, author.predecessor);
        manifest.durable = None;
        let path = shard_folder(&self.unfinished, manifest.shard);
        let directory = Directory::open(&path)?;
        let generation = directory.generation(manifest.generation);
        let unwritable = |error: serde_json::Error| Error::new(Kind::Internal, error.to_string());
        let mut output = Output::create(&generation.join(MANIFEST))?;
        output.write(&manifest.text().map_err(unwritable)?)?;
        output.finish()?;
        sync_directory(&generation)?;
        let Manifest { log, generation, .. } = manifest;
        // The log behind it begins here, with nothing in it: what came later is not part of the copy.
        Segment::create(&directory, log, false, manifest.origin(), author)?;
        note_copied(&path, folder)?;
        Generation::open(&path, generation)?;
        self.shards.push(manifest);
        Ok(())
    }

    /// Gives the directory its name, if the shards' snapshots go together.
    pub fn finish(self) -> Result<()> {
        self.check()?;
        sync_directory(&self.unfinished)?;
        let renamed = std::fs::rename(&self.unfinished, &self.target);
        renamed.map_err(|error| failed("rename", &self.unfinished, &error))?;
        sync_directory(parent(&self.target))
    }

    /// A tensor that shard 0 has in its map must be whole: each shard's snapshot is of its own time.
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
                        "the copies of the shards are of different times: shard {shard} lacks a part of the tensor. Have all \
                         shards write a snapshot (fastps checkpoint save), and fetch again when it is copied"
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
        // Once it has its name, nothing is here.
        let _ = remove(&self.unfinished);
    }
}
