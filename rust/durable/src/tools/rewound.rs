//! `rewound.json`, which a rewound data directory has beside its shards: where it came from, and the workers that
//! are known there. The directory itself knows no clients.

use crate::files::io::{failed, to_json};
use crate::tools::copy::past;
use fastps_core::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FILE: &str = "rewound.json";
/// Most workers that are listed.
const MAX_WORKERS: usize = 10_000;
const MAX_BYTES: u64 = 16 << 20;

/// Origin of a rewound data directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rewound {
    /// The data directory, or the bucket, that it was made from.
    pub from: PathBuf,
    /// Names of workers in the snapshots there, and of those with a session at the moment.
    pub workers: BTreeSet<Arc<str>>,
}

impl Rewound {
    pub(crate) fn new(from: &Path, workers: impl Iterator<Item = Arc<str>>) -> Self {
        let from = past::source(from)
            .unwrap_or_else(|| std::path::absolute(from).unwrap_or_else(|_| from.to_owned()));
        let mut names: BTreeSet<_> = workers.collect();
        while names.len() > MAX_WORKERS {
            names.pop_last();
        }
        Self { from, workers: names }
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(FILE);
        let json = to_json(self)?;
        let write = || File::create_new(&path).and_then(|mut file| file.write_all(&json).map(|()| file));
        write().and_then(|file| file.sync_all()).map_err(|error| failed("write", &path, &error))
    }

    /// Reads the file of a data directory; `None`: it was not rewound.
    pub fn read(data_dir: &Path) -> Result<Option<Self>> {
        let path = data_dir.join(FILE);
        let mut json = Vec::new();
        match File::open(&path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut json)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("read", &path, &error)),
        }
        let read = serde_json::from_slice(&json).map(Some);
        read.map_err(|error| Error::new(Kind::Config, format!("{} is damaged: {error}", path.display())))
    }
}
