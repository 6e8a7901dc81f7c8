//! Reading a snapshot that a running server may remove.

use crate::files::directory::Directory;
use crate::files::io::failed;
use crate::files::names::{generation_in, generations_in};
use crate::snapshot::generation::Generation;
use crate::snapshot::manifest::MANIFEST;
use crate::tools::copy::described::{Described, Part};
use fastps_core::error::Result;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Attempts to find the newest snapshot while a server removes old ones.
const MAX_SCAN_ATTEMPTS: usize = 5;

/// A snapshot whose files are open: it stays readable if a server removes it.
#[derive(Debug)]
pub struct Held {
    /// The manifest.
    pub described: Described,
    /// The other files.
    pub files: Vec<(Part, File)>,
    /// The snapshot's directory.
    pub path: PathBuf,
}

impl Held {
    /// The newest snapshot in a shard's directory that looks intact. `None`: there is none.
    pub fn newest(directory: &Path) -> Result<Option<Self>> {
        let mut result = Ok(None);
        for _ in 0..MAX_SCAN_ATTEMPTS {
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

    /// The numbers of all later snapshots in a shard's directory.
    pub fn after(directory: &Path, number: u64) -> Result<Vec<u64>> {
        Ok(generations_in(directory)?.into_iter().filter(|later| *later > number).collect())
    }

    /// Opens a snapshot in a shard's directory.
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

/// Locks a shard's directory, so that no server uses it, until the result is dropped.
pub fn lock(directory: &Path) -> Result<impl Drop + use<>> {
    Ok(DirectoryLock(Directory::lock_existing(directory)?))
}

struct DirectoryLock(Directory);

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        self.0.release();
    }
}
