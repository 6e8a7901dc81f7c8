//! The manifest of a snapshot: its identity, the digests of its files, and the catalog.

use crate::catalog::Catalog;
use crate::files::checksum::{ChecksumWriter, with_checksum, without_checksum};
use crate::files::io::to_json;
use crate::files::output::{FileDigest, Output};
use crate::frame::{Author, Origin};
use fastps_core::error::Result;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;

pub(crate) const MANIFEST: &str = "MANIFEST";
pub(crate) const SLICES: &str = "slices";
pub(crate) const VALUES: &str = "parameters.safetensors";
pub(crate) const STATE: &str = "state.safetensors";
/// The files whose digests are in the manifest.
pub(crate) const FILES: [&str; 3] = [SLICES, VALUES, STATE];

/// Bytes that are read or written at a time.
const PART_BYTES: usize = 64 << 10;

/// The content of `MANIFEST`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Manifest<C = Arc<Catalog>> {
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
    /// Shared with the writer of the snapshot, and skipped where it is not needed: it may be large.
    pub(crate) catalog: C,
}

/// A consistent cut over all shards: the state of a group's tensors at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// The same in the snapshots of all shards.
    pub id: u64,
    /// The group whose `exact` tensors are at the cut. Other tensors have independent versions.
    pub group: String,
}

impl Manifest {
    /// One line of JSON, and a line with its checksum.
    pub(crate) fn text(&self) -> Result<Vec<u8>> {
        Ok(with_checksum(to_json(self)?))
    }

    /// Writes the same bytes as [`Manifest::text`], a part at a time.
    pub(crate) fn write(&self, to: &mut Output) -> Result<()> {
        to.append(|file| {
            let mut json = BufWriter::with_capacity(PART_BYTES, ChecksumWriter::new(file));
            serde_json::to_writer(&mut json, self)?;
            let (crc, file) = json.into_inner().map_err(std::io::IntoInnerError::into_error)?.finish();
            write!(file, "\ncrc32c {crc:08x}\n")
        })
    }

    /// Reads a file a part at a time. `None`: it is damaged.
    pub(crate) fn read(path: &Path) -> std::io::Result<Option<Self>> {
        read(path)
    }

    /// Reads a file without its catalog, which is empty then.
    pub(crate) fn read_head(path: &Path) -> std::io::Result<Option<Self>> {
        Ok(read::<Manifest<IgnoredAny>>(path)?.map(Manifest::with_empty_catalog))
    }

    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(without_checksum(text)?).ok()
    }

    pub(crate) fn origin(&self) -> Origin {
        Origin { id: self.id, shard: self.shard, shards: self.shards }
    }

    pub(crate) fn author(&self) -> Author {
        Author { incarnation: self.incarnation, predecessor: self.predecessor }
    }
}

impl Manifest<IgnoredAny> {
    fn with_empty_catalog(self) -> Manifest {
        let Self { format, id, shard, shards, generation, log, incarnation, predecessor, .. } = self;
        let Self { durable, written, files, gone, not_finite, cut, .. } = self;
        Manifest {
            format,
            id,
            shard,
            shards,
            generation,
            log,
            incarnation,
            predecessor,
            durable,
            written,
            files,
            gone,
            not_finite,
            cut,
            catalog: Arc::default(),
        }
    }
}

/// Reads the file twice, so that it is never in memory as a whole: for its checksum, and for its content.
fn read<M: DeserializeOwned>(path: &Path) -> std::io::Result<Option<M>> {
    let mut file = BufReader::with_capacity(PART_BYTES, File::open(path)?);
    let mut summed = ChecksumWriter::new(std::io::sink());
    loop {
        let part = file.fill_buf()?;
        let end = part.iter().position(|byte| *byte == b'\n');
        let length = end.unwrap_or(part.len());
        summed.write_all(&part[..length])?;
        let is_last = end.is_some() || part.is_empty();
        file.consume(length);
        if is_last {
            break;
        }
    }
    let bytes = summed.bytes;
    let expected = format!("\ncrc32c {:08x}\n", summed.finish().0);
    let mut rest = Vec::new();
    file.take(expected.len() as u64 + 1).read_to_end(&mut rest)?;
    if rest != expected.as_bytes() {
        return Ok(None);
    }
    let json = BufReader::with_capacity(PART_BYTES, File::open(path)?.take(bytes));
    match serde_json::from_reader(json) {
        Err(error) if error.is_io() => Err(error.into()),
        parsed => Ok(parsed.ok()),
    }
}
