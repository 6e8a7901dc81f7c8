//! What a journal is told, and how far a recovery is.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// What a journal is told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The shard's directory.
    pub path: PathBuf,
    /// Its index.
    pub shard: u32,
    /// Shards of the cluster.
    pub shards: u32,
    /// Snapshots that are kept.
    pub keep: usize,
    /// Younger ones are kept besides.
    pub keep_for: Duration,
    /// Start with what can be read, although something that was durable cannot.
    pub accept_loss: bool,
}

/// How far a recovery is, for whoever looks on.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Bytes that were read.
    pub(crate) done: AtomicU64,
    /// Bytes to be read.
    pub(crate) total: AtomicU64,
}
