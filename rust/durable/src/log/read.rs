//! Reading a log segment frame by frame. A torn end is reported as such; any other deviation is damage.

use crate::files::damage::Unusable;
use crate::files::io::failed;
use crate::frame::{self, Author, Content, Origin};
use crate::log::read_ahead;
use crate::log::scan::{next, torn_bytes, was_durable};
use fastps_core::error::Result;
use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;

/// The first frame of a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentHeader {
    pub(crate) number: u64,
    pub(crate) origin: Origin,
    pub(crate) author: Author,
    /// Changes before this segment are missing.
    pub(crate) after_gap: bool,
    /// Set if anything follows the first frame.
    pub(crate) more: bool,
}

/// Reads the first frame of a segment. `None`: the file does not begin with one.
pub(crate) fn beginning(path: &Path) -> Result<Option<SegmentHeader>> {
    let read = || {
        let mut file = File::open(path)?;
        let (length, mut content) = (file.metadata()?.len(), Vec::new());
        Ok(next(&mut file, length, &mut content)?.map(|size| (content, length > size)))
    };
    let begun = read().map_err(|error: std::io::Error| failed("read", path, &error))?;
    Ok(begun.and_then(|(content, more)| match frame::read(&content) {
        Some(Content::Segment { number, after_gap, origin, author, .. }) => {
            Some(SegmentHeader { number, origin, author, after_gap, more })
        }
        _ => None,
    }))
}

/// How a segment ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SegmentEnd {
    /// Complete; the log continues in the segment of this number.
    Continued(u64),
    /// Without an end frame.
    Open {
        /// Bytes of whole frames.
        whole: u64,
        /// Bytes after them that are not a whole frame.
        torn: u64,
    },
    /// Not reached: the caller has stopped before it.
    Ahead,
}

/// Reads a segment and calls `each` for every frame, until `each` fails or breaks. Damage is reported with
/// its position.
pub(crate) fn read(
    path: &Path,
    number: u64,
    origin: Option<Origin>,
    mut each: impl FnMut(u64, Content<'_>) -> Result<ControlFlow<()>, Unusable>,
) -> Result<(Origin, SegmentEnd), Unusable> {
    let fail = |error: std::io::Error| Unusable::Failed(failed("read", path, &error));
    let mut reading = SegmentReader { path, number, origin, begun: None, at: 0, next: None, stopped: false };
    read_ahead::read(path, |frames| reading.take(frames, &mut each))?;
    let SegmentReader { begun, at, next, stopped, .. } = reading;
    // The first frame became durable before anything else was written.
    let Some(origin) = begun else {
        return reading.damaged("is damaged: its first frame is missing or invalid");
    };
    if stopped {
        return Ok((origin, SegmentEnd::Ahead));
    }
    if let Some(next) = next {
        return Ok((origin, SegmentEnd::Continued(next)));
    }
    let torn = torn_bytes(path, at).map_err(fail)?;
    if torn > 0 && was_durable(path, at).map_err(fail)? {
        return reading
            .damaged(&format!("is damaged at byte {at}: {torn} bytes from there on are unreadable"));
    }
    Ok((origin, SegmentEnd::Open { whole: at, torn }))
}

/// A segment being read.
struct SegmentReader<'a> {
    path: &'a Path,
    number: u64,
    origin: Option<Origin>,
    /// The origin in the first frame.
    begun: Option<Origin>,
    at: u64,
    /// The segment in which the log continues.
    next: Option<u64>,
    stopped: bool,
}

impl SegmentReader<'_> {
    fn take(
        &mut self,
        mut frames: &[u8],
        each: &mut impl FnMut(u64, Content<'_>) -> Result<ControlFlow<()>, Unusable>,
    ) -> Result<ControlFlow<()>, Unusable> {
        while let Some((content, rest)) = frame::split_whole(frames) {
            let at = self.at;
            let Some(said) = frame::read(content) else {
                return self.damaged(&format!("contains an unknown kind of frame at byte {at}"));
            };
            match (said, self.begun) {
                (Content::Segment { format, number, origin, .. }, None) => {
                    self.begin(format, number, origin)?;
                }
                (Content::Segment { .. } | Content::Slice(_), _) | (_, None) => {
                    return self.damaged(&format!("contains a misplaced frame at byte {at}"));
                }
                (Content::End(next), Some(_)) => {
                    self.next = Some(next);
                    return Ok(ControlFlow::Break(()));
                }
                (said, Some(_)) => {
                    if each(at, said)?.is_break() {
                        self.stopped = true;
                        return Ok(ControlFlow::Break(()));
                    }
                }
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
                "is misplaced: it is segment {number} of shard {shard} of {shards} in directory {id:016x}"
            ));
        }
        self.begun = Some(origin);
        Ok(())
    }

    fn damaged<T>(&self, why: &str) -> Result<T, Unusable> {
        Err(Unusable::Damaged(format!("{} {why}", self.path.display())))
    }
}
