//! The client's copy of the cluster map: the slices of each tensor, and their shards.

use crate::state::run::RunNames;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_proto::v1 as pb;
use fastps_transport::convert::header::Target;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

/// A tensor of the map.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) spec: Arc<TensorSpec>,
    /// Per slice: its identifier and its shard.
    pub(crate) slices: Vec<(SliceId, usize)>,
    pub(crate) group: u32,
}

impl Entry {
    /// Destination of frames for the k-th slice.
    pub(crate) fn target(&self, k: usize, epoch: u64) -> Target {
        Target { slice: self.slices[k].0, group: self.group, epoch }
    }

    /// Validates a server's entry: every slice has a place, every place exists.
    pub(crate) fn new(
        spec: Arc<TensorSpec>,
        placement: Option<&pb::Placement>,
        shards: usize,
    ) -> Result<Arc<Self>> {
        let bad = |what: &str| {
            Err(Error::new(Kind::Frame, format!("bad map from the server: {what}")).tensor(spec.name.clone()))
        };
        let Some(placement) = placement else {
            return bad("no placement");
        };
        if placement.slices.len() != spec.slice_count() || placement.shards.len() != placement.slices.len() {
            return bad("another number of slices than the shape gives");
        }
        if placement.shards.iter().any(|shard| *shard as usize >= shards) {
            return bad("a shard that the cluster does not have");
        }
        let places = placement.slices.iter().zip(&placement.shards);
        let slices = places.map(|(slice, shard)| {
            let shard = if fault("placement_ignored") { 0 } else { *shard as usize };
            (SliceId(*slice), shard)
        });
        let slices = slices.collect();
        let group = placement.group;
        Ok(Arc::new(Self { spec, slices, group }))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Map {
    run: RunNames,
    state: RwLock<MapState>,
}

#[derive(Debug, Default)]
struct MapState {
    epoch: u64,
    entries: BTreeMap<Arc<str>, Arc<Entry>>,
    /// Names that shard 0 once listed and no longer lists.
    gone: BTreeSet<Arc<str>>,
    /// Number of each group, and of its entries.
    groups: HashMap<Arc<str>, (u32, usize)>,
}

impl MapState {
    fn insert(&mut self, entry: Arc<Entry>) {
        let group = self.groups.entry(entry.spec.group.clone()).or_default();
        *group = (entry.group, group.1 + 1);
        if let Some(former) = self.entries.insert(entry.spec.name.clone(), entry) {
            self.leave(&former.spec.group);
        }
    }

    fn remove(&mut self, name: &str) -> Option<Arc<Entry>> {
        let entry = self.entries.remove(name)?;
        self.leave(&entry.spec.group);
        Some(entry)
    }

    /// Removes one of a group's entries.
    fn leave(&mut self, group: &str) {
        if let Some((_, entries)) = self.groups.get_mut(group) {
            *entries -= 1;
            if *entries == 0 {
                self.groups.remove(group);
            }
        }
    }

    /// Takes all entries out.
    fn clear(&mut self) -> BTreeMap<Arc<str>, Arc<Entry>> {
        self.groups.clear();
        std::mem::take(&mut self.entries)
    }
}

impl Map {
    /// An empty map of a run's tensors.
    pub(crate) fn of(run: RunNames) -> Self {
        Self { run, ..Self::default() }
    }

    /// The run that it is for.
    pub(crate) fn run(&self) -> &RunNames {
        &self.run
    }

    /// The known entries of these names, and the epoch.
    pub(crate) fn look_up<'a>(
        &self,
        names: impl Iterator<Item = &'a Arc<str>>,
    ) -> (u64, Vec<Option<Arc<Entry>>>) {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        (state.epoch, names.map(|name| state.entries.get(name).cloned()).collect())
    }

    /// The number of a group that a known tensor belongs to.
    pub(crate) fn group(&self, name: &str) -> Option<u32> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.groups.get(name).map(|(group, _)| *group)
    }

    pub(crate) fn names(&self) -> Vec<Arc<str>> {
        self.state.read().unwrap_or_else(PoisonError::into_inner).entries.keys().cloned().collect()
    }

    /// The tensor of each slice.
    pub(crate) fn names_of_slices(&self) -> HashMap<u64, Arc<str>> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let slices = state
            .entries
            .iter()
            .flat_map(|(name, entry)| entry.slices.iter().map(move |(id, _)| (id.0, name.clone())));
        slices.collect()
    }

    pub(crate) fn insert(&self, entry: Arc<Entry>) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        state.gone.remove(&entry.spec.name);
        state.insert(entry);
    }

    pub(crate) fn remove(&self, name: &str) -> Option<Arc<Entry>> {
        self.state.write().unwrap_or_else(PoisonError::into_inner).remove(name)
    }

    /// Applies shard 0's answer about these tensors (about all tensors, if none is named).
    pub(crate) fn update(&self, epoch: u64, asked: &[String], entries: Vec<Arc<Entry>>) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if asked.is_empty() || epoch != state.epoch {
            let before = state.clear();
            state.gone.extend(before.into_keys());
        }
        state.epoch = epoch;
        for name in asked {
            if let Some(entry) = state.remove(name) {
                state.gone.insert(entry.spec.name.clone());
            }
        }
        for entry in entries {
            state.gone.remove(&entry.spec.name);
            state.insert(entry);
        }
    }

    /// Returns whether a name was listed once and is no longer.
    pub(crate) fn is_gone(&self, name: &str) -> bool {
        self.state.read().unwrap_or_else(PoisonError::into_inner).gone.contains(name)
    }
}
