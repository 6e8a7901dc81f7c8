//! A segment of the log: one file of frames. Its last frames may be torn, where the machine or the process ended while
//! they were written; anything else that is not as it was written is damage.

use crate::files::directory::{Directory, failed, sync_directory};
use crate::files::lock::Lock;
use crate::frame::{self, Author, Content, Origin};
use crate::log::direct_io::Blocks;
use crate::log::read_ahead;
use crate::snapshot::generation::Unusable;
use fastps_core::error::Result;
use fastps_core::failpoint::{self, cut, fail, reach};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How far a file of short appends is filled with zeros ahead of them. A sync of what does not make a file longer need not
/// write the file's length as well, which takes a third of its time on ext4.
const AHEAD: u64 = 1 << 20;
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

/// What a segment begins with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beginning {
    pub(crate) number: u64,
    pub(crate) origin: Origin,
    pub(crate) author: Author,
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
        Some(Content::Segment { number, after_hole, origin, author, .. }) => {
            Some(Beginning { number, origin, author, after_hole, more })
        }
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
        /// Bytes behind them that are no whole frame.
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
    let mut reading = Reading { path, number, origin, begun: None, at: 0, next: None };
    read_ahead::read(path, |frames| reading.take(frames, &mut each))?;
    let Reading { begun, at, next, .. } = reading;
    // The first frame was durable before anything else was done.
    let Some(origin) = begun else { return reading.damaged("is damaged: it does not begin as a segment") };
    if let Some(next) = next {
        return Ok((origin, End::Continued(next)));
    }
    let torn = torn_bytes(path, at).map_err(fail)?;
    if torn > 0 && was_durable(path, at).map_err(fail)? {
        return reading
            .damaged(&format!("is damaged at byte {at}: {torn} bytes from there on cannot be used"));
    }
    Ok((origin, End::Open { whole: at, torn }))
}

/// A segment that is being read.
struct Reading<'a> {
    path: &'a Path,
    number: u64,
    origin: Option<Origin>,
    /// What its first frame says.
    begun: Option<Origin>,
    at: u64,
    /// The segment in which the log goes on.
    next: Option<u64>,
}

impl Reading<'_> {
    fn take(
        &mut self,
        mut frames: &[u8],
        each: &mut impl FnMut(u64, Content<'_>) -> Result<(), Unusable>,
    ) -> Result<ControlFlow<()>, Unusable> {
        while let Some((content, rest)) = frame::split_whole(frames) {
            let at = self.at;
            let Some(said) = frame::read(content) else {
                return self.damaged(&format!("has a frame at byte {at} that this version does not know"));
            };
            match (said, self.begun) {
                (Content::Segment { format, number, origin, .. }, None) => {
                    self.begin(format, number, origin)?;
                }
                (Content::Segment { .. } | Content::Slice(_), _) | (_, None) => {
                    return self.damaged(&format!("has a frame at byte {at} that does not belong there"));
                }
                (Content::End(next), Some(_)) => {
                    self.next = Some(next);
                    return Ok(ControlFlow::Break(()));
                }
                (said, Some(_)) => each(at, said)?,
            }
            self.at += (frames.len() - rest.len()) as u64;
            frames = rest;
        }
        Ok(ControlFlow::Continue(()))
    }

    fn begin(&mut self, format: u32, number: u64, origin: Origin) -> Result<(), Unusable> {
        frame::check_format(format, &self.path.display().to_string())?;
        if number != self.number || self.origin.is_some_and(|expected| expected != origin) {
            let Origin { id, shard, shards } = origin;
            return self.damaged(&format!(
                "is in the wrong place: it is segment {number} of shard {shard} of {shards}, of the directory {id:016x}"
            ));
        }
        self.begun = Some(origin);
        Ok(())
    }

    fn damaged<T>(&self, why: &str) -> Result<T, Unusable> {
        Err(Unusable::Damaged(format!("{} {why}", self.path.display())))
    }
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

/// How many bytes from `at` on are no whole frame. Those are not that a server writes meanwhile, or wrote ahead: zeros.
fn torn_bytes(path: &Path, at: u64) -> std::io::Result<u64> {
    let mut file = File::open(path)?;
    let behind = file.metadata()?.len().saturating_sub(at);
    file.seek(SeekFrom::Start(at))?;
    if next(&mut file, behind, &mut Vec::new())?.is_some() {
        return Ok(0);
    }
    file.seek(SeekFrom::Start(at))?;
    let mut file = BufReader::with_capacity(ZEROS.len(), file.take(behind));
    let (mut read, mut written) = (0, 0);
    loop {
        let part = file.fill_buf()?;
        if part.is_empty() {
            return Ok(if written == 0 && behind > AHEAD { behind } else { written });
        }
        if let Some(last) = part.iter().rposition(|byte| *byte != 0) {
            written = read + last as u64 + 1;
        }
        let n = part.len();
        read += n as u64;
        file.consume(n);
    }
}

/// Whether bytes from `at` on were durable: a whole frame behind them says so, or ends the segment.
fn was_durable(path: &Path, at: u64) -> std::io::Result<bool> {
    let file = File::open(path)?;
    let (mut from, end, mut content) = (at, file.metadata()?.len(), Vec::new());
    let mut file = BufReader::new(file);
    while let Some(mark) = next_mark(&mut file, from, end)? {
        file.seek(SeekFrom::Start(mark))?;
        let Some(size) = next(&mut file, end - mark, &mut content)? else {
            from = mark + 1;
            continue;
        };
        match frame::read(&content) {
            Some(Content::Durable(offset)) if offset > at => return Ok(true),
            Some(Content::End(_)) => return Ok(true),
            _ => from = mark + size,
        }
    }
    Ok(false)
}

/// How many pushes can be read from a byte on, whatever lies between them.
pub(crate) fn count_pushes(path: &Path, at: u64) -> Result<u64> {
    let count = || {
        let file = File::open(path)?;
        let (mut from, end, mut content, mut pushes) = (at, file.metadata()?.len(), Vec::new(), 0);
        let mut file = BufReader::new(file);
        while let Some(mark) = next_mark(&mut file, from, end)? {
            file.seek(SeekFrom::Start(mark))?;
            let size = next(&mut file, end - mark, &mut content)?;
            pushes += u64::from(size.is_some() && matches!(frame::read(&content), Some(Content::Push(_))));
            from = mark + size.unwrap_or(1);
        }
        Ok(pushes)
    };
    count().map_err(|error: std::io::Error| failed("read", path, &error))
}

/// Where the next mark of a frame lies.
fn next_mark(file: &mut BufReader<File>, from: u64, end: u64) -> std::io::Result<Option<u64>> {
    file.seek(SeekFrom::Start(from))?;
    let mut four = [0; frame::MARK.len()];
    for (at, byte) in (from..end).zip(file.bytes()) {
        four.rotate_left(1);
        four[3] = byte?;
        if four == frame::MARK {
            return Ok(Some(at + 1 - frame::MARK.len() as u64));
        }
    }
    Ok(None)
}

#[cfg(test)]
impl Segment {
    /// A segment that is somewhere else.
    pub(crate) fn at(path: &str) -> Self {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        Self::new(path.into(), 1, file, 0, Arc::new(Lock::none(Path::new(path))))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use fastps_core::frame::Identity;
    use fastps_core::tensor::SliceId;
    use std::ops::Range;

    const ORIGIN: Origin = Origin { id: 1, shard: 0, shards: 1 };

    /// A directory that is removed in the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> (Self, Directory, PathBuf) {
            let folder = std::env::temp_dir().join(format!("fastps-segment-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&folder);
            let directory = Directory::open(&folder).unwrap();
            let path = directory.segment(1);
            (Self(folder), directory, path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// Bytes of a frame that tells of a fence.
    const FENCE: usize = frame::HEADER + 25;

    /// Frames of so many bytes or a few more.
    fn frames(bytes: usize) -> Vec<u8> {
        let mut frames = Vec::new();
        while frames.len() < bytes {
            let sequence = frames.len() as u64;
            frame::fence(&mut frames, SliceId(7), Identity { client: 3, sequence });
        }
        frames
    }

    fn append(segment: &mut Segment, bytes: usize) {
        let mut frames = frames(bytes);
        segment.append(&mut frames).unwrap();
        segment.fill_ahead(frames.len());
        segment.sync().unwrap();
    }

    fn end(path: &Path) -> Result<End, String> {
        match read(path, 1, Some(ORIGIN), |_, _| Ok(())) {
            Ok((_, end)) => Ok(end),
            Err(why) => Err(format!("{why:?}")),
        }
    }

    #[test]
    fn zeros_ahead_are_no_torn_frame() {
        let (_folder, directory, path) = Folder::new("zeros");
        let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
        let size = || std::fs::metadata(&path).unwrap().len();
        // The first zeros come with the first short append or with the second: as in `BETWEEN`.
        let (mut last, mut fillings) = (size(), 0);
        append(&mut segment, 1000);
        for _ in 0..AHEAD / SHORT as u64 + 4 {
            append(&mut segment, SHORT - 100);
            let grown = size() - last;
            assert!(grown == 0 || grown >= AHEAD, "{grown}");
            fillings += u32::from(grown > 0);
            last = size();
            assert!(last > segment.length);
            assert_eq!(end(&path), Ok(End::Open { whole: segment.length, torn: 0 }));
        }
        assert_eq!(fillings, 2);
        // A frame of which only a part was written is no zeros.
        let other = File::options().write(true).open(&path).unwrap();
        other.write_all_at(&frame::MARK, segment.length).unwrap();
        let torn = frame::MARK.len() as u64;
        assert_eq!(end(&path), Ok(End::Open { whole: segment.length, torn }));
        // The next start goes on where it ended, as if it had not been killed.
        let whole = segment.length;
        let mut again = Segment::reopen(&directory, 1, whole).unwrap();
        assert_eq!(size(), whole);
        append(&mut again, 100 << 10);
        assert_eq!(end(&path), Ok(End::Open { whole: again.length, torn: 0 }));
        again.trim();
        assert_eq!(size(), again.length);
        // More zeros than are ever written ahead: something was not written.
        other.set_len(again.length + AHEAD + 1).unwrap();
        assert_eq!(end(&path), Ok(End::Open { whole: again.length, torn: AHEAD + 1 }));
        append(&mut again, 100 << 10);
        let whole = again.length;
        again.end(&mut [], 2).unwrap();
        assert!(size() < whole + 100, "zeros stay behind the end");
    }

    #[test]
    fn long_and_short_appends_follow_each_other_in_any_order() {
        let (_folder, directory, path) = Folder::new("mixed");
        let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
        let (mut written, size) = (0, || std::fs::metadata(&path).unwrap().len());
        for (k, bytes) in [1, SHORT + 1, 1000, 3 << 20, SHORT + 1, SHORT + 4095, 1, 1].into_iter().enumerate()
        {
            let mut frames = frames(bytes);
            written += bytes.div_ceil(FENCE);
            segment.append(&mut frames).unwrap();
            if k % 3 == 1 {
                segment.sync().unwrap();
            }
            let mut read_back = 0;
            let end = read(&path, 1, Some(ORIGIN), |_, content| {
                read_back += usize::from(!matches!(content, Content::Durable(_)));
                Ok(())
            });
            assert_eq!(end.unwrap().1, End::Open { whole: segment.length, torn: 0 });
            assert_eq!(read_back, written);
        }
        segment.trim();
        assert_eq!(size(), segment.length);
        segment.end(&mut frames(SHORT + 1), 2).unwrap();
        assert_eq!(end(&path), Ok(End::Continued(2)));
    }

    #[test]
    fn a_file_that_takes_no_blocks_after_all_is_written_as_any_other() {
        let (_folder, directory, path) = Folder::new("spoiled");
        let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
        append(&mut segment, SHORT + 1);
        if let Some(blocks) = &mut segment.blocks {
            blocks.spoil();
        }
        for bytes in [2 * SHORT, 1, SHORT + 1] {
            append(&mut segment, bytes);
            assert_eq!(end(&path), Ok(End::Open { whole: segment.length, torn: 0 }));
        }
        segment.end(&mut frames(SHORT + 1), 2).unwrap();
        assert_eq!(end(&path), Ok(End::Continued(2)));
    }

    #[test]
    fn a_file_system_without_such_blocks_gets_the_same_file() {
        let mut files = Vec::new();
        for place in [std::env::temp_dir(), "/dev/shm".into()].iter().filter(|place| place.is_dir()) {
            let folder = Folder(place.join(format!("fastps-segment-place-{}", std::process::id())));
            let directory = Directory::open(&folder.0).unwrap();
            let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
            for bytes in [1, SHORT + 1, 1, 3 * SHORT] {
                append(&mut segment, bytes);
            }
            segment.end(&mut frames(SHORT + 1), 2).unwrap();
            files.push(std::fs::read(directory.segment(1)).unwrap());
        }
        assert!(files.iter().all(|file| *file == files[0]));
    }

    /// A power cut leaves any of the blocks of an append that was not synced. The first was written before, and begins with
    /// what is durable; of this one a disk that writes 512 bytes at a time may write any.
    #[test]
    fn what_was_durable_is_whole_whatever_is_there_of_the_blocks_behind_it() {
        const BLOCK: usize = 4096;
        for ahead in [false, true] {
            let (_folder, directory, path) = Folder::new(&format!("torn-{ahead}"));
            let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
            segment.append(&mut frames(SHORT + 1000)).unwrap();
            if ahead {
                append(&mut segment, 2000);
                append(&mut segment, SHORT - 100);
            }
            segment.sync().unwrap();
            let (durable, mut before) = (segment.length, std::fs::read(&path).unwrap());
            segment.append(&mut frames(SHORT + 1)).unwrap();
            let (whole, after) = (segment.length, std::fs::read(&path).unwrap());
            drop(segment);
            before.resize(after.len(), 0);
            let check = |bytes: &[u8], what: &str| {
                std::fs::write(&path, bytes).unwrap();
                let Ok(End::Open { whole: read, .. }) = end(&path) else {
                    panic!("{what}: {:?}", end(&path))
                };
                assert!((durable..=whole).contains(&read), "{what}: {read}");
                read
            };
            // These bytes of one, and all others of the other.
            let mix = |these: &[u8], others: &[u8], range: &Range<usize>| {
                let mut mixed = others.to_vec();
                mixed[range.clone()].copy_from_slice(&these[range.clone()]);
                mixed
            };
            let first = durable as usize / BLOCK * BLOCK;
            for at in (first..(whole as usize).next_multiple_of(BLOCK)).step_by(BLOCK) {
                check(&after[..at.max(durable as usize)], "the end is not there");
                check(&mix(&after, &before, &(at..at + BLOCK)), "one block is there");
                let read = check(&mix(&before, &after, &(at..at + BLOCK)), "one block is not there");
                // A start goes on where whole frames end.
                if at % (4 * BLOCK) == 0 {
                    Segment::reopen(&directory, 1, read).unwrap().end(&mut frames(SHORT + 1), 2).unwrap();
                    assert_eq!(end(&path), Ok(End::Continued(2)));
                }
            }
            for there in 0..1 << (BLOCK / 512) {
                let mut mixed = after[..first + 2 * BLOCK].to_vec();
                for part in (0..BLOCK / 512).filter(|part| there >> part & 1 == 0) {
                    let at = first + part * 512;
                    mixed = mix(&before, &mixed, &(at..at + 512));
                }
                check(&mixed, "a part of the first block is there");
            }
        }
    }

    /// A server that works appends what was read as zeros.
    #[test]
    fn frames_that_come_while_a_log_is_read_are_no_damage() {
        let (_folder, directory, path) = Folder::new("live");
        let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
        append(&mut segment, 70 << 10);
        let whole = segment.length;
        let mut more = 3;
        let read = read(&path, 1, Some(ORIGIN), |_, _| {
            // The first sync is told with the second append.
            while more > 0 {
                more -= 1;
                append(&mut segment, 1000);
            }
            Ok(())
        });
        assert_eq!(read.unwrap().1, End::Open { whole, torn: 0 });
    }

    /// Of a log that was ended nothing is left out silently, wherever it is damaged; its end is zeros for the most part.
    #[test]
    fn an_end_says_that_all_before_it_was_durable() {
        let (_folder, directory, path) = Folder::new("end");
        let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
        append(&mut segment, 1);
        let before = segment.length;
        append(&mut segment, 1);
        let whole = segment.length;
        drop(segment);
        Segment::reopen(&directory, 1, whole).unwrap().end(&mut [], 2).unwrap();
        assert_eq!(end(&path), Ok(End::Continued(2)));
        let bytes = std::fs::read(&path).unwrap();
        for at in before as usize..whole as usize {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            let end = end(&path);
            assert!(matches!(&end, Err(why) if why.contains("is damaged at byte")), "byte {at}: {end:?}");
        }
    }
}
