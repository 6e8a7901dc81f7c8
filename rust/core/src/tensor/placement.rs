//! Placement of slices on shards: each slice goes to the shard with the least load.

use crate::tensor::TensorSpec;

/// Bytes placed on each shard of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load(Vec<u64>);

impl Load {
    /// A load of zero on every shard.
    pub fn new(shards: usize) -> Self {
        Self(vec![0; shards.max(1)])
    }

    /// The number of shards.
    pub fn shards(&self) -> usize {
        self.0.len()
    }

    /// Places a slice of a tensor on the shard with the least load, the first of several, and returns it.
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

    /// Counts a slice that is already on this shard. False if there is no such shard.
    pub fn add(&mut self, shard: u32, spec: &TensorSpec, slice: usize) -> bool {
        let load = self.0.get_mut(shard as usize);
        load.map(|load| *load += weight(spec, slice)).is_some()
    }

    /// Stops counting a slice on this shard.
    pub fn remove(&mut self, shard: u32, spec: &TensorSpec, slice: usize) {
        if let Some(load) = self.0.get_mut(shard as usize) {
            *load = load.saturating_sub(weight(spec, slice));
        }
    }

    /// Bytes placed on all shards.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// The bytes of a slice: parameters, state, and an allowance for the slice itself.
fn weight(spec: &TensorSpec, slice: usize) -> u64 {
    (spec.bytes_with_state(spec.slice_range(slice).len()) + 512) as u64
}
