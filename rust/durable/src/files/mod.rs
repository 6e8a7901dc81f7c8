//! The directory of a shard: the names in it, its lock, and checksums of what is written there.

pub(crate) mod checksum;
pub(crate) mod damage;
pub(crate) mod directory;
pub(crate) mod io;
pub(crate) mod lock;
pub(crate) mod names;
pub(crate) mod output;
pub(crate) mod removal;
