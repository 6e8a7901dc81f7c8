//! A file that is being written, with its checksum; a part is synced while more is added.

use crate::files::checksum::{Summed, crc32c};
use crate::files::io::failed;
use fastps_core::error::Result;
use fastps_core::failpoint::fail;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// What is shorter is gathered before it is written.
const BUFFER: usize = 64 << 10;

/// Bytes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) crc32c: u32,
}

/// A file as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    pub(crate) crc32c: u32,
}

/// A file that is being written.
pub(crate) struct Output {
    path: PathBuf,
    to: Summed<BufWriter<File>>,
    /// Its first bytes that are durable, or are being made so.
    paced: u64,
    syncing: Option<JoinHandle<std::io::Result<()>>>,
}

impl Output {
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let file = File::create_new(path).map_err(|error| failed("make", path, &error))?;
        let to = Summed::new(BufWriter::with_capacity(BUFFER, file));
        Ok(Self { path: path.to_owned(), to, paced: 0, syncing: None })
    }

    /// Appends bytes; says where they lie.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<Place> {
        let place = Place { offset: self.to.bytes, bytes: bytes.len() as u64, crc32c: crc32c(bytes) };
        let written = fail("snapshot_write").and_then(|()| self.to.write_all(bytes));
        written.map_err(|error| failed("write", &self.path, &error))?;
        Ok(place)
    }

    /// Has the disk write while more is added, so that it is not all left for the end.
    pub(crate) fn keep_pace(&mut self, pace: u64) -> Result<()> {
        if self.to.bytes - self.paced < pace {
            return Ok(());
        }
        self.sync_behind().map_err(|error| failed("write", &self.path, &error))
    }

    fn sync_behind(&mut self) -> std::io::Result<()> {
        self.to.flush()?;
        self.paced = self.to.bytes;
        self.wait()?;
        let file = self.to.get_ref().get_ref().try_clone()?;
        let thread = std::thread::Builder::new().name("fastps-sync".to_owned());
        self.syncing = Some(thread.spawn(move || file.sync_data())?);
        Ok(())
    }

    /// Waits for the sync under way: the system tells of a failure once, and perhaps only there.
    fn wait(&mut self) -> std::io::Result<()> {
        let Some(syncing) = self.syncing.take() else { return Ok(()) };
        syncing.join().unwrap_or_else(|_| Err(std::io::Error::other("a thread that synced it panicked")))
    }

    /// Makes it durable.
    pub(crate) fn finish(mut self) -> Result<Written> {
        let bytes = self.to.bytes;
        self.wait().map_err(|error| failed("write", &self.path, &error))?;
        let (crc32c, writer) = self.to.finish();
        let synced = writer.into_inner().map_err(std::io::IntoInnerError::into_error);
        let synced = synced.and_then(|file| fail("snapshot_sync").and_then(|()| file.sync_all()));
        synced.map_err(|error| failed("write", &self.path, &error))?;
        Ok(Written { bytes, crc32c })
    }
}
