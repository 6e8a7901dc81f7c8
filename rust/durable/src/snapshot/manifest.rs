//! What a snapshot says of itself, in its file `MANIFEST`.

use crate::catalog::Catalog;
use crate::files::checksum::crc32c;
use crate::files::output::Written;
use crate::frame::{Author, Origin};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const MANIFEST: &str = "MANIFEST";
pub(crate) const SLICES: &str = "slices";
pub(crate) const VALUES: &str = "parameters.safetensors";
pub(crate) const STATE: &str = "state.safetensors";
/// The files that the manifest speaks for.
pub(crate) const FILES: [&str; 3] = [SLICES, VALUES, STATE];

/// What a generation says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) format: u32,
    pub(crate) id: u64,
    pub(crate) shard: u32,
    pub(crate) shards: u32,
    pub(crate) generation: u64,
    /// The first segment of the log that it needs.
    pub(crate) log: u64,
    /// The server that wrote it, and whose files that one went on from; 0: unknown.
    #[serde(default)]
    pub(crate) incarnation: u64,
    #[serde(default)]
    pub(crate) predecessor: u64,
    /// How much of a segment behind it was durable when it was written: its number, and bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) durable: Option<(u64, u64)>,
    /// Seconds since 1970.
    pub(crate) written: u64,
    pub(crate) files: BTreeMap<String, Written>,
    /// Slices that were freed while it was written.
    pub(crate) gone: BTreeSet<u64>,
    /// What of it is of one moment, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cut: Option<Cut>,
    pub(crate) catalog: Catalog,
}

/// A cut over all shards: the tensors of a group at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// The same in the snapshots of all shards.
    pub id: u64,
    /// Whose `exact` tensors are of that moment; others are at versions of their own.
    pub group: String,
}

impl Manifest {
    /// One line of JSON, and one with its checksum.
    pub(crate) fn text(&self) -> serde_json::Result<Vec<u8>> {
        let mut text = serde_json::to_vec(self)?;
        let crc = crc32c(&text);
        text.extend_from_slice(format!("\ncrc32c {crc:08x}\n").as_bytes());
        Ok(text)
    }

    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let at = text.iter().position(|byte| *byte == b'\n')?;
        let (json, rest) = text.split_at(at);
        let expected = format!("\ncrc32c {:08x}\n", crc32c(json));
        if rest != expected.as_bytes() {
            return None;
        }
        serde_json::from_slice(json).ok()
    }

    pub(crate) fn origin(&self) -> Origin {
        Origin { id: self.id, shard: self.shard, shards: self.shards }
    }

    pub(crate) fn author(&self) -> Author {
        Author { incarnation: self.incarnation, predecessor: self.predecessor }
    }
}
