//! A generation: one snapshot on disk. What it says is believed after every byte that is used was checked.

use crate::catalog::Catalog;
use crate::files::checksum::crc32c;
use crate::files::directory::{failed, generation_in, generations_in};
use crate::frame::{self, Author, Content, Origin, Piece, Place};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::Shard;
use fastps_core::slice::Standing;
use fastps_core::tensor::SliceId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) const MANIFEST: &str = "MANIFEST";
pub(crate) const SLICES: &str = "slices";
pub(crate) const VALUES: &str = "parameters.safetensors";
pub(crate) const STATE: &str = "state.safetensors";
/// The files that the manifest speaks for.
pub(crate) const FILES: [&str; 3] = [SLICES, VALUES, STATE];

/// What is read at a time to be summed.
const CHUNK: usize = 1 << 20;

/// Why a generation, or a part of it, cannot be used.
#[derive(Debug)]
pub(crate) enum Unusable {
    /// Its bytes are not those that were written; says which.
    Damaged(String),
    /// Something else went wrong.
    Failed(Error),
}

impl From<Error> for Unusable {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<Unusable> for Error {
    fn from(unusable: Unusable) -> Self {
        match unusable {
            Unusable::Damaged(why) => Self::new(Kind::Internal, why),
            Unusable::Failed(error) => error,
        }
    }
}

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

/// A file as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    pub(crate) crc32c: u32,
}

/// A cut over all shards: the tensors of a group at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// The same in the snapshots of all shards.
    pub id: u64,
    /// Whose `exact` tensors are of that moment; others are at versions of their own.
    pub group: String,
}

/// One snapshot on disk, whose manifest is whole.
#[derive(Debug)]
pub struct Generation {
    path: PathBuf,
    pub(crate) manifest: Manifest,
}

/// What there is to say about a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Its number; they count up.
    pub generation: u64,
    /// Where it lies.
    pub path: PathBuf,
    /// The index of its shard, and how many there are.
    pub shard: (u32, u32),
    /// When it was written, in seconds since 1970.
    pub written: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Slices in it.
    pub slices: u64,
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

impl Generation {
    /// Reads the manifest, and checks that the files are there in full length.
    pub(crate) fn open(directory: &Path, number: u64) -> Result<Self, Unusable> {
        let path = generation_in(directory, number);
        let name = path.join(MANIFEST);
        let damaged = |why: &str| Err(Unusable::Damaged(format!("{} {why}", name.display())));
        let text = match std::fs::read(&name) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return damaged("is missing"),
            Err(error) => return Err(failed("read", &name, &error).into()),
        };
        let Some(manifest) = Manifest::parse(&text) else {
            return damaged("is damaged: its checksum is wrong");
        };
        frame::check_format(manifest.format, &name.display().to_string())?;
        if manifest.generation != number {
            return damaged(&format!("is that of generation {}", manifest.generation));
        }
        let generation = Self { path, manifest };
        for file in FILES {
            let Some(written) = generation.manifest.files.get(file) else {
                return damaged(&format!("does not tell of {file}"));
            };
            let path = generation.path.join(file);
            match std::fs::metadata(&path) {
                Ok(found) if found.len() == written.bytes => {}
                Ok(found) => {
                    return Err(Unusable::Damaged(format!(
                        "{} has {} bytes in place of {}",
                        path.display(),
                        found.len(),
                        written.bytes
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

    /// The generations in a shard's directory, the newest first, each whole as far as its manifest tells, or what is
    /// wrong with it. Takes no lock and changes nothing.
    pub fn list(directory: &Path) -> Result<Vec<Result<Self>>> {
        let numbers = generations_in(directory)?;
        let open = |number: &u64| Self::open(directory, *number).map_err(Error::from);
        Ok(numbers.iter().rev().map(open).collect())
    }

    /// What there is to say about it.
    pub fn summary(&self) -> Summary {
        let Manifest { generation, shard, shards, written, files, catalog, gone, .. } = &self.manifest;
        Summary {
            generation: *generation,
            path: self.path.clone(),
            shard: (*shard, *shards),
            written: *written,
            bytes: files.values().map(|file| file.bytes).sum(),
            slices: (catalog.slices().count() - gone.len()) as u64,
        }
    }

    /// The sum of its slices' versions, and that of their optimizer steps.
    pub(crate) fn changes(&self) -> Result<(u64, u64), Unusable> {
        let mut sums = (0, 0);
        self.pieces(|piece| {
            sums = (sums.0 + piece.standing.version, sums.1 + piece.standing.step);
            Ok(())
        })?;
        Ok(sums)
    }

    /// Reads every byte and compares all checksums.
    pub fn verify(&self) -> Result<()> {
        for (name, written) in &self.manifest.files {
            let path = self.path.join(name);
            let mut file = File::open(&path).map_err(|error| failed("read", &path, &error))?;
            let mut summed = crate::files::checksum::Summed::new(std::io::sink());
            let mut chunk = vec![0; CHUNK];
            loop {
                let fail = |error| failed("read", &path, &error);
                let read = file.read(&mut chunk).map_err(fail)?;
                if read == 0 {
                    break;
                }
                std::io::Write::write_all(&mut summed, &chunk[..read]).map_err(fail)?;
            }
            let bytes = summed.bytes;
            if (Written { bytes, crc32c: summed.finish().0 }) != *written {
                let why = format!("{} is damaged: its checksum is wrong", path.display());
                return Err(Error::new(Kind::Internal, why));
            }
        }
        Ok(())
    }

    fn damaged<T>(&self, file: &str, why: &str) -> Result<T, Unusable> {
        Err(Unusable::Damaged(format!("{} {why}", self.path.join(file).display())))
    }

    /// Makes the slices of an empty shard what the snapshot says. On an error some may be there.
    /// Each slice's standing is shown to `met`, with the number of bytes that were read for it.
    pub(crate) fn load(&self, shard: &Shard, mut met: impl FnMut(&Standing, u64)) -> Result<(), Unusable> {
        let catalog = &self.manifest.catalog;
        for reservation in catalog.reservations.values() {
            let slices: Vec<_> =
                reservation.slices.iter().map(|(id, k)| (SliceId(*id), *k as usize)).collect();
            shard.create(&Arc::new(reservation.spec.clone()), reservation.group, &slices)?;
        }
        let gone: Vec<_> = self.manifest.gone.iter().map(|id| SliceId(*id)).collect();
        shard.remove(&gone);
        let arrays = (Arrays::open(&self.path, VALUES)?, Arrays::open(&self.path, STATE)?);
        let (mut values, mut state) = (Vec::new(), Vec::new());
        let mut missing: BTreeSet<_> = catalog.slices().map(|(id, ..)| id).collect();
        missing.retain(|id| !self.manifest.gone.contains(id));
        self.pieces(|piece| {
            let slice = shard.slice(SliceId(piece.slice)).ok().filter(|_| missing.remove(&piece.slice));
            let Some(slice) = slice else {
                return self.damaged(SLICES, "names a slice that is not in the manifest");
            };
            let bytes = slice.bytes() as u64;
            if piece.values.bytes != bytes || piece.state.bytes != bytes * slots(&slice) {
                return self.damaged(SLICES, "gives a slice another size than the manifest");
            }
            arrays.0.read(piece.values, &mut values)?;
            arrays.1.read(piece.state, &mut state)?;
            slice.restore(&piece.standing, &values, &state)?;
            met(&piece.standing, piece.values.bytes + piece.state.bytes);
            Ok(())
        })?;
        if missing.is_empty() { Ok(()) } else { self.damaged(SLICES, "lacks slices of the manifest") }
    }

    /// Reads the list of slices.
    fn pieces(&self, mut each: impl FnMut(Piece) -> Result<(), Unusable>) -> Result<(), Unusable> {
        let path = self.path.join(SLICES);
        let fail = |error: std::io::Error| Unusable::Failed(failed("read", &path, &error));
        let mut file = BufReader::with_capacity(CHUNK, File::open(&path).map_err(fail)?);
        let mut left = self.manifest.files.get(SLICES).map_or(0, |file| file.bytes);
        let mut content = Vec::new();
        while !file.fill_buf().map_err(fail)?.is_empty() {
            let mut header = [0; frame::HEADER];
            let whole = file.read_exact(&mut header).ok().and_then(|()| frame::Header::read(&header));
            left = left.saturating_sub(header.len() as u64);
            // The file must have what the length claims before memory for it is taken.
            let Some(header) = whole.filter(|header| header.length as u64 <= left) else {
                return self.damaged(SLICES, "is damaged");
            };
            left -= header.length as u64;
            content.resize(header.length, 0);
            file.read_exact(&mut content).map_err(fail)?;
            match frame::read(&content).filter(|_| header.fits(&content)) {
                Some(Content::Slice(piece)) => each(piece)?,
                _ => return self.damaged(SLICES, "is damaged: a checksum is wrong"),
            }
        }
        Ok(())
    }
}

fn slots(slice: &fastps_core::slice::Slice) -> u64 {
    slice.spec().optimizer.slots().len() as u64
}

/// A file of arrays.
struct Arrays {
    path: PathBuf,
    file: File,
}

impl Arrays {
    fn open(folder: &Path, name: &str) -> Result<Self, Unusable> {
        let path = folder.join(name);
        let file = File::open(&path).map_err(|error| failed("read", &path, &error))?;
        Ok(Self { path, file })
    }

    /// Reads bytes whose number was checked against what is expected.
    fn read(&self, place: Place, into: &mut Vec<u8>) -> Result<(), Unusable> {
        into.resize(place.bytes as usize, 0);
        match self.file.read_exact_at(into, place.offset) {
            Ok(()) if crc32c(into) == place.crc32c => Ok(()),
            Ok(()) => Err(Unusable::Damaged(format!(
                "{} is damaged: the checksum of the {} bytes at {} is wrong",
                self.path.display(),
                place.bytes,
                place.offset
            ))),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(Unusable::Damaged(format!("{} is too short", self.path.display())))
            }
            Err(error) => Err(failed("read", &self.path, &error).into()),
        }
    }
}
