//! A segment of the log: one file of frames. Its last frames may be torn, where the machine or the process ended while
//! they were written; anything else that is not as it was written is damage.

use crate::directory::{Directory, failed, sync_directory};
use crate::frame::{self, Content, FORMAT, Origin};
use crate::generation::Unusable;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::{cut, fail, reach};
use std::fs::{File, OpenOptions};
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What is read at a time.
const BUFFER: usize = 1 << 20;

/// A segment that is being written.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) path: PathBuf,
    pub(crate) number: u64,
    file: File,
    /// Its length, of which the first part is durable.
    length: u64,
    durable: u64,
    /// What the last frame of its kind said to be durable.
    told: u64,
    scratch: Vec<u8>,
}

impl Segment {
    /// Begins a segment; it is there with its first frame, or not at all.
    pub(crate) fn create(
        directory: &Directory,
        number: u64,
        after_hole: bool,
        origin: Origin,
    ) -> Result<Self> {
        let (path, unfinished) = (directory.segment(number), directory.unfinished_segment(number));
        let file = fail("segment_create").and_then(|()| File::create(&unfinished));
        let file = file.map_err(|error| failed("make", &unfinished, &error))?;
        reach("segment_created");
        let mut segment = Self { path, number, file, length: 0, durable: 0, told: 0, scratch: Vec::new() };
        let mut header = Vec::new();
        frame::segment(&mut header, number, after_hole, origin);
        segment.write(&header)?;
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
            let mut file = OpenOptions::new().read(true).write(true).open(&path)?;
            file.set_len(end)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        let file = open().map_err(|error| failed("write", &path, &error))?;
        Ok(Self { path, number, file, length: end, durable: 0, told: 0, scratch: Vec::new() })
    }

    /// Appends frames, and before them which part is durable, where that is news.
    pub(crate) fn append(&mut self, frames: &[u8]) -> Result<()> {
        if self.durable > self.told {
            self.told = self.durable;
            self.scratch.clear();
            frame::durable(&mut self.scratch, self.durable);
            let told = std::mem::take(&mut self.scratch);
            self.write(&told)?;
            self.scratch = told;
        }
        self.write(frames)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = fail("log_write").and_then(|()| self.file.write_all(bytes));
        written.map_err(|error| failed("write", &self.path, &error))?;
        self.length += bytes.len() as u64;
        reach("log_written");
        cut("log_cut", &self.file, self.durable, self.length);
        Ok(())
    }

    /// Makes what was appended durable.
    pub(crate) fn sync(&mut self) -> Result<()> {
        let synced = fail("log_sync").and_then(|()| self.file.sync_data());
        // The system goes on with a file that has no name any more, and nobody will find it.
        let there = || match self.file.metadata()?.nlink() {
            0 => Err(std::io::Error::new(ErrorKind::NotFound, "it was removed")),
            _ => Ok(()),
        };
        let synced = synced.and_then(|()| there());
        synced.map_err(|error| failed("sync", &self.path, &error))?;
        self.durable = self.length;
        reach("log_synced");
        Ok(())
    }

    /// Appends the last frames, and ends it: the log goes on in the segment of this number.
    pub(crate) fn end(mut self, frames: &[u8], next: u64) -> Result<()> {
        reach("segment_end");
        let mut last = frames.to_vec();
        frame::end(&mut last, next);
        self.append(&last)?;
        self.sync()
    }
}

/// What a segment begins with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beginning {
    pub(crate) origin: Origin,
    /// Changes are missing before it.
    pub(crate) after_hole: bool,
    /// There is something behind its first frame.
    pub(crate) more: bool,
}

/// How a segment begins, if it begins as one.
pub(crate) fn beginning(path: &Path) -> Result<Option<Beginning>> {
    let read = || {
        let mut file = File::open(path)?;
        let (length, mut content) = (file.metadata()?.len(), Vec::new());
        Ok(next(&mut file, length, &mut content)?.map(|size| (content, length > size)))
    };
    let begun = read().map_err(|error: std::io::Error| failed("read", path, &error))?;
    Ok(begun.and_then(|(content, more)| match frame::read(&content) {
        Some(Content::Segment { after_hole, origin, .. }) => Some(Beginning { origin, after_hole, more }),
        _ => None,
    }))
}

/// How a segment ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// In full; the log goes on in the segment of this number.
    Continued(u64),
    /// At its last frame.
    Open {
        /// Bytes of whole frames.
        whole: u64,
        /// Bytes behind them, of frames that were never written in full.
        torn: u64,
    },
}

/// Reads a segment, frame by frame; what `each` fails with ends it. Damage tells where it is.
pub(crate) fn read(
    path: &Path,
    number: u64,
    origin: Option<Origin>,
    mut each: impl FnMut(u64, Content<'_>) -> Result<(), Unusable>,
) -> Result<(Origin, End), Unusable> {
    let fail = |error: std::io::Error| Unusable::Failed(failed("read", path, &error));
    let file = File::open(path).map_err(fail)?;
    let length = file.metadata().map_err(fail)?.len();
    let mut file = BufReader::with_capacity(BUFFER, file);
    let damaged = |why: String| Err(Unusable::Damaged(format!("{} {why}", path.display())));
    let (mut at, mut content, mut begun) = (0, Vec::new(), None);
    while let Some(size) = next(&mut file, length - at, &mut content).map_err(fail)? {
        let Some(said) = frame::read(&content) else {
            return damaged(format!("has a frame at byte {at} that this version does not know"));
        };
        match (said, begun) {
            (Content::Segment { format, number: its, origin: from, .. }, None) => {
                if format != FORMAT {
                    let error = Error::new(Kind::Config, format!("{} is of another version", path.display()))
                        .expected(format!("format {FORMAT}"), format);
                    return Err(error.into());
                }
                if its != number || origin.is_some_and(|origin| origin != from) {
                    return damaged(format!(
                        "is in the wrong place: it is segment {its} of shard {} of {}, of the directory {:016x}",
                        from.shard, from.shards, from.id
                    ));
                }
                begun = Some(from);
            }
            (Content::Segment { .. } | Content::Slice(_), _) | (_, None) => {
                return damaged(format!("has a frame at byte {at} that does not belong there"));
            }
            (Content::End(next), Some(origin)) => return Ok((origin, End::Continued(next))),
            (Content::Durable(_), Some(_)) => {}
            (said, Some(_)) => each(at, said)?,
        }
        at += size;
    }
    let torn = length - at;
    // The first frame was durable before anything else was done.
    let Some(origin) = begun else { return damaged("is damaged: it does not begin as a segment".to_owned()) };
    if torn > 0 && was_durable(path, at, torn).map_err(fail)? {
        return damaged(format!("is damaged at byte {at}: {torn} bytes from there on cannot be used"));
    }
    Ok((origin, End::Open { whole: at, torn }))
}

/// The next whole frame's content; its size. `left`: bytes that the file still has.
fn next(file: &mut impl Read, left: u64, content: &mut Vec<u8>) -> std::io::Result<Option<u64>> {
    if left < frame::HEADER as u64 {
        return Ok(None);
    }
    let mut header = [0; frame::HEADER];
    file.read_exact(&mut header)?;
    let fits = |header: &frame::Header| header.length as u64 <= left - frame::HEADER as u64;
    let Some(header) = frame::Header::read(&header).filter(fits) else { return Ok(None) };
    content.resize(header.length, 0);
    file.read_exact(content)?;
    Ok(header.fits(content).then_some((frame::HEADER + header.length) as u64))
}

/// Whether bytes from `at` on were durable: a whole frame behind them says so, or ends the segment.
fn was_durable(path: &Path, at: u64, torn: u64) -> std::io::Result<bool> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(at))?;
    let mut rest = Vec::with_capacity(torn as usize);
    file.take(torn).read_to_end(&mut rest)?;
    let mut from = 0;
    while let Some(found) = rest[from..].windows(frame::MARK.len()).position(|four| *four == frame::MARK) {
        from += found;
        match frame::split(&rest[from..]) {
            Some((content, after)) => {
                match frame::read(content) {
                    Some(Content::Durable(offset)) if offset > at => return Ok(true),
                    Some(Content::End(_)) => return Ok(true),
                    _ => {}
                }
                from = rest.len() - after.len();
            }
            None => from += 1,
        }
    }
    Ok(false)
}

#[cfg(test)]
impl Segment {
    /// A segment that is somewhere else.
    pub(crate) fn at(path: &str) -> Self {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        Self { path: path.into(), number: 1, file, length: 0, durable: 0, told: 0, scratch: Vec::new() }
    }
}
