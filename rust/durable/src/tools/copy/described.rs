//! What a snapshot's manifest says, wherever it lies.

use crate::files::checksum::crc32c;
use crate::frame::check_format;
use crate::snapshot::manifest::{Cut, FILES, Manifest};
use crate::tools::copy::latest::Latest;
use fastps_core::error::{Error, Kind, Result};

/// One file of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its name.
    pub name: &'static str,
    /// Its length.
    pub bytes: u64,
    /// Its checksum, CRC-32C.
    pub crc32c: u32,
}

/// What a snapshot's manifest says, wherever it lies.
#[derive(Clone, Debug)]
pub struct Described {
    pub(super) manifest: Manifest,
    text: Vec<u8>,
}

impl Described {
    /// Reads a manifest; `place` is for people.
    pub fn parse(text: Vec<u8>, place: &str) -> Result<Self> {
        let damaged = |why: &str| Err(Error::new(Kind::Internal, format!("{place} {why}")));
        let Some(manifest) = Manifest::parse(&text) else {
            return damaged("is damaged: its checksum is wrong");
        };
        check_format(manifest.format, place)?;
        if FILES.iter().any(|file| !manifest.files.contains_key(*file)) {
            return damaged("does not tell of all files");
        }
        Ok(Self { manifest, text })
    }

    /// The bytes of the manifest.
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// Their checksum.
    pub fn crc32c(&self) -> u32 {
        crc32c(&self.text)
    }

    /// The snapshot's number.
    pub fn number(&self) -> u64 {
        self.manifest.generation
    }

    /// The index of its shard, and how many there are.
    pub fn shard(&self) -> (u32, u32) {
        (self.manifest.shard, self.manifest.shards)
    }

    /// When it was written, in seconds since 1970.
    pub fn written(&self) -> u64 {
        self.manifest.written
    }

    /// Bytes of its files, as it claims.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.values().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// What of it is of one moment in all shards, if that was asked for.
    pub fn cut(&self) -> Option<&Cut> {
        self.manifest.cut.as_ref()
    }

    /// Slices in it.
    pub fn slices(&self) -> u64 {
        self.manifest.catalog.slices().count().saturating_sub(self.manifest.gone.len()) as u64
    }

    /// Its files beside the manifest.
    pub fn parts(&self) -> impl Iterator<Item = Part> {
        let part = |name| {
            let written = self.manifest.files.get(name)?;
            Some(Part { name, bytes: written.bytes, crc32c: written.crc32c })
        };
        FILES.into_iter().filter_map(part)
    }

    /// What names its copy in a folder.
    pub fn latest(&self, folder: &str) -> Latest {
        let Manifest { format, id, shard, shards, generation, .. } = self.manifest;
        let (directory, folder) = (format!("{id:016x}"), folder.to_owned());
        Latest { format, directory, shard, shards, generation, folder, manifest_crc32c: self.crc32c() }
    }
}
