//! What a copy of snapshots in another place needs of a shard's directory, and a data directory made of such a copy. How
//! bytes get there is not known here.

use crate::files::checksum::crc32c;
use crate::files::directory::{
    Directory, failed, generation_in, generations_in, remove, shard_folder, sync_directory,
};
use crate::frame::{Author, check_format};
use crate::log::segment::Segment;
use crate::recovery::random;
use crate::snapshot::generation::{Cut, FILES, Generation, MANIFEST, Manifest};
use crate::snapshot::write::Output;
use crate::tools::reshape::{begin, parent};
use fastps_core::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The file of a copied snapshot that speaks for the others.
pub const MANIFEST_NAME: &str = MANIFEST;
/// In a shard's directory: the folders that were made of its snapshots elsewhere, a line each, the newest last.
const COPIED: &str = "copied";
/// So many of them are remembered.
const REMEMBERED: usize = 16;
/// How often the newest snapshot is looked for, where a server removes it meanwhile.
const LOOKS: usize = 5;

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
    manifest: Manifest,
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

/// A snapshot on disk with its files open: it can be read even if a server removes it meanwhile.
#[derive(Debug)]
pub struct Held {
    /// What its manifest says.
    pub described: Described,
    /// Its other files.
    pub files: Vec<(Part, File)>,
    /// Where they lie.
    pub path: PathBuf,
}

impl Held {
    /// The newest in a shard's directory that looks whole; `None`: there is no snapshot yet.
    pub fn newest(directory: &Path) -> Result<Option<Self>> {
        let mut result = Ok(None);
        for _ in 0..LOOKS {
            let numbers = generations_in(directory)?;
            result = Ok(None);
            for number in numbers.iter().rev() {
                result = Self::open(directory, *number).map(Some);
                if result.is_ok() {
                    return result;
                }
            }
            if numbers.is_empty() {
                break;
            }
        }
        result
    }

    /// The numbers of snapshots that came after one of a shard's directory.
    pub fn after(directory: &Path, number: u64) -> Result<Vec<u64>> {
        Ok(generations_in(directory)?.into_iter().filter(|later| *later > number).collect())
    }

    /// One of a shard's directory.
    pub fn open(directory: &Path, number: u64) -> Result<Self> {
        let path = generation_in(directory, number);
        Generation::open(directory, number)?;
        let name = path.join(MANIFEST);
        let text = std::fs::read(&name).map_err(|error| failed("read", &name, &error))?;
        let described = Described::parse(text, &name.display().to_string())?;
        let open = |part: Part| {
            let file = path.join(part.name);
            let opened = File::open(&file).map_err(|error| failed("read", &file, &error))?;
            Ok((part, opened))
        };
        let files = described.parts().map(open).collect::<Result<_>>()?;
        Ok(Self { described, files, path })
    }
}

/// Takes the lock of a shard's directory, so that no server uses it; until what is given is dropped.
pub fn lock(directory: &Path) -> Result<impl Drop + use<>> {
    Ok(Locked(Directory::look(directory)?))
}

struct Locked(Directory);

impl Drop for Locked {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// The shards that a data directory has.
pub fn shards(data_dir: &Path) -> Result<Vec<u32>> {
    crate::files::directory::shards_in(data_dir)
}

/// The folders that were made elsewhere of a directory's snapshots, or that it was made of.
pub fn copied(directory: &Path) -> Result<Vec<String>> {
    let path = directory.join(COPIED);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed("read", &path, &error)),
    }
}

/// Remembers such a folder. It is durable before the folder can be the latest, so that a server that is started again knows
/// its own.
pub fn note_copied(directory: &Path, folder: &str) -> Result<()> {
    let mut known = copied(directory)?;
    known.retain(|other| other != folder);
    known.push(folder.to_owned());
    let text = known[known.len().saturating_sub(REMEMBERED)..].join("\n") + "\n";
    let (path, unfinished) = (directory.join(COPIED), directory.join(format!("{COPIED}.tmp")));
    remove(&unfinished)?;
    let mut file = Output::create(&unfinished)?;
    file.write(text.as_bytes())?;
    file.finish()?;
    std::fs::rename(&unfinished, &path).map_err(|error| failed("rename", &unfinished, &error))?;
    sync_directory(directory)
}

/// A data directory that is made of fetched snapshots, one of each shard. It has its name when all of it is durable; if that
/// is not to be, nothing is left of it.
#[derive(Debug)]
pub struct Fetched {
    target: PathBuf,
    unfinished: PathBuf,
    shards: Vec<Manifest>,
}

impl Fetched {
    /// The directory must be new, or empty.
    pub fn begin(target: &Path) -> Result<Self> {
        let unfinished = begin(target)?;
        let made = DirBuilder::new().mode(0o700).create(&unfinished);
        made.map_err(|error| failed("make", &unfinished, &error))?;
        Ok(Self { target: target.to_owned(), unfinished, shards: Vec::new() })
    }

    /// An empty folder for the files of a shard's snapshot, beside its manifest.
    pub fn folder(&self, described: &Described) -> Result<PathBuf> {
        let shard = shard_folder(&self.unfinished, described.manifest.shard);
        remove(&shard)?;
        let folder = generation_in(&shard, described.manifest.generation);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|error| failed("make", &folder, &error))?;
        Ok(folder)
    }

    /// Completes what [`Fetched::folder`] gave: the files are there and durable. From here on it is a directory of its own, which
    /// remembers the folder that it was made of.
    pub fn complete(&mut self, described: &Described, folder: &str) -> Result<()> {
        let mut manifest = described.manifest.clone();
        manifest.id = random()?;
        let author = Author { incarnation: random()?, predecessor: 0 };
        (manifest.incarnation, manifest.predecessor) = (author.incarnation, author.predecessor);
        manifest.durable = None;
        let path = shard_folder(&self.unfinished, manifest.shard);
        let directory = Directory::open(&path)?;
        let generation = directory.generation(manifest.generation);
        let unwritable = |error: serde_json::Error| Error::new(Kind::Internal, error.to_string());
        let mut output = Output::create(&generation.join(MANIFEST))?;
        output.write(&manifest.text().map_err(unwritable)?)?;
        output.finish()?;
        sync_directory(&generation)?;
        let Manifest { log, generation, .. } = manifest;
        // The log behind it begins here, with nothing in it: what came later is not part of the copy.
        Segment::create(&directory, log, false, manifest.origin(), author)?;
        note_copied(&path, folder)?;
        Generation::open(&path, generation)?;
        self.shards.push(manifest);
        Ok(())
    }

    /// Gives the directory its name, if the shards' snapshots go together.
    pub fn finish(self) -> Result<()> {
        self.check()?;
        sync_directory(&self.unfinished)?;
        let renamed = std::fs::rename(&self.unfinished, &self.target);
        renamed.map_err(|error| failed("rename", &self.unfinished, &error))?;
        sync_directory(parent(&self.target))
    }

    /// A tensor that shard 0 has in its map must be whole: each shard's snapshot is of its own time.
    fn check(&self) -> Result<()> {
        let has = |manifest: &Manifest| {
            let slices = manifest.catalog.slices().map(|(id, ..)| id);
            let slices: BTreeSet<_> = slices.filter(|id| !manifest.gone.contains(id)).collect();
            (manifest.shard, slices)
        };
        let slices: std::collections::BTreeMap<_, _> = self.shards.iter().map(has).collect();
        let first = self.shards.iter().find(|manifest| manifest.shard == 0);
        for holding in first.into_iter().flat_map(|manifest| manifest.catalog.map.values()) {
            for (id, shard) in holding.slices.iter().zip(&holding.shards) {
                if !slices.get(shard).is_some_and(|slices| slices.contains(id)) {
                    let why = format!(
                        "the copies of the shards are of different times: shard {shard} lacks a part of the tensor. Have all \
                         shards write a snapshot (fastps checkpoint save), and fetch again when it is copied"
                    );
                    return Err(Error::new(Kind::Config, why).tensor(holding.spec.name.clone()));
                }
            }
        }
        Ok(())
    }
}

impl Drop for Fetched {
    fn drop(&mut self) {
        // Once it has its name, nothing is here.
        let _ = remove(&self.unfinished);
    }
}
