//! The spaces of vectors that a client has met, and their tensors.

use fastps_core::tensor::SpaceId;
use std::collections::HashMap;
use std::sync::Arc;

/// A space, with its name within the run.
#[derive(Debug)]
struct KnownSpace {
    name: Arc<str>,
    tensors: Arc<[Arc<str>]>,
}

/// The spaces that a client has met.
#[derive(Debug, Default)]
pub(crate) struct KnownSpaces(HashMap<SpaceId, KnownSpace>);

impl KnownSpaces {
    pub(crate) fn insert(&mut self, space: SpaceId, name: &Arc<str>, tensors: &[Arc<str>]) {
        self.0.insert(space, KnownSpace { name: name.clone(), tensors: tensors.into() });
    }

    pub(crate) fn remove(&mut self, space: SpaceId) {
        self.0.remove(&space);
    }

    pub(crate) fn tensors(&self, space: SpaceId) -> Option<Arc<[Arc<str>]>> {
        self.0.get(&space).map(|known| known.tensors.clone())
    }

    /// The newest space with this name.
    pub(crate) fn newest(&self, name: &str) -> Option<SpaceId> {
        self.0.iter().filter(|(_, known)| *known.name == *name).map(|(id, _)| *id).max()
    }
}
