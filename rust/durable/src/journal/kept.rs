//! What copies of the history need to know of it: which of its files change no more.

use crate::journal::Journal;
use crate::journal::snapshots::MIN_KEPT_WITH_LOG;
use fastps_core::error::Result;

/// The files of a history that change no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptHistory {
    /// Identifier of the directory, in hex, as in the `latest` of its copies.
    pub directory: String,
    /// The segment that the history begins with.
    pub begin: u64,
    /// The segments up to the newest snapshot, ascending.
    pub segments: Vec<u64>,
    /// The snapshots that thinning leaves, ascending.
    pub snapshots: Vec<u64>,
    /// Most bytes of snapshots and log that are kept.
    pub most_bytes: u64,
}

impl Journal {
    /// The history that is kept. `None`: none is kept, or the shard is not recovered yet.
    pub fn kept_history(&self) -> Result<Option<KeptHistory>> {
        let files = self.files();
        let Some(files) = files.as_ref().filter(|_| self.keeps_history()) else { return Ok(None) };
        let (Some((_, begin)), Some((_, end))) = (files.kept.front(), files.kept.back()) else {
            return Ok(None);
        };
        let segments = self.directory.segments()?;
        let segments = segments.into_iter().filter(|number| (*begin..*end).contains(number)).collect();
        // The newest ones may still be thinned; the oldest one never is.
        let settled = files.kept.len().saturating_sub(self.settings.keep.max(MIN_KEPT_WITH_LOG)).max(1);
        let snapshots = files.kept.iter().take(settled).map(|(number, _)| *number);
        Ok(Some(KeptHistory {
            directory: format!("{:016x}", files.origin.id),
            begin: *begin,
            segments,
            // 0 stands for the empty shard.
            snapshots: snapshots.filter(|number| *number > 0).collect(),
            most_bytes: self.settings.history,
        }))
    }
}
