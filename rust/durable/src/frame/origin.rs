//! Identifies the directory that a file belongs to and the server that wrote it.

use fastps_core::error::{Error, Kind, Result};

/// The directory that a file belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Random; the same in all files of a directory.
    pub(crate) id: u64,
    pub(crate) shard: u32,
    pub(crate) shards: u32,
}

/// The server that wrote a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Author {
    /// Random number drawn when the server started. 0: unknown.
    pub(crate) incarnation: u64,
    /// Incarnation of the server that this one took the files over from. 0: unknown.
    pub(crate) predecessor: u64,
}

pub(crate) fn random_id() -> Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(Kind::Internal, format!("cannot get random numbers: {error}")))?;
    Ok(u64::from_le_bytes(bytes))
}
