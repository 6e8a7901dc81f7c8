//! A segment of the log: one file of frames. Its last frames may be torn, where the machine or the process ended while
//! they were written; anything else that is not as it was written is damage.

use crate::files::directory::Directory;
use crate::files::io::{failed, sync_directory};
use crate::files::lock::Lock;
use crate::frame::{self, Author, Origin};
use crate::log::direct_io::Blocks;
use fastps_core::error::Result;
use fastps_core::failpoint::{self, cut, fail, reach};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

/// How far a file of short appends is filled with zeros ahead of them. A sync of what does not make a file longer need not
/// write the file's length as well, which takes a third of its time on ext4.
pub(super) const AHEAD: u64 = 1 << 20;
/// So much is appended in short appends before the file is filled again, lest more zeros are written than frames. Where crashes
/// are tested, zeros are ahead of all frames.
const BETWEEN: u64 = if failpoint::ARE_COMPILED { 1 } else { 64 << 10 };
/// Appends up to here are short: they go through the system's cache, and longer ones past it.
pub(crate) const SHORT: usize = 64 << 10;
/// The end of a log that stays in memory, where a start after a crash finds it. What is before that the system need not keep; it
/// is told of so much at a time.
const KEPT: u64 = 1 << 30;
const FORGET: u64 = 1 << 20;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A segment that is being written.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) path: PathBuf,
    pub(crate) number: u64,
    file: File,
    /// What says whether this process still has the folder.
    lock: Arc<Lock>,
    /// The same file, where long appends can go past the system's cache.
    blocks: Option<Blocks>,
    /// The last append went there.
    direct: bool,
    /// Its length, of which the first part is durable.
    length: u64,
    durable: u64,
    /// What the last frame of its kind said to be durable.
    told: u64,
    /// Where the zeros behind it end, unless there was no room for them.
    filled: u64,
    /// Bytes of short appends since they were written.
    short: u64,
    /// What the system need not keep in memory.
    forgotten: u64,
}

impl Segment {
    /// Begins a segment; it is there with its first frame, or not at all.
    pub(crate) fn create(
        directory: &Directory,
        number: u64,
        after_hole: bool,
        origin: Origin,
        author: Author,
    ) -> Result<Self> {
        let (path, unfinished) = (directory.segment(number), directory.unfinished_segment(number));
        let file = fail("segment_create").and_then(|()| File::create(&unfinished));
        let file = file.map_err(|error| failed("make", &unfinished, &error))?;
        reach("segment_created");
        let mut segment = Self::new(path, number, file, 0, directory.lock().clone());
        segment.blocks = Blocks::open(&unfinished);
        let mut header = Vec::new();
        frame::segment(&mut header, number, after_hole, origin, author);
        segment.write(&mut header)?;
        segment.sync()?;
        let renamed = std::fs::rename(&unfinished, &segment.path);
        renamed.map_err(|error| failed("rename", &unfinished, &error))?;
        reach("segment_renamed");
        sync_directory(directory.path())?;
        reach("segment_begun");
        Ok(segment)
    }

    /// Takes up one that was read to its end: what is behind `end` is cut off.
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

    fn new(path: PathBuf, number: u64, file: File, length: u64, lock: Arc<Lock>) -> Self {
        let (blocks, forgotten) = (None, length);
        Self {
            path,
            number,
            file,
            lock,
            blocks,
            direct: false,
            length,
            durable: 0,
            told: 0,
            filled: 0,
            short: 0,
            forgotten,
        }
    }

    /// Appends frames, which it seals, and before them which part is durable, where the file does not say that yet.
    pub(crate) fn append(&mut self, frames: &mut [u8]) -> Result<()> {
        // Another server may be using the file by now.
        self.lock.check().map_err(|error| failed("write", &self.path, &error))?;
        let mut told = self.news();
        self.told = self.durable;
        if let Some(blocks) = self.blocks.as_mut().filter(|_| frames.len() > SHORT) {
            frame::seal(&mut told);
            frame::seal(frames);
            match fail("log_write").and_then(|()| blocks.append(&[&told, frames])) {
                Ok(end) => {
                    self.direct = true;
                    self.filled = self.filled.max(end);
                    self.has_grown(told.len() + frames.len());
                    return Ok(());
                }
                // It takes none after all, or none that is not as long as it should be: all is written again, as if it were short.
                Err(error) if error.kind() == ErrorKind::InvalidInput => self.blocks = None,
                Err(error) => return Err(failed("write", &self.path, &error)),
            }
        }
        self.direct = false;
        if !told.is_empty() {
            self.write(&mut told)?;
        }
        self.write(frames)
    }

    /// A frame that tells which part is durable, where that is news.
    fn news(&self) -> Vec<u8> {
        let mut told = Vec::new();
        if self.has_news() {
            frame::durable(&mut told, self.durable);
        }
        told
    }

    /// Whether the file does not say yet which part is durable.
    pub(crate) fn has_news(&self) -> bool {
        self.durable > self.told
    }

    /// Whether [`Segment::tell`] makes the next append wait for the disk once more: the system writes what its cache has of a
    /// block before it writes the block past the cache.
    pub(crate) fn tells_slowly(&self) -> bool {
        self.direct
    }

    /// Says in the file which part is durable, without waiting for more frames: where one of them is damaged, a start then
    /// knows that it was durable. This frame itself becomes durable with those that follow.
    pub(crate) fn tell(&mut self) {
        let mut told = self.news();
        frame::seal(&mut told);
        self.told = self.durable;
        // What fails here fails with the next frames again, and they are not lost silently.
        let is_own = || self.lock.check().is_ok();
        if !told.is_empty() && is_own() && self.file.write_all_at(&told, self.length).is_ok() {
            if let Some(blocks) = &mut self.blocks {
                blocks.passed(&told);
            }
            self.length += told.len() as u64;
        }
    }

    /// How much of it is durable.
    pub(crate) fn durable(&self) -> u64 {
        self.durable
    }

    fn write(&mut self, frames: &mut [u8]) -> Result<()> {
        frame::seal(frames);
        let written = fail("log_write").and_then(|()| self.file.write_all_at(frames, self.length));
        written.map_err(|error| failed("write", &self.path, &error))?;
        if let Some(blocks) = &mut self.blocks {
            blocks.passed(frames);
        }
        self.has_grown(frames.len());
        Ok(())
    }

    fn has_grown(&mut self, bytes: usize) {
        self.length += bytes as u64;
        reach("log_written");
        cut("log_cut", &self.file, self.durable, self.length);
    }

    /// Gives back memory that it needs only to write.
    pub(crate) fn rest(&mut self) {
        if let Some(blocks) = &mut self.blocks {
            blocks.rest();
        }
    }

    /// After a short append: fills the file ahead of those that follow.
    pub(crate) fn fill_ahead(&mut self, appended: usize) {
        self.short += appended as u64;
        if self.filled > self.length || self.short < BETWEEN {
            return;
        }
        // Where there is no room for zeros, there may be some for frames.
        let mut places = (self.length..self.length + AHEAD).step_by(ZEROS.len());
        let _ = places.try_for_each(|at| self.file.write_all_at(&ZEROS, at));
        (self.filled, self.short) = (self.length + AHEAD, 0);
    }

    /// Ends the file where its last frame ends. Zeros that stay do no harm.
    pub(crate) fn trim(&self) {
        if self.filled > self.length && self.lock.check().is_ok() {
            let _ = self.file.set_len(self.length);
        }
    }

    /// Makes what was appended durable.
    pub(crate) fn sync(&mut self) -> Result<()> {
        let synced = fail("log_sync").and_then(|()| self.file.sync_data());
        // The system goes on with a file that has no name any more, and nobody will find it.
        let there = || match self.file.metadata()?.nlink() {
            0 => Err(std::io::Error::new(ErrorKind::NotFound, "it was removed")),
            _ => self.lock.check(),
        };
        let synced = synced.and_then(|()| there());
        synced.map_err(|error| failed("sync", &self.path, &error))?;
        self.durable = self.length;
        self.forget();
        reach("log_synced");
        Ok(())
    }

    /// The next pages are made of the same memory then, not of what others use or what has to be fetched first.
    fn forget(&mut self) {
        let end = self.durable.saturating_sub(KEPT);
        if end < self.forgotten + FORGET {
            return;
        }
        #[cfg(target_os = "linux")]
        if let length @ Some(_) = std::num::NonZeroU64::new(end - self.forgotten) {
            // It is a hint.
            let _ = rustix::fs::fadvise(&self.file, self.forgotten, length, rustix::fs::Advice::DontNeed);
        }
        self.forgotten = end;
    }

    /// Appends the last frames, and ends it: the log goes on in the segment of this number. What is before the end is durable
    /// first, for an end that is read says so.
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
    /// A segment that is somewhere else.
    pub(crate) fn at(path: &str) -> Self {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        Self::new(path.into(), 1, file, 0, Arc::new(Lock::none(std::path::Path::new(path))))
    }
}
