//! A generation is one snapshot on disk. All bytes are verified before they are used.

use crate::files::checksum::ChecksumWriter;
use crate::files::damage::Unusable;
use crate::files::io::failed;
use crate::files::names::{generation_in, generations_in};
use crate::files::output::FileDigest;
use crate::frame::{self, Content};
use crate::snapshot::manifest::{FILES, MANIFEST, Manifest, SLICES};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::slice::Standing;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Bytes read at a time.
const READ_CHUNK_BYTES: usize = 1 << 20;

/// A snapshot on disk whose manifest is intact.
#[derive(Debug)]
pub struct Generation {
    pub(super) path: PathBuf,
    pub(crate) manifest: Manifest,
}

/// Summary of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The snapshot's number; later snapshots have higher numbers.
    pub generation: u64,
    /// The snapshot's directory.
    pub path: PathBuf,
    /// The index of its shard, and the number of shards.
    pub shard: (u32, u32),
    /// Time of writing, in seconds since 1970.
    pub written: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Number of slices.
    pub slices: u64,
    /// Tensors with values or state that are not finite.
    pub not_finite: Vec<String>,
}

impl Generation {
    /// Reads the manifest, and checks that all files exist with their full length.
    pub(crate) fn open(directory: &Path, number: u64) -> Result<Self, Unusable> {
        Self::open_with(directory, number, Manifest::read)
    }

    /// The same without the catalog, which is empty then.
    pub(crate) fn open_head(directory: &Path, number: u64) -> Result<Self, Unusable> {
        Self::open_with(directory, number, Manifest::read_head)
    }

    fn open_with(
        directory: &Path,
        number: u64,
        read: impl FnOnce(&Path) -> std::io::Result<Option<Manifest>>,
    ) -> Result<Self, Unusable> {
        let path = generation_in(directory, number);
        let name = path.join(MANIFEST);
        let damaged = |why: &str| Err(Unusable::Damaged(format!("{} {why}", name.display())));
        let manifest = match read(&name) {
            Ok(Some(manifest)) => manifest,
            Ok(None) => return damaged("is damaged: its checksum is wrong"),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return damaged("is missing"),
            Err(error) => return Err(failed("read", &name, &error).into()),
        };
        frame::check_format(manifest.format, &name.display().to_string())?;
        if manifest.generation != number {
            return damaged(&format!("is the manifest of generation {}", manifest.generation));
        }
        Self::of(path, manifest)
    }

    /// The snapshot with this manifest; checks that all files exist with their full length.
    pub(super) fn of(path: PathBuf, manifest: Manifest) -> Result<Self, Unusable> {
        let generation = Self { path, manifest };
        for file in FILES {
            let Some(written) = generation.manifest.files.get(file) else {
                return generation.damaged(MANIFEST, &format!("does not list {file}"));
            };
            let path = generation.path.join(file);
            match std::fs::metadata(&path) {
                Ok(found) if found.len() == written.bytes => {}
                Ok(found) => {
                    return Err(Unusable::Damaged(format!(
                        "{} has the wrong length: expected {} bytes, got {}",
                        path.display(),
                        written.bytes,
                        found.len()
                    )));
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    return Err(Unusable::Damaged(format!("{} is missing", path.display())));
                }
                Err(error) => return Err(failed("read", &path, &error).into()),
            }
        }
        Ok(generation)
    }

    /// The snapshots in a shard's directory, newest first; for each, whether its manifest and file lengths
    /// are intact. Takes no lock and changes nothing.
    pub fn list(directory: &Path) -> Result<Vec<Result<Self>>> {
        let numbers = generations_in(directory)?;
        let open = |number: &u64| Self::open(directory, *number).map_err(Error::from);
        Ok(numbers.iter().rev().map(open).collect())
    }

    /// The snapshot's summary.
    pub fn summary(&self) -> Summary {
        let Manifest { generation, shard, shards, written, files, catalog, gone, not_finite, .. } =
            &self.manifest;
        Summary {
            generation: *generation,
            path: self.path.clone(),
            shard: (*shard, *shards),
            written: *written,
            bytes: files.values().map(|file| file.bytes).sum(),
            slices: (catalog.slices().count() - gone.len()) as u64,
            not_finite: not_finite.iter().cloned().collect(),
        }
    }

    /// The sum of the slices' versions, and of their optimizer steps.
    pub(crate) fn changes(&self) -> Result<(u64, u64), Unusable> {
        let mut sums = (0, 0);
        self.each_standing(|_, standing| sums = (sums.0 + standing.version, sums.1 + standing.step))?;
        Ok(sums)
    }

    /// Calls `each` for every slice, with its version and what it remembers.
    pub(crate) fn each_standing(&self, mut each: impl FnMut(u64, &Standing)) -> Result<(), Unusable> {
        self.entries(|content| {
            if let Content::Slice(entry) = content {
                each(entry.slice, &entry.standing);
            }
            Ok(())
        })
    }

    /// Reads every byte and verifies all checksums.
    pub fn verify(&self) -> Result<()> {
        for (name, written) in &self.manifest.files {
            let path = self.path.join(name);
            let mut file = File::open(&path).map_err(|error| failed("read", &path, &error))?;
            let mut summed = ChecksumWriter::new(std::io::sink());
            let mut chunk = vec![0; READ_CHUNK_BYTES];
            loop {
                let fail = |error| failed("read", &path, &error);
                let read = file.read(&mut chunk).map_err(fail)?;
                if read == 0 {
                    break;
                }
                std::io::Write::write_all(&mut summed, &chunk[..read]).map_err(fail)?;
            }
            let bytes = summed.bytes;
            if (FileDigest { bytes, crc32c: summed.finish().0 }) != *written {
                let why = format!("{} is damaged: its checksum is wrong", path.display());
                return Err(Error::new(Kind::Internal, why));
            }
        }
        Ok(())
    }

    pub(super) fn damaged<T>(&self, file: &str, why: &str) -> Result<T, Unusable> {
        Err(Unusable::Damaged(format!("{} {why}", self.path.join(file).display())))
    }

    /// Calls `each` for every entry of the list of slices: slices, their spaces, and arrays of vectors.
    pub(super) fn entries(
        &self,
        mut each: impl FnMut(Content<'_>) -> Result<(), Unusable>,
    ) -> Result<(), Unusable> {
        let path = self.path.join(SLICES);
        let fail = |error: std::io::Error| Unusable::Failed(failed("read", &path, &error));
        let mut file = BufReader::with_capacity(READ_CHUNK_BYTES, File::open(&path).map_err(fail)?);
        let mut left = self.manifest.files.get(SLICES).map_or(0, |file| file.bytes);
        let mut content = Vec::new();
        while !file.fill_buf().map_err(fail)?.is_empty() {
            let mut header = [0; frame::HEADER_BYTES];
            let whole = file.read_exact(&mut header).ok().and_then(|()| frame::Header::read(&header));
            left = left.saturating_sub(header.len() as u64);
            // The file must be as long as the header claims before memory is allocated.
            let Some(header) = whole.filter(|header| header.length as u64 <= left) else {
                return self.damaged(SLICES, "is damaged");
            };
            left -= header.length as u64;
            content.resize(header.length, 0);
            file.read_exact(&mut content).map_err(fail)?;
            match frame::read(&content).filter(|_| header.fits(&content)) {
                Some(content @ (Content::Slice(_) | Content::Vectors(_) | Content::Array(_))) => {
                    each(content)?;
                }
                _ => return self.damaged(SLICES, "is damaged: a checksum is wrong"),
            }
        }
        Ok(())
    }
}
