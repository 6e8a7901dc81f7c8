//! Lists and verifies the content of a data directory. Takes no lock and changes nothing, so a server may be
//! running.

use crate::files::directory::Directory;
use crate::files::io::failed;
use crate::files::names::{DAMAGED_PREFIX, shard_folder, shards_in};
use crate::recovery::history::History;
use crate::recovery::{self, Settings};
use crate::snapshot::generation::{self, Generation};
use crate::snapshot::manifest::Cut;
use fastps_core::error::{Error, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

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
    /// What is wrong. `None`: manifest and list of slices are intact, and all files have their full length.
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
}

/// The result of reading every byte of a shard.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Verified {
    /// Index of the shard.
    pub shard: u32,
    /// The shard's directory.
    pub path: PathBuf,
    /// Intact snapshots, newest first.
    pub whole: Vec<u64>,
    /// Each damage, with its remedy.
    pub damages: Vec<String>,
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
        let generation::Summary { written, bytes, slices, .. } = summary;
        let cut = generation.manifest.cut.clone();
        Ok(Snapshot { number, problem: None, written, bytes, slices, versions, steps, cut })
    });
    whole.unwrap_or_else(|unusable| {
        let problem = Some(Error::from(unusable).message.clone());
        Snapshot { number, problem, written: 0, bytes: 0, slices: 0, versions: 0, steps: 0, cut: None }
    })
}

/// Reads every byte of each shard in a data directory.
pub fn verify(data_dir: &Path) -> Result<Vec<Verified>> {
    let verify = |shard| {
        let verified = verify_shard(data_dir, shard)?;
        // A server may have removed files during the first attempt.
        if verified.damages.is_empty() { Ok(verified) } else { verify_shard(data_dir, shard) }
    };
    shards_in(data_dir)?.into_iter().map(verify).collect()
}

fn verify_shard(data_dir: &Path, shard: u32) -> Result<Verified> {
    let path = shard_folder(data_dir, shard);
    let directory = Directory::unlocked(&path);
    let (mut whole, mut damaged, mut shards) = (Vec::new(), Vec::new(), None);
    let numbers = directory.generations()?;
    for number in numbers.iter().copied().rev() {
        let verified = Generation::open(&path, number).map_err(Error::from).and_then(|generation| {
            generation.verify()?;
            Ok(generation)
        });
        match verified {
            Ok(generation) => {
                shards = shards.or(Some(generation.manifest.shards));
                whole.push((number, generation.manifest.log));
            }
            Err(error) => damaged.push((number, error.message.clone())),
        }
    }
    let segments = directory.segments()?;
    let reaches_back = segments.first() == Some(&1);
    let newest = whole.first().copied();
    let mut damages: Vec<_> = damaged
        .into_iter()
        .map(|(number, why)| {
            let way_out = match newest {
                Some((whole, _)) if whole > number => {
                    format!("a start uses snapshot {whole} and does not need it")
                }
                Some((whole, _)) => {
                    format!("a start sets it aside and uses snapshot {whole} and the log after it")
                }
                None if reaches_back => "a start replays the whole log instead".to_owned(),
                None => "no snapshot is intact: restore the directory from a backup".to_owned(),
            };
            format!("{why}; {way_out}")
        })
        .collect();
    let shards = match shards {
        Some(shards) => shards,
        None => recovery::origin(&directory)?.map_or(0, |origin| origin.shards),
    };
    let settings =
        Settings { path: path.clone(), shard, shards, keep: 1, keep_for: Duration::ZERO, accept_loss: false };
    let oldest = whole.last().map(|(_, log)| *log);
    let first = oldest.or_else(|| segments.first().copied().filter(|_| reaches_back));
    for (number, why) in recovery::check_log(&directory, &settings, first)? {
        let way_out = match newest {
            Some((whole, log)) if number < log => format!("a start uses snapshot {whole} and does not need it"),
            _ => "a server refuses to start: restore the directory from a backup, or start once with --accept-loss to keep only the changes before it".to_owned(),
        };
        damages.push(format!("{why}; {way_out}"));
    }
    damages.extend(recovery::fork(&History::of(&directory)?, &directory).map(|why| {
        format!("{why}; a server refuses to start: move the files of one server away, or start once with --accept-loss")
    }));
    let whole = whole.into_iter().map(|(number, _)| number).collect();
    Ok(Verified { shard, path, whole, damages })
}
