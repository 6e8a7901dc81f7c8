//! A shard's directory: file names, the lock, checksummed output and removal. No file format is known here.

pub(crate) mod checksum;
pub(crate) mod damage;
pub(crate) mod directory;
pub(crate) mod io;
pub(crate) mod lock;
pub(crate) mod names;
pub(crate) mod output;
pub(crate) mod removal;
