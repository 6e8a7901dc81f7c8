//! What a pull gets: the bytes of one slice at one version.

use crate::dtype::DType;
use crate::params::Buffer;
use crate::sync::Arc;

/// Values or state of one slice at one version; an `exact` slice's values are pinned, not copied.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Type of the values.
    pub dtype: DType,
    /// The slice's version.
    pub version: u64,
    /// How many of its changes were the asking client's own.
    pub own: u64,
    /// Optimizer steps taken.
    pub step: u64,
    pub(super) bytes: Bytes,
}

#[derive(Clone, Debug)]
pub(super) enum Bytes {
    Pinned(Arc<Buffer>),
    Copied(Arc<Vec<u8>>),
}

impl AsRef<[u8]> for Snapshot {
    fn as_ref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Pinned(buffer) => buffer.bytes(),
            Bytes::Copied(bytes) => bytes,
        }
    }
}
