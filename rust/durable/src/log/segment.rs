//! A log segment being written: one file of frames. After a crash its last frames may be torn; any other
//! deviation from what was written is damage.

use crate::files::directory::Directory;
use crate::files::io::{failed, sync_directory};
use crate::files::lock::Lock;
use crate::frame::{self, Author, Origin};
use crate::log::direct_io::DirectFile;
use fastps_core::error::Result;
use fastps_core::failpoint::{self, cut, fail, reach};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

/// How far ahead of short appends the file is filled with zeros. A sync that does not change the file's
/// length is about a third faster on ext4.
pub(super) const ZEROS_AHEAD_BYTES: u64 = 1 << 20;
/// Bytes of short appends between two fills, so that fills do not dominate the writes. Crash tests fill ahead
/// of every frame.
const ZERO_FILL_INTERVAL_BYTES: u64 = if failpoint::ARE_COMPILED { 1 } else { 64 << 10 };
/// Appends up to this length go through the page cache; longer ones use direct I/O.
pub(crate) const MAX_SHORT_APPEND_BYTES: usize = 64 << 10;
/// The end of the log that stays in the page cache, for a start after a crash. Pages before it are dropped in
/// steps.
const CACHED_TAIL_BYTES: u64 = 1 << 30;
const CACHE_DROP_STEP_BYTES: u64 = 1 << 20;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A segment being written.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) path: PathBuf,
    pub(crate) number: u64,
    file: File,
    /// Tells whether this process still owns the directory.
    lock: Arc<Lock>,
    /// The same file, opened for direct I/O where that is supported.
    direct_file: Option<DirectFile>,
    /// Set if the last append used direct I/O.
    is_direct: bool,
    /// Length of the file, and of its durable part.
    length: u64,
    durable: u64,
    /// The durable length that the last `durable` frame recorded.
    marked: u64,
    /// End of the zeros written ahead, even if there was no space for all of them.
    filled: u64,
    /// Bytes of short appends since the last fill.
    short: u64,
    /// Bytes at the start of the file dropped from the page cache.
    dropped_pages_end: u64,
}

impl Segment {
    /// Creates a segment. It appears with its first frame or not at all.
    pub(crate) fn create(
        directory: &Directory,
        number: u64,
        after_gap: bool,
        origin: Origin,
        author: Author,
    ) -> Result<Self> {
        let (path, unfinished) = (directory.segment(number), directory.unfinished_segment(number));
        let file = fail("segment_create").and_then(|()| File::create(&unfinished));
        let file = file.map_err(|error| failed("create", &unfinished, &error))?;
        reach("segment_created");
        let mut segment = Self::new(path, number, file, 0, directory.lock().clone());
        segment.direct_file = DirectFile::open(&unfinished);
        let mut header = Vec::new();
        frame::segment(&mut header, number, after_gap, origin, author);
        segment.write(&mut header)?;
        segment.sync()?;
        let renamed = std::fs::rename(&unfinished, &segment.path);
        renamed.map_err(|error| failed("rename", &unfinished, &error))?;
        reach("segment_renamed");
        sync_directory(directory.path())?;
        reach("segment_begun");
        Ok(segment)
    }

    /// Reopens a segment that was read to its end, and truncates it to `end`.
    pub(crate) fn reopen(directory: &Directory, number: u64, end: u64) -> Result<Self> {
        let path = directory.segment(number);
        let open = || {
            let file = OpenOptions::new().read(true).write(true).open(&path)?;
            file.set_len(end)?;
            Ok(file)
        };
        let file = open().map_err(|error| failed("write", &path, &error))?;
        Ok(Self::new(path, number, file, end, directory.lock().clone()))
    }

    /// Stands in for a segment that could not be created: the file is the directory, which takes no writes.
    pub(crate) fn missing(directory: &Directory, number: u64) -> Result<Self> {
        let path = directory.path();
        let file = File::open(path).map_err(|error| failed("open", path, &error))?;
        Ok(Self::new(directory.segment(number), number, file, 0, directory.lock().clone()))
    }

    fn new(path: PathBuf, number: u64, file: File, length: u64, lock: Arc<Lock>) -> Self {
        let (direct_file, dropped_pages_end) = (None, length);
        Self {
            path,
            number,
            file,
            lock,
            direct_file,
            is_direct: false,
            length,
            durable: 0,
            marked: 0,
            filled: 0,
            short: 0,
            dropped_pages_end,
        }
    }

    /// Seals and appends frames, preceded by a `durable` frame if the file does not yet record the last sync.
    pub(crate) fn append(&mut self, frames: &mut [u8]) -> Result<()> {
        // Another server may own the file by now.
        self.lock.check().map_err(|error| failed("write", &self.path, &error))?;
        let mut marked = self.durable_mark();
        self.marked = self.durable;
        if let Some(direct_file) = self.direct_file.as_mut().filter(|_| frames.len() > MAX_SHORT_APPEND_BYTES)
        {
            frame::seal(&mut marked);
            frame::seal(frames);
            match fail("log_write").and_then(|()| direct_file.append(&[&marked, frames])) {
                Ok(end) => {
                    self.is_direct = true;
                    self.filled = self.filled.max(end);
                    self.has_grown(marked.len() + frames.len());
                    return Ok(());
                }
                // Direct writes are not supported after all: the frames are written through the page cache.
                Err(error) if error.kind() == ErrorKind::InvalidInput => self.direct_file = None,
                Err(error) => return Err(failed("write", &self.path, &error)),
            }
        }
        self.is_direct = false;
        if !marked.is_empty() {
            self.write(&mut marked)?;
        }
        self.write(frames)
    }

    /// A `durable` frame, if the file does not yet record the last sync.
    fn durable_mark(&self) -> Vec<u8> {
        let mut marked = Vec::new();
        if self.has_unmarked_sync() {
            frame::durable(&mut marked, self.durable);
        }
        marked
    }

    /// Returns whether the file does not yet record the last sync.
    pub(crate) fn has_unmarked_sync(&self) -> bool {
        self.durable > self.marked
    }

    /// Returns whether [`Segment::write_durable_mark`] would make the next append wait for the disk again:
    /// before a direct write of a block, the system writes back what its page cache holds of that block.
    pub(crate) fn last_append_was_direct(&self) -> bool {
        self.is_direct
    }

    /// Records the durable length in the file at once, without waiting for more frames. If one of the durable
    /// frames is later damaged, a start then knows that it had been durable. The record itself becomes
    /// durable with the next sync.
    pub(crate) fn write_durable_mark(&mut self) {
        let mut marked = self.durable_mark();
        frame::seal(&mut marked);
        self.marked = self.durable;
        // An error here recurs with the next append, which reports it.
        let is_own = || self.lock.check().is_ok();
        if !marked.is_empty() && is_own() && self.file.write_all_at(&marked, self.length).is_ok() {
            if let Some(direct_file) = &mut self.direct_file {
                direct_file.note_appended(&marked);
            }
            self.length += marked.len() as u64;
        }
    }

    /// Length of the durable part.
    pub(crate) fn durable(&self) -> u64 {
        self.durable
    }

    fn write(&mut self, frames: &mut [u8]) -> Result<()> {
        frame::seal(frames);
        let written = fail("log_write").and_then(|()| self.file.write_all_at(frames, self.length));
        written.map_err(|error| failed("write", &self.path, &error))?;
        if let Some(direct_file) = &mut self.direct_file {
            direct_file.note_appended(frames);
        }
        self.has_grown(frames.len());
        Ok(())
    }

    fn has_grown(&mut self, bytes: usize) {
        self.length += bytes as u64;
        reach("log_written");
        cut("log_cut", &self.file, self.durable, self.length);
    }

    /// Frees memory that is needed only for writing.
    pub(crate) fn free_buffers(&mut self) {
        if let Some(direct_file) = &mut self.direct_file {
            direct_file.free_buffer();
        }
    }

    /// Fills the file with zeros ahead of the next short appends.
    pub(crate) fn fill_ahead(&mut self, appended: usize) {
        self.short += appended as u64;
        if self.filled > self.length || self.short < ZERO_FILL_INTERVAL_BYTES {
            return;
        }
        // A disk without space for zeros may still have space for frames.
        let mut places = (self.length..self.length + ZEROS_AHEAD_BYTES).step_by(ZEROS.len());
        let _ = places.try_for_each(|at| self.file.write_all_at(&ZEROS, at));
        (self.filled, self.short) = (self.length + ZEROS_AHEAD_BYTES, 0);
    }

    /// Truncates the file after its last frame. Remaining zeros are harmless.
    pub(crate) fn trim(&self) {
        if self.filled > self.length && self.lock.check().is_ok() {
            let _ = self.file.set_len(self.length);
        }
    }

    /// Makes everything appended so far durable.
    pub(crate) fn sync(&mut self) -> Result<()> {
        let synced = fail("log_sync").and_then(|()| self.file.sync_data());
        // The system syncs unlinked files without an error, but a start would not find them.
        let there = || match self.file.metadata()?.nlink() {
            0 => Err(std::io::Error::new(ErrorKind::NotFound, "the file was removed")),
            _ => self.lock.check(),
        };
        let synced = synced.and_then(|()| there());
        synced.map_err(|error| failed("sync", &self.path, &error))?;
        self.durable = self.length;
        self.drop_old_pages();
        reach("log_synced");
        Ok(())
    }

    /// Drops old pages, so that new ones reuse their memory instead of evicting others' pages.
    fn drop_old_pages(&mut self) {
        let end = self.durable.saturating_sub(CACHED_TAIL_BYTES);
        if end < self.dropped_pages_end + CACHE_DROP_STEP_BYTES {
            return;
        }
        #[cfg(target_os = "linux")]
        if let length @ Some(_) = std::num::NonZeroU64::new(end - self.dropped_pages_end) {
            // Only a hint.
            let _ =
                rustix::fs::fadvise(&self.file, self.dropped_pages_end, length, rustix::fs::Advice::DontNeed);
        }
        self.dropped_pages_end = end;
    }

    /// Appends the last frames and ends the segment: the log continues in segment `next`. Everything before
    /// the end frame is made durable first, since an end frame implies that.
    pub(crate) fn end(mut self, frames: &mut [u8], next: u64) -> Result<()> {
        reach("segment_end");
        self.append(frames)?;
        self.sync()?;
        let mut last = Vec::new();
        frame::end(&mut last, next);
        self.write(&mut last)?;
        self.trim();
        self.sync()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

#[cfg(test)]
impl Segment {
    /// A segment on any writable file.
    pub(crate) fn at(path: &str) -> Self {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        Self::new(path.into(), 1, file, 0, Arc::new(Lock::unlocked(std::path::Path::new(path))))
    }
}
