//! Descriptions of tensors and slices without their values: shape and settings, placement, versions.

pub mod placement;
mod spec;
mod version;

pub use spec::{Apply, MAX_DIMS, MAX_NAME, SliceId, TensorSpec};
pub use version::{SliceVersion, Versions};
