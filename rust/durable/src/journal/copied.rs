//! What copies of the log need to know of it: how far it is synced, where they go on, and whether a part that was
//! copied before is part of it.

use crate::files::io::failed;
use crate::files::removal::open_segment;
use crate::journal::Journal;
use crate::log::read::beginning;
use crate::owner::LogPosition;
use fastps_core::error::Result;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

impl Journal {
    /// The position of the log before which everything is synced, and its place in the files.
    pub fn synced(&self) -> (u64, LogPosition) {
        let (position, (segment, offset)) = self.log.synced_position();
        (position, LogPosition { segment, offset })
    }

    /// Where the log is copied from if it is copied up to `copied`: from there, or, if that is no longer here,
    /// from the newest snapshot on, or from the beginning of the shard.
    pub fn copied_from(&self, copied: LogPosition) -> Result<LogPosition> {
        let segments = self.directory.segments()?;
        if segments.contains(&copied.segment) {
            return Ok(copied);
        }
        let newest = self.files().as_ref().and_then(|files| files.kept.back().map(|(_, log)| *log));
        let segment = newest.or_else(|| segments.first().copied()).unwrap_or(1);
        Ok(LogPosition { segment, offset: 0 })
    }

    /// The beginning of the log, if that is also the beginning of the shard: then the log alone is its state.
    pub fn begins_with_the_shard(&self) -> Result<Option<LogPosition>> {
        let has_snapshot =
            self.files().as_ref().is_none_or(|files| files.kept.iter().any(|(number, _)| *number > 0));
        let is_first = self.directory.segments()?.first() == Some(&1);
        Ok((is_first && !has_snapshot).then_some(LogPosition { segment: 1, offset: 0 }))
    }

    /// Returns whether the log has these bytes at this place, or has had them: its segments before later ones are
    /// removed.
    pub fn has(&self, place: LogPosition, bytes: &[u8]) -> Result<bool> {
        let path = self.directory.segment(place.segment);
        let mut own = vec![0; bytes.len()];
        match open_segment(&path).and_then(|file| file.read_exact_at(&mut own, place.offset)) {
            Ok(()) => Ok(own == bytes),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ResourceBusy) => {
                self.begins_after(place.segment)
            }
            Err(error) => Err(failed("read", &path, &error)),
        }
    }

    /// Returns whether the server of this incarnation has begun a segment of the log, which may be removed.
    pub fn has_begun(&self, segment: u64, incarnation: u64) -> Result<bool> {
        let path = self.directory.segment(segment);
        if !path.exists() {
            return self.begins_after(segment);
        }
        Ok(beginning(&path)?.is_some_and(|begun| begun.author.incarnation == incarnation))
    }

    fn begins_after(&self, segment: u64) -> Result<bool> {
        Ok(self.directory.segments()?.first().is_some_and(|first| *first > segment))
    }
}
