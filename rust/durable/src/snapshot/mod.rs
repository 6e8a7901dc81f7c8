//! Snapshots of a shard: writing and reading them.

pub(crate) mod generation;
pub(crate) mod safetensors;
pub(crate) mod write;

pub(crate) use write::{Subject, write};
