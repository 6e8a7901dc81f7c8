//! The `latest` file, which names the newest copy of a shard's snapshots, and the names of copies.

use crate::files::io::to_json;
use crate::frame::{FORMAT, check_format, random_id};
use crate::tools::copy::described::Described;
use fastps_core::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};

/// The `latest` file: the newest copy of a shard's snapshots. Before there is one, the shard's first owner writes a
/// fence in its place, which names none: else a copy that an owner of an older term is still writing would be the first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latest {
    /// Format of the snapshot's files.
    pub format: u32,
    /// Identifier of the snapshot's directory, in hex.
    pub directory: String,
    /// Index of the shard.
    pub shard: u32,
    /// Number of shards in the cluster.
    pub shards: u32,
    /// The snapshot's number.
    pub generation: u64,
    /// The folder of the copy; empty: this is a fence.
    pub folder: String,
    /// CRC-32C of its manifest.
    pub manifest_crc32c: u32,
    /// The term of the shard's owner that wrote or marked it; 0: its servers have no owner's lease. A server of
    /// an older term replaces it no more.
    #[serde(default, skip_serializing_if = "is_without_owner")]
    pub term: u64,
}

/// The format of a `latest` with a term. Versions of fastps that know no terms refuse it, and replace nothing.
const TERM_FORMAT: u32 = FORMAT + 1;

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_without_owner(term: &u64) -> bool {
    *term == 0
}

impl Latest {
    /// What stands in place of the first copy, by the owner in this term.
    pub fn fence(shard: u32, term: u64) -> Self {
        let (directory, folder) = (String::new(), String::new());
        let (format, shards, generation, manifest_crc32c) = (TERM_FORMAT, 0, 0, 0);
        Self { format, directory, shard, shards, generation, folder, manifest_crc32c, term }
    }

    /// Returns whether it names no copy.
    pub fn is_fence(&self) -> bool {
        self.folder.is_empty() && self.generation == 0 && self.term > 0
    }

    /// The same, of the owner in this term; 0: of no owner.
    pub fn in_term(self, term: u64) -> Self {
        let format = if term > 0 { TERM_FORMAT } else { self.format };
        Self { format, term, ..self }
    }

    /// Returns whether it names the snapshot of this manifest.
    pub fn names(&self, described: &Described) -> bool {
        let of = described.latest(&self.folder);
        Self { format: of.format, term: of.term, ..self.clone() } == of
    }

    /// Encodes it as JSON.
    pub fn text(&self) -> Result<Vec<u8>> {
        to_json(self)
    }

    /// Parses and checks it. `place` appears in errors.
    pub fn parse(text: &[u8], place: &str) -> Result<Self> {
        let read: Option<Self> = serde_json::from_slice(text).ok();
        let is_whole =
            |latest: &Self| latest.is_fence() || number_of(&latest.folder) == Some(latest.generation);
        let latest = read.filter(is_whole);
        let Some(latest) = latest else {
            return Err(Error::new(
                Kind::Internal,
                format!("{place} is damaged, or was not written by fastps"),
            ));
        };
        if latest.format != TERM_FORMAT || latest.term == 0 {
            check_format(latest.format, place)?;
        }
        Ok(latest)
    }
}

/// A unique name for the folder of a copy, so that copies by two servers never mix.
pub fn new_folder(generation: u64) -> Result<String> {
    Ok(format!("generation-{generation:08}-{:016x}", random_id()?))
}

/// The snapshot number in a name made by [`new_folder`].
pub fn number_of(folder: &str) -> Option<u64> {
    let (number, mark) = folder.strip_prefix("generation-")?.split_once('-')?;
    let digits = number.len() >= 8 && number.bytes().all(|byte| byte.is_ascii_digit());
    let hex = mark.len() == 16 && mark.bytes().all(|byte| byte.is_ascii_hexdigit());
    number.parse().ok().filter(|number| digits && hex && *number < 1 << 62)
}
