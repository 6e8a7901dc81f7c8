//! Where slices go: each to the shard that has the least.

use crate::tensor::TensorSpec;

/// Bytes placed on each shard of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load(Vec<u64>);

impl Load {
    /// Nothing is placed.
    pub fn new(shards: usize) -> Self {
        Self(vec![0; shards.max(1)])
    }

    /// Shards of the cluster.
    pub fn shards(&self) -> usize {
        self.0.len()
    }

    /// Places a slice of a tensor; the first of the shards with the least load gets it.
    pub fn place(&mut self, spec: &TensorSpec, slice: usize) -> u32 {
        let mut at = 0;
        for shard in 1..self.0.len() {
            if self.0[shard] < self.0[at] {
                at = shard;
            }
        }
        self.0[at] += weight(spec, slice);
        at as u32
    }

    /// Takes note of a slice that lies there. False: there is no such shard.
    pub fn add(&mut self, shard: u32, spec: &TensorSpec, slice: usize) -> bool {
        let load = self.0.get_mut(shard as usize);
        load.map(|load| *load += weight(spec, slice)).is_some()
    }

    /// A slice lies there no more.
    pub fn remove(&mut self, shard: u32, spec: &TensorSpec, slice: usize) {
        if let Some(load) = self.0.get_mut(shard as usize) {
            *load = load.saturating_sub(weight(spec, slice));
        }
    }

    /// Bytes placed on all of them.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// What a slice weighs: parameters and state, and something for the slice itself.
fn weight(spec: &TensorSpec, slice: usize) -> u64 {
    (spec.dtype.size() * spec.slice_range(slice).len() * (1 + spec.optimizer.slots().len()) + 512) as u64
}
