//! What names the newest copy of a shard's snapshots, and the folders of copies.

use crate::frame::{check_format, random};
use fastps_core::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};

/// Names the newest copy of a shard's snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latest {
    /// The format of the snapshot's files.
    pub format: u32,
    /// The identifier of the directory that it is of, in hex.
    pub directory: String,
    /// The shard, and how many there are.
    pub shard: u32,
    /// Shards of the cluster.
    pub shards: u32,
    /// The snapshot's number.
    pub generation: u64,
    /// The folder that it lies in.
    pub folder: String,
    /// The checksum of its manifest.
    pub manifest_crc32c: u32,
}

impl Latest {
    /// As it is written: JSON.
    pub fn text(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|error| Error::new(Kind::Internal, error.to_string()))
    }

    /// Reads it, and checks that it names what may be looked for; `place` is for people.
    pub fn parse(text: &[u8], place: &str) -> Result<Self> {
        let read: Option<Self> = serde_json::from_slice(text).ok();
        let latest = read.filter(|latest| number_of(&latest.folder) == Some(latest.generation));
        let Some(latest) = latest else {
            return Err(Error::new(Kind::Internal, format!("{place} is damaged, or not written by fastps")));
        };
        check_format(latest.format, place)?;
        Ok(latest)
    }
}

/// A name for the folder of a snapshot's copy. No two are the same, so that what two servers write is never mixed.
pub fn new_folder(generation: u64) -> Result<String> {
    Ok(format!("generation-{generation:08}-{:016x}", random()?))
}

/// The number of the snapshot in a folder, if the name is one of [`new_folder`].
pub fn number_of(folder: &str) -> Option<u64> {
    let (number, mark) = folder.strip_prefix("generation-")?.split_once('-')?;
    let digits = number.len() >= 8 && number.bytes().all(|byte| byte.is_ascii_digit());
    let hex = mark.len() == 16 && mark.bytes().all(|byte| byte.is_ascii_hexdigit());
    number.parse().ok().filter(|number| digits && hex && *number < 1 << 62)
}
