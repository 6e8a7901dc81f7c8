//! The result of a recovery.

use crate::catalog::Catalog;
use crate::frame::Origin;
use crate::recovery::growth::Growth;
use crate::recovery::history::{FileId, History};
use std::collections::VecDeque;
use std::fmt;

/// Result of a start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The snapshot that was loaded.
    pub generation: Option<u64>,
    /// Slices in the shard.
    pub slices: u64,
    /// Records that were replayed.
    pub repeated: u64,
    /// Irregularities without loss, one sentence each.
    pub notes: Vec<String>,
    /// Durable changes that were lost with [`Settings::accept_loss`], one sentence each, with counts.
    pub lost: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slices, repeated, .. } = self;
        match self.generation {
            Some(generation) => write!(f, "snapshot {generation}")?,
            None => write!(f, "no snapshot")?,
        }
        write!(f, ", {slices} slices, {repeated} later changes")
    }
}

/// The state of the files, and where to continue.
pub(crate) struct Recovered {
    pub(crate) report: Report,
    pub(crate) catalog: Catalog,
    pub(crate) origin: Origin,
    /// The next free segment number.
    pub(crate) segment: u64,
    /// The last segment of the log, and the length of its whole frames.
    pub(crate) last: Option<(u64, u64)>,
    /// The log that was read.
    pub(crate) growth: Growth,
    /// The next free snapshot number.
    pub(crate) generation: u64,
    pub(crate) kept: KeptSnapshots,
    /// Snapshots that cannot be used, and why.
    pub(crate) damaged: Vec<(u64, String)>,
    /// Files of other servers that are not used.
    pub(crate) others: Vec<FileId>,
    /// The provenance of all other files.
    pub(crate) history: History,
    /// Something was unreadable: a new snapshot must be written.
    pub(crate) renew: bool,
}

/// Intact snapshots, oldest first, each with the first segment it needs. With history, 0 stands for the empty
/// shard that the log begins with.
pub(crate) type KeptSnapshots = VecDeque<(u64, u64)>;
