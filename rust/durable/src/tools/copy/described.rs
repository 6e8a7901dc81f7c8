//! The manifest of a snapshot, on disk or in a bucket.

use crate::files::checksum::crc32c;
use crate::frame::check_format;
use crate::owner::LogPosition;
use crate::snapshot::manifest::{Cut, FILES, Manifest};
use crate::tools::copy::latest::Latest;
use fastps_core::error::{Error, Kind, Result};

/// A file of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// File name.
    pub name: &'static str,
    /// Length.
    pub bytes: u64,
    /// CRC-32C.
    pub crc32c: u32,
}

/// The manifest of a snapshot, on disk or in a bucket.
#[derive(Clone, Debug)]
pub struct Described {
    pub(super) manifest: Manifest,
    text: Vec<u8>,
}

impl Described {
    /// Parses a manifest. `place` appears in errors.
    pub fn parse(text: Vec<u8>, place: &str) -> Result<Self> {
        let damaged = |why: &str| Err(Error::new(Kind::Internal, format!("{place} {why}")));
        let Some(manifest) = Manifest::parse(&text) else {
            return damaged("is damaged: its checksum is wrong");
        };
        check_format(manifest.format, place)?;
        if FILES.iter().any(|file| !manifest.files.contains_key(*file)) {
            return damaged("does not list all files");
        }
        Ok(Self { manifest, text })
    }

    /// The bytes of the manifest.
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// CRC-32C of the manifest.
    pub fn crc32c(&self) -> u32 {
        crc32c(&self.text)
    }

    /// The snapshot's number.
    pub fn number(&self) -> u64 {
        self.manifest.generation
    }

    /// The index of its shard, and the number of shards.
    pub fn shard(&self) -> (u32, u32) {
        (self.manifest.shard, self.manifest.shards)
    }

    /// The place in the log from which it is replayed after the snapshot.
    pub fn log(&self) -> LogPosition {
        LogPosition { segment: self.manifest.log, offset: 0 }
    }

    /// Incarnation of the server that wrote the snapshot, and began that segment.
    pub fn incarnation(&self) -> u64 {
        self.manifest.incarnation
    }

    /// Time of writing, in seconds since 1970.
    pub fn written(&self) -> u64 {
        self.manifest.written
    }

    /// Bytes of its files, according to the manifest.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.values().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// The consistent cut that the snapshot belongs to.
    pub fn cut(&self) -> Option<&Cut> {
        self.manifest.cut.as_ref()
    }

    /// Number of slices.
    pub fn slices(&self) -> u64 {
        self.manifest.catalog.slices().count().saturating_sub(self.manifest.gone.len()) as u64
    }

    /// Its files, without the manifest.
    pub fn parts(&self) -> impl Iterator<Item = Part> {
        let part = |name| {
            let written = self.manifest.files.get(name)?;
            Some(Part { name, bytes: written.bytes, crc32c: written.crc32c })
        };
        FILES.into_iter().filter_map(part)
    }

    /// The `latest` file of a copy in `folder`.
    pub fn latest(&self, folder: &str) -> Latest {
        let Manifest { format, id, shard, shards, generation, .. } = self.manifest;
        let (directory, folder) = (format!("{id:016x}"), folder.to_owned());
        Latest {
            format,
            directory,
            shard,
            shards,
            generation,
            folder,
            manifest_crc32c: self.crc32c(),
            term: 0,
        }
    }
}
