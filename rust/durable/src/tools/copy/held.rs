//! A snapshot that is read although a server may remove it.

use crate::files::directory::Directory;
use crate::files::io::failed;
use crate::files::names::{generation_in, generations_in};
use crate::snapshot::generation::Generation;
use crate::snapshot::manifest::MANIFEST;
use crate::tools::copy::described::{Described, Part};
use fastps_core::error::Result;
use std::fs::File;
use std::path::{Path, PathBuf};

/// How often the newest snapshot is looked for, where a server removes it meanwhile.
const LOOKS: usize = 5;

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
