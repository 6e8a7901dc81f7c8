//! The targets of a push: its tensors and their slices, looked up before anything is changed.

use super::{Store, Tensor};
use crate::base::error::Result;
use crate::base::sync::{Arc, Ordering};
use crate::push::sparse::Gathered;
use crate::slice::Slice;

/// The targets of a push's gradients.
#[derive(Debug)]
pub(super) struct Places {
    pub(super) generation: u64,
    pub(super) tensors: Vec<Arc<Tensor>>,
    /// Number of elements of all tensors.
    pub(super) elements: usize,
    /// Bytes of all values, not encoded.
    pub(super) bytes: u64,
    /// Sparse gradients: the rows that are pushed instead of the whole tensor.
    pub(super) sparse: Vec<Option<Gathered>>,
}

impl Places {
    pub(super) fn new(generation: u64, tensors: Vec<Arc<Tensor>>) -> Self {
        let elements = tensors.iter().map(|tensor| tensor.elements).sum();
        let bytes = tensors.iter().map(|tensor| tensor.bytes()).sum();
        Self { generation, tensors, elements, bytes, sparse: Vec::new() }
    }

    /// All slices that the push touches, each with the index of its tensor.
    pub(super) fn parts(&self) -> impl Iterator<Item = (usize, &Arc<Slice>)> {
        (0..self.tensors.len()).flat_map(|k| self.slices(k).map(move |slice| (k, slice)))
    }

    /// The slices of the k-th tensor that the push touches.
    fn slices(&self, k: usize) -> impl Iterator<Item = &Arc<Slice>> {
        let all = &self.tensors[k].slices;
        let rows = self.rows(k).map(|rows| rows.plan.parts());
        let dense = if rows.is_some() { &[] } else { all.as_slice() };
        dense.iter().chain(rows.unwrap_or_default().iter().map(|part| &all[part.slice]))
    }

    /// The rows of the k-th tensor that are pushed; `None`: all.
    pub(super) fn rows(&self, k: usize) -> Option<&Gathered> {
        self.sparse.get(k)?.as_ref()
    }
}

impl Store {
    pub(super) fn look_up<'a>(&self, names: impl Iterator<Item = &'a str>) -> Result<Places> {
        let generation = self.shared.generation.load(Ordering::Acquire);
        let all = self.tensors();
        let mut tensors = Vec::new();
        let mut names = names.peekable();
        while let Some(tensor) = names.peek().and_then(|name| all.get(*name)) {
            tensors.push(tensor.clone());
            names.next();
        }
        drop(all);
        // Another process may have registered the rest.
        for name in names {
            tensors.push(self.tensor(name)?);
        }
        Ok(Places::new(generation, tensors))
    }
}
