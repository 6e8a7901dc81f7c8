//! Snapshots of a shard: writing and reading them.

pub(crate) mod generation;
mod layout;
mod load;
pub(crate) mod manifest;
pub(crate) mod safetensors;
mod write;

pub(crate) use write::{Subject, write};
