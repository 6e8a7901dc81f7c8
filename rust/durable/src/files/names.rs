//! Names of directories and files: of a data directory, of a shard's directory, of snapshots.

use crate::files::io::failed;
use fastps_core::error::{Error, Kind, Result};
use std::path::{Path, PathBuf};

const SHARD_PREFIX: &str = "shard-";
pub(super) const GENERATION_PREFIX: &str = "generation-";
pub(super) const SEGMENT_PREFIX: &str = "log-";
/// Prefix of files that were set aside because they cannot be used.
pub(crate) const DAMAGED_PREFIX: &str = "damaged-";
/// Suffix of files that are not complete.
pub(crate) const UNFINISHED_SUFFIX: &str = ".tmp";

/// The directory of a shard in a data directory.
pub fn shard_folder(data_dir: &Path, shard: u32) -> PathBuf {
    data_dir.join(format!("{SHARD_PREFIX}{shard}"))
}

/// The shards that a data directory contains, ascending.
pub(crate) fn shards_in(data_dir: &Path) -> Result<Vec<u32>> {
    let is_shard = |shard: &u64| shard_folder(data_dir, *shard as u32).is_dir();
    let names = list(data_dir).map_err(|mut error| {
        if matches!(data_dir.try_exists(), Ok(false)) {
            error.kind = Kind::Config; // a misspelt name
        }
        error
    })?;
    let shards = numbered(&names, SHARD_PREFIX).into_iter().filter(is_shard);
    let shards: Vec<_> = shards.filter_map(|shard| u32::try_from(shard).ok()).collect();
    if shards.is_empty() {
        let message = format!("{} contains no shard-0, shard-1, ...", data_dir.display());
        return Err(
            Error::new(Kind::Config, message).expected("the --data-dir of a server", data_dir.display())
        );
    }
    Ok(shards)
}

/// The path of a snapshot in a shard's directory.
pub(crate) fn generation_in(path: &Path, number: u64) -> PathBuf {
    path.join(format!("{GENERATION_PREFIX}{number:08}"))
}

/// The numbers of the snapshots in a shard's directory, ascending.
pub(crate) fn generations_in(path: &Path) -> Result<Vec<u64>> {
    Ok(numbered(&list(path)?, GENERATION_PREFIX))
}

pub(super) fn list(path: &Path) -> Result<Vec<String>> {
    let fail = |error: std::io::Error| failed("read", path, &error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(fail)? {
        // All names that fastps creates are ASCII.
        names.extend(entry.map_err(fail)?.file_name().into_string().ok());
    }
    Ok(names)
}

pub(super) fn numbered(names: &[String], prefix: &str) -> Vec<u64> {
    let number = |name: &String| {
        let digits = name.strip_prefix(prefix)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
    };
    // Leaves room for a next number.
    let mut numbers: Vec<u64> = names.iter().filter_map(number).filter(|number| *number < 1 << 62).collect();
    numbers.sort_unstable();
    numbers
}
