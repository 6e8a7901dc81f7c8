//! Listing the snapshots and the log of each shard, without reading arrays.

use crate::files::directory::Directory;
use crate::files::io::failed;
use crate::files::names::{DAMAGED_PREFIX, shard_folder, shards_in};
use crate::recovery;
use crate::snapshot::generation::{self, Generation};
use crate::snapshot::manifest::Cut;
use fastps_core::error::{Error, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The files of a shard.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// Index of the shard.
    pub shard: u32,
    /// Number of shards in its cluster, if its files say so.
    pub shards: Option<u32>,
    /// The shard's directory.
    pub path: PathBuf,
    /// Its snapshots, newest first.
    pub snapshots: Vec<Snapshot>,
    /// Number of log segments.
    pub log_segments: u64,
    /// Bytes of the log segments.
    pub log_bytes: u64,
    /// Names of files that a start set aside.
    pub put_aside: Vec<String>,
}

/// A snapshot, judged without reading its arrays.
#[derive(Clone, Debug, Serialize)]
pub struct Snapshot {
    /// The snapshot's number; later snapshots have higher numbers.
    pub number: u64,
    /// Fault of the snapshot; `None` if manifest and list of slices are intact, and all files have their full
    /// length.
    pub problem: Option<String>,
    /// Time of writing, in seconds since 1970.
    pub written: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Number of slices.
    pub slices: u64,
    /// Sum of the slices' versions.
    pub versions: u64,
    /// Sum of the slices' optimizer steps.
    pub steps: u64,
    /// The consistent cut that the snapshot belongs to.
    pub cut: Option<Cut>,
    /// Tensors with values or state that are not finite.
    pub not_finite: Vec<String>,
}

/// Lists the files of each shard in a data directory.
pub fn list(data_dir: &Path) -> Result<Vec<Listed>> {
    shards_in(data_dir)?.into_iter().map(|shard| list_shard(data_dir, shard)).collect()
}

fn list_shard(data_dir: &Path, shard: u32) -> Result<Listed> {
    let path = shard_folder(data_dir, shard);
    let directory = Directory::unlocked(&path);
    let numbers = directory.generations()?;
    let snapshots = numbers.into_iter().rev().map(|number| glance(&path, number)).collect();
    let segments = directory.segments()?;
    let mut log_bytes = 0;
    for number in &segments {
        let name = directory.segment(*number);
        log_bytes += std::fs::metadata(&name).map_err(|error| failed("read", &name, &error))?.len();
    }
    let mut put_aside = directory.names()?;
    put_aside.retain(|name| name.starts_with(DAMAGED_PREFIX));
    put_aside.sort();
    let shards = recovery::origin(&directory)?.map(|origin| origin.shards);
    let log_segments = segments.len() as u64;
    Ok(Listed { shard, shards, path, snapshots, log_segments, log_bytes, put_aside })
}

fn glance(path: &Path, number: u64) -> Snapshot {
    let whole = Generation::open(path, number).and_then(|generation| {
        let (versions, steps) = generation.changes()?;
        let summary = generation.summary();
        let generation::Summary { written, bytes, slices, not_finite, .. } = summary;
        let cut = generation.manifest.cut.clone();
        Ok(Snapshot { number, problem: None, written, bytes, slices, versions, steps, cut, not_finite })
    });
    whole.unwrap_or_else(|unusable| {
        let problem = Some(Error::from(unusable).message.clone());
        Snapshot {
            number,
            problem,
            written: 0,
            bytes: 0,
            slices: 0,
            versions: 0,
            steps: 0,
            cut: None,
            not_finite: Vec::new(),
        }
    })
}
