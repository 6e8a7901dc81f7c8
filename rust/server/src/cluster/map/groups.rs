//! The groups of the map: their names, their numbers, and how many tensors each has.

use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::{Charge, Meter, Purpose};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Most groups.
const MAX_GROUPS: usize = 1 << 16;
/// Memory of a group beside its name.
const GROUP_BYTES: u64 = 256;

#[derive(Debug)]
struct Group {
    number: u32,
    /// Number of tensors, including those being registered.
    tensors: usize,
    _memory: Charge,
}

/// Groups by name. Numbers are never reused.
#[derive(Debug)]
pub(super) struct Groups {
    by_name: HashMap<Arc<str>, Group>,
    /// Names of tensors that exist, by the number of their group.
    committed: HashMap<u32, BTreeSet<Arc<str>>>,
    /// Groups without tensors: removed unless workers have joined them.
    empty: HashSet<Arc<str>>,
    last: u32,
    meter: Arc<Meter>,
}

impl Groups {
    pub(super) fn new(meter: Arc<Meter>) -> Self {
        Self { by_name: HashMap::new(), committed: HashMap::new(), empty: HashSet::new(), last: 0, meter }
    }

    /// Counts a tensor that an earlier process had.
    pub(super) fn restore(&mut self, name: &Arc<str>, number: u32) -> Result<()> {
        self.last = self.last.max(number);
        self.add(name, number)
    }

    /// The name of a group.
    pub(super) fn name(&self, number: u32) -> Option<Arc<str>> {
        self.by_name.iter().find(|(_, group)| group.number == number).map(|(name, _)| name.clone())
    }

    /// Counts a tensor whose registration begins; the number of its group.
    pub(super) fn enter(&mut self, name: &Arc<str>) -> Result<u32> {
        if let Some(group) = self.by_name.get_mut(name) {
            group.tensors += 1;
            self.empty.remove(name);
            return Ok(group.number);
        }
        let next = self.last.checked_add(1).filter(|_| self.by_name.len() < MAX_GROUPS);
        let number = next.ok_or_else(|| {
            Error::new(Kind::Capacity, "too many groups")
                .expected(format!("at most {MAX_GROUPS}"), "one more")
        })?;
        self.add(name, number)?;
        self.last = number;
        Ok(number)
    }

    fn add(&mut self, name: &Arc<str>, number: u32) -> Result<()> {
        if let Some(group) = self.by_name.get_mut(name) {
            group.tensors += 1;
            return Ok(());
        }
        let memory = self.meter.take(Purpose::Map, GROUP_BYTES + 2 * name.len() as u64)?;
        self.by_name.insert(name.clone(), Group { number, tensors: 1, _memory: memory });
        Ok(())
    }

    /// Notes that a tensor now exists.
    pub(super) fn commit(&mut self, group: &str, tensor: &Arc<str>) {
        if let Some(group) = self.by_name.get(group) {
            self.committed.entry(group.number).or_default().insert(tensor.clone());
        }
    }

    /// Notes that a tensor exists no more.
    pub(super) fn uncommit(&mut self, group: &str, tensor: &str) {
        let Some(group) = self.by_name.get(group) else { return };
        if let Some(tensors) = self.committed.get_mut(&group.number) {
            tensors.remove(tensor);
            if tensors.is_empty() {
                self.committed.remove(&group.number);
            }
        }
    }

    /// The tensors of a group that exist; `None`: there are none.
    pub(super) fn tensors(&self, group: &str) -> Option<&BTreeSet<Arc<str>>> {
        self.committed.get(&self.by_name.get(group)?.number)
    }

    /// Counts a tensor that is gone, or whose registration has ended.
    pub(super) fn leave(&mut self, name: &Arc<str>) {
        if let Some(group) = self.by_name.get_mut(name) {
            group.tensors -= 1;
            if group.tensors == 0 {
                self.empty.insert(name.clone());
            }
        }
    }

    /// Returns whether tensors of this group exist.
    pub(super) fn has(&self, number: u32) -> bool {
        self.committed.contains_key(&number)
    }

    /// Forgets the groups that have neither tensors nor workers.
    pub(super) fn sweep(&mut self, is_joined: impl Fn(u32) -> bool) {
        let groups = &mut self.by_name;
        self.empty.retain(|name| {
            let kept = groups.get(name).is_some_and(|group| is_joined(group.number));
            if !kept {
                groups.remove(name);
            }
            kept
        });
    }
}
