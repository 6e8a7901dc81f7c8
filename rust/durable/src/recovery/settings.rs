//! The settings of a journal, and the progress of a recovery.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Settings of a journal.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The shard's directory.
    pub path: PathBuf,
    /// Index of the shard.
    pub shard: u32,
    /// Number of shards in the cluster.
    pub shards: u32,
    /// Number of snapshots to keep.
    pub keep: usize,
    /// Snapshots younger than this are kept as well.
    pub keep_for: Duration,
    /// Keep snapshots and log for rewinding, up to this many bytes; 0: only what a start may need.
    pub history: u64,
    /// Start with what can be read, even if durable changes are lost.
    pub accept_loss: bool,
}

/// Progress of a recovery, read by other threads.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Bytes read.
    pub(crate) done: AtomicU64,
    /// Bytes to read in all.
    pub(crate) total: AtomicU64,
}
