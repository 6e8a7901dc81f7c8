//! Versions of slices: what a pull or a receipt reports, and what a later push is based on.

use super::SliceId;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

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
#[derive(Clone, Debug, Default)]
pub struct Versions {
    /// The client that asked; the `own` counts are valid only for it.
    pub client: u64,
    tensors: Vec<(Arc<str>, Vec<SliceVersion>)>,
    /// The place of each tensor, made for the first search.
    places: OnceLock<HashMap<Arc<str>, usize, RandomState>>,
}

impl PartialEq for Versions {
    fn eq(&self, other: &Self) -> bool {
        (self.client, &self.tensors) == (other.client, &other.tensors)
    }
}

impl Eq for Versions {}

impl Versions {
    /// Versions that a client has asked for: per tensor, in slice order.
    pub fn new(client: u64, tensors: Vec<(Arc<str>, Vec<SliceVersion>)>) -> Self {
        Self { client, tensors, places: OnceLock::new() }
    }

    /// All tensors, with their slices' versions in slice order.
    pub fn tensors(&self) -> &[(Arc<str>, Vec<SliceVersion>)] {
        &self.tensors
    }

    /// A tensor's versions, if they are included.
    pub fn tensor(&self, name: &str) -> Option<&[SliceVersion]> {
        let places = self.places.get_or_init(|| {
            self.tensors.iter().enumerate().rev().map(|(k, (name, _))| (name.clone(), k)).collect()
        });
        places.get(name).and_then(|k| self.tensors.get(*k)).map(|(_, versions)| versions.as_slice())
    }

    /// These versions with later ones of some tensors.
    pub fn updated(&self, later: &Self) -> Self {
        let own = self.client == later.client;
        let earlier = |versions: &[SliceVersion]| {
            let known = |of: &SliceVersion| SliceVersion { own: if own { of.own } else { 0 }, ..*of };
            versions.iter().map(known).collect()
        };
        let latest = |(name, versions): &(Arc<str>, Vec<SliceVersion>)| {
            (name.clone(), later.tensor(name).map_or_else(|| earlier(versions), <[SliceVersion]>::to_vec))
        };
        let mut tensors: Vec<_> = self.tensors.iter().map(latest).collect();
        tensors.extend(later.tensors.iter().filter(|(name, _)| self.tensor(name).is_none()).cloned());
        Self::new(later.client, tensors)
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
