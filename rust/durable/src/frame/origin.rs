//! Which directory a file belongs to, and which server wrote it.

use fastps_core::error::{Error, Kind, Result};

/// Where a file belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Random; the same in all files of one directory.
    pub(crate) id: u64,
    pub(crate) shard: u32,
    pub(crate) shards: u32,
}

/// Which server wrote a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Author {
    /// Drawn at its start; 0: unknown.
    pub(crate) incarnation: u64,
    /// The server whose files it went on from; 0: unknown.
    pub(crate) predecessor: u64,
}

pub(crate) fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(Kind::Internal, format!("no random numbers: {error}")))?;
    Ok(u64::from_le_bytes(bytes))
}
