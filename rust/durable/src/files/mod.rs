//! The directory of a shard: the names in it, its lock, and checksums of what is written there.

pub(crate) mod checksum;
pub(crate) mod directory;
pub(crate) mod lock;
