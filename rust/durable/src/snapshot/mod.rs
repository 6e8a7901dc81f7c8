//! Snapshots: writing one while pushes continue, and reading one back. Nothing here knows the log or the
//! journal.

pub(crate) mod generation;
mod layout;
mod load;
pub(crate) mod manifest;
pub(crate) mod safetensors;
mod slice_files;
mod write;

pub(crate) use write::{SnapshotInput, write};
