//! What works on a data directory without a server: listing, checking, reshaping, exporting and copying snapshots.

pub mod checkpoint;
pub mod copy;
pub(crate) mod export;
pub(crate) mod reshape;
pub(crate) mod source;
mod target;
