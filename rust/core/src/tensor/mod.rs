//! Descriptions of tensors and slices without their values: shape and settings, placement, versions, and
//! programs for their vectors.

pub mod placement;
pub mod program;
pub mod shared_directory;
mod space;
mod spec;
mod version;

pub use space::{MAX_VECTORS, Space, SpaceId, TENSOR_NAME, check_tensors};
pub use spec::{Apply, MAX_DIMS, MAX_NAME, SliceId, TensorSpec};
pub use version::{SliceVersion, Versions};
