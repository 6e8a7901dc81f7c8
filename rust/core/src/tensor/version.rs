//! Versions of slices: what a pull or a receipt reports, and what a later push is based on.

use super::SliceId;
use std::sync::Arc;

/// A slice's version, as a pull or a receipt reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceVersion {
    /// The slice.
    pub slice: SliceId,
    /// The number of changes so far.
    pub version: u64,
    /// How many of them were made by the client that asked.
    pub own: u64,
}

/// Versions of tensors, per slice: opaque to users, comparable, and the base of later pushes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions {
    /// The client that asked; the `own` counts are valid only for it.
    pub client: u64,
    /// Per tensor, in slice order.
    pub tensors: Vec<(Arc<str>, Vec<SliceVersion>)>,
}

impl Versions {
    /// A tensor's versions, if they are included.
    pub fn tensor(&self, name: &str) -> Option<&[SliceVersion]> {
        self.tensors.iter().find(|(n, _)| &**n == name).map(|(_, v)| v.as_slice())
    }

    /// A slice's version among its tensor's, which is probably the k-th.
    pub fn slice_near(versions: &[SliceVersion], k: usize, slice: SliceId) -> Option<SliceVersion> {
        let is = |version: &&SliceVersion| version.slice == slice;
        versions.get(k).filter(is).or_else(|| versions.iter().find(is)).copied()
    }

    /// A tensor's versions; the tensor is probably the k-th.
    pub fn tensor_near(&self, k: usize, name: &str) -> Option<&[SliceVersion]> {
        match self.tensors.get(k) {
            Some((n, versions)) if &**n == name => Some(versions),
            _ => self.tensor(name),
        }
    }
}
