//! The manifest of a snapshot: its identity, the digests of its files, and the catalog.

use crate::catalog::Catalog;
use crate::files::checksum::crc32c;
use crate::files::io::to_json;
use crate::files::output::FileDigest;
use crate::frame::{Author, Origin};
use fastps_core::error::Result;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const MANIFEST: &str = "MANIFEST";
pub(crate) const SLICES: &str = "slices";
pub(crate) const VALUES: &str = "parameters.safetensors";
pub(crate) const STATE: &str = "state.safetensors";
/// The files whose digests are in the manifest.
pub(crate) const FILES: [&str; 3] = [SLICES, VALUES, STATE];

/// The content of `MANIFEST`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) format: u32,
    pub(crate) id: u64,
    pub(crate) shard: u32,
    pub(crate) shards: u32,
    pub(crate) generation: u64,
    /// The first log segment that must be replayed after this snapshot.
    pub(crate) log: u64,
    /// The server that wrote the snapshot, and the one it took the files over from. 0: unknown.
    #[serde(default)]
    pub(crate) incarnation: u64,
    #[serde(default)]
    pub(crate) predecessor: u64,
    /// A log segment and the number of its bytes that were durable when the manifest was written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) durable: Option<(u64, u64)>,
    /// Seconds since 1970.
    pub(crate) written: u64,
    pub(crate) files: BTreeMap<String, FileDigest>,
    /// Slices that were freed while the snapshot was written.
    pub(crate) gone: BTreeSet<u64>,
    /// Tensors with values or state that are not finite.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) not_finite: BTreeSet<String>,
    /// The cut that was requested, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cut: Option<Cut>,
    pub(crate) catalog: Catalog,
}

/// A consistent cut over all shards: the state of a group's tensors at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// The same in the snapshots of all shards.
    pub id: u64,
    /// The group whose `exact` tensors are at the cut. Other tensors are at versions of their own.
    pub group: String,
}

impl Manifest {
    /// One line of JSON, and a line with its checksum.
    pub(crate) fn text(&self) -> Result<Vec<u8>> {
        let mut text = to_json(self)?;
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
