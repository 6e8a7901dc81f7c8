//! A file being written: it computes its checksum, and syncs in the background while more is appended.

use crate::files::checksum::{ChecksumWriter, crc32c};
use crate::files::io::failed;
use fastps_core::error::Result;
use fastps_core::failpoint::fail;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// Writes shorter than this are buffered.
const WRITE_BUFFER_BYTES: usize = 64 << 10;

/// A range of bytes in a file, with its checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) crc32c: u32,
}

/// Length and checksum of a complete file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileDigest {
    pub(crate) bytes: u64,
    pub(crate) crc32c: u32,
}

/// A file being written.
pub(crate) struct Output {
    path: PathBuf,
    to: ChecksumWriter<BufWriter<File>>,
    /// Length of the part that is durable or being synced.
    sync_started: u64,
    syncing: Option<JoinHandle<std::io::Result<()>>>,
}

impl Output {
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let file = File::create_new(path).map_err(|error| failed("create", path, &error))?;
        let to = ChecksumWriter::new(BufWriter::with_capacity(WRITE_BUFFER_BYTES, file));
        Ok(Self { path: path.to_owned(), to, sync_started: 0, syncing: None })
    }

    /// Appends bytes and returns their extent.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<Extent> {
        let extent = Extent { offset: self.to.bytes, bytes: bytes.len() as u64, crc32c: crc32c(bytes) };
        let written = fail("snapshot_write").and_then(|()| self.to.write_all(bytes));
        written.map_err(|error| failed("write", &self.path, &error))?;
        Ok(extent)
    }

    /// Appends what `write` writes.
    pub(crate) fn append(&mut self, write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
        let written = fail("snapshot_write").and_then(|()| write(&mut self.to));
        written.map_err(|error| failed("write", &self.path, &error))
    }

    /// Starts a background sync once `interval` bytes were written since the last one, so that the final sync
    /// has little left to do.
    pub(crate) fn sync_every(&mut self, interval: u64) -> Result<()> {
        if self.to.bytes - self.sync_started < interval {
            return Ok(());
        }
        self.start_sync().map_err(|error| failed("write", &self.path, &error))
    }

    fn start_sync(&mut self) -> std::io::Result<()> {
        self.to.flush()?;
        self.sync_started = self.to.bytes;
        self.wait()?;
        let file = self.to.get_ref().get_ref().try_clone()?;
        let thread = std::thread::Builder::new().name("fastps-sync".to_owned());
        self.syncing = Some(thread.spawn(move || file.sync_data())?);
        Ok(())
    }

    /// Waits for the background sync. The system reports a write error once, possibly only to that sync.
    fn wait(&mut self) -> std::io::Result<()> {
        let Some(syncing) = self.syncing.take() else { return Ok(()) };
        syncing.join().unwrap_or_else(|_| Err(std::io::Error::other("the sync thread panicked")))
    }

    /// Makes the file durable and returns its digest.
    pub(crate) fn finish(mut self) -> Result<FileDigest> {
        let bytes = self.to.bytes;
        self.wait().map_err(|error| failed("write", &self.path, &error))?;
        let (crc32c, writer) = self.to.finish();
        let synced = writer.into_inner().map_err(std::io::IntoInnerError::into_error);
        let synced = synced.and_then(|file| fail("snapshot_sync").and_then(|()| file.sync_all()));
        synced.map_err(|error| failed("write", &self.path, &error))?;
        Ok(FileDigest { bytes, crc32c })
    }
}
