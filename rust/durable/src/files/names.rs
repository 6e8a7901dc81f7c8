//! The names in a data directory and in the directory of a shard.

use crate::files::io::failed;
use fastps_core::error::{Error, Kind, Result};
use std::path::{Path, PathBuf};

const SHARD: &str = "shard-";
pub(super) const GENERATION: &str = "generation-";
pub(super) const SEGMENT: &str = "log-";
/// Begins the names of what was put out of the way.
pub(crate) const DAMAGED: &str = "damaged-";
/// Ends the names of what is not complete.
pub(crate) const UNFINISHED: &str = ".tmp";

/// The directory of a shard in a data directory.
pub fn shard_folder(data_dir: &Path, shard: u32) -> PathBuf {
    data_dir.join(format!("{SHARD}{shard}"))
}

/// The shards that a data directory has folders of, ascending.
pub(crate) fn shards_in(data_dir: &Path) -> Result<Vec<u32>> {
    let is_shard = |shard: &u64| shard_folder(data_dir, *shard as u32).is_dir();
    let shards = numbered(&list(data_dir)?, SHARD).into_iter().filter(is_shard);
    let shards: Vec<_> = shards.filter_map(|shard| u32::try_from(shard).ok()).collect();
    if shards.is_empty() {
        let message = format!("{} has no shard-0, shard-1, ... in it", data_dir.display());
        return Err(Error::new(Kind::Config, message)
            .expected("what a server is told by --data-dir", data_dir.display()));
    }
    Ok(shards)
}

/// Where a generation lies in a shard's directory.
pub(crate) fn generation_in(path: &Path, number: u64) -> PathBuf {
    path.join(format!("{GENERATION}{number:08}"))
}

/// The numbers of the generations in a shard's directory, ascending.
pub(crate) fn generations_in(path: &Path) -> Result<Vec<u64>> {
    Ok(numbered(&list(path)?, GENERATION))
}

pub(super) fn list(path: &Path) -> Result<Vec<String>> {
    let fail = |error: std::io::Error| failed("read", path, &error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(fail)? {
        // No name of ours is anything but ASCII.
        names.extend(entry.map_err(fail)?.file_name().into_string().ok());
    }
    Ok(names)
}

pub(super) fn numbered(names: &[String], prefix: &str) -> Vec<u64> {
    let number = |name: &String| {
        let digits = name.strip_prefix(prefix)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
    };
    // There is always a next one.
    let mut numbers: Vec<u64> = names.iter().filter_map(number).filter(|number| *number < 1 << 62).collect();
    numbers.sort_unstable();
    numbers
}
