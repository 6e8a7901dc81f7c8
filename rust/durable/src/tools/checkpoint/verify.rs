//! Verifying every byte of a data directory, and naming the remedy for each damage.

use crate::files::directory::Directory;
use crate::files::names::{shard_folder, shards_in};
use crate::recovery::history::History;
use crate::recovery::{self, Settings};
use crate::snapshot::generation::Generation;
use crate::tools::checkpoint::complete::losses;
use fastps_core::error::{Error, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

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

/// Reads every byte of each shard in a data directory.
pub fn verify(data_dir: &Path) -> Result<Vec<Verified>> {
    let verify = |shard: u32| {
        let verified = verify_shard(data_dir, shard)?;
        // A server may have removed files during the first attempt.
        if verified.damages.is_empty() { Ok(verified) } else { verify_shard(data_dir, shard) }
    };
    let shards = shards_in(data_dir)?;
    let mut verified: Vec<_> = shards.iter().copied().map(verify).collect::<Result<_>>()?;
    for (shard, what) in losses(data_dir, &shards)? {
        let damage = format!(
            "{what}; a server refuses to start: replace the directory by its backup, or start once with \
             --accept-loss to drop what is incomplete"
        );
        if let Some(one) = verified.iter_mut().find(|one| one.shard == shard) {
            one.damages.push(damage);
        } else {
            let path = shard_folder(data_dir, shard);
            verified.push(Verified { shard, path, whole: Vec::new(), damages: vec![damage] });
        }
    }
    verified.sort_by_key(|one| one.shard);
    Ok(verified)
}

/// The snapshots of a shard, newest first.
#[derive(Default)]
struct VerifiedSnapshots {
    /// Numbers of intact snapshots, each with the first segment it needs.
    intact: Vec<(u64, u64)>,
    /// Numbers of damaged snapshots, and their faults.
    damaged: Vec<(u64, String)>,
    /// Number of shards in the cluster, according to the newest intact snapshot.
    shards: Option<u32>,
}

impl VerifiedSnapshots {
    fn read(directory: &Directory) -> Result<Self> {
        let mut verified = Self::default();
        for number in directory.generations()?.into_iter().rev() {
            let generation = Generation::open(directory.path(), number).map_err(Error::from);
            match generation.and_then(|generation| generation.verify().map(|()| generation)) {
                Ok(generation) => {
                    verified.shards = verified.shards.or(Some(generation.manifest.shards));
                    verified.intact.push((number, generation.manifest.log));
                }
                Err(error) => verified.damaged.push((number, error.message.clone())),
            }
        }
        Ok(verified)
    }

    fn newest(&self) -> Option<(u64, u64)> {
        self.intact.first().copied()
    }

    /// A start's handling of a damaged snapshot.
    fn remedy(&self, damaged: u64, log_is_complete: bool) -> String {
        match self.newest() {
            Some((intact, _)) if intact > damaged => {
                format!("a start uses snapshot {intact} and does not need it")
            }
            Some((intact, _)) => {
                format!("a start sets it aside and uses snapshot {intact} and the log after it")
            }
            None if log_is_complete => "a start replays the whole log instead".to_owned(),
            None => "no snapshot is intact: restore the directory from a backup".to_owned(),
        }
    }

    /// A start's handling of a damaged segment.
    fn segment_remedy(&self, damaged: u64) -> String {
        match self.newest() {
            Some((intact, log)) if damaged < log => {
                format!("a start uses snapshot {intact} and does not need it")
            }
            _ => "a server refuses to start: restore the directory from a backup, or start once with \
                  --accept-loss to keep only the changes before it"
                .to_owned(),
        }
    }
}

fn verify_shard(data_dir: &Path, shard: u32) -> Result<Verified> {
    let path = shard_folder(data_dir, shard);
    let directory = Directory::unlocked(&path);
    let snapshots = VerifiedSnapshots::read(&directory)?;
    let first_segment = directory.segments()?.first().copied();
    let log_is_complete = first_segment == Some(1);
    let damaged = snapshots.damaged.iter();
    let mut damages: Vec<_> = damaged
        .map(|(number, why)| format!("{why}; {}", snapshots.remedy(*number, log_is_complete)))
        .collect();
    let shards = match snapshots.shards {
        Some(shards) => shards,
        None => recovery::origin(&directory)?.map_or(0, |origin| origin.shards),
    };
    let settings = Settings {
        path: path.clone(),
        shard,
        shards,
        keep: 1,
        keep_for: Duration::ZERO,
        history: 0,
        accept_loss: false,
    };
    let oldest = snapshots.intact.last().map(|(_, log)| *log);
    let first = oldest.or_else(|| first_segment.filter(|_| log_is_complete));
    for (number, why) in recovery::check_log(&directory, &settings, first)? {
        damages.push(format!("{why}; {}", snapshots.segment_remedy(number)));
    }
    damages.extend(recovery::fork(&History::of(&directory)?, &directory).map(|why| {
        format!(
            "{why}; a server refuses to start: move the files of one server away, or start once with \
             --accept-loss"
        )
    }));
    let whole = snapshots.intact.into_iter().map(|(number, _)| number).collect();
    Ok(Verified { shard, path, whole, damages })
}
