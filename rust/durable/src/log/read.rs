//! Reading a segment of the log, frame by frame.

use crate::files::damage::Unusable;
use crate::files::io::failed;
use crate::frame::{self, Author, Content, Origin};
use crate::log::read_ahead;
use crate::log::scan::{next, torn_bytes, was_durable};
use fastps_core::error::Result;
use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;

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
