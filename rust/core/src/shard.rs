//! A shard: the slices that one address serves, their memory limit, and the groups of their workers. Server
//! and in-process store send every push through [`Shard::push`] or [`Shard::push_to`], where the shard's
//! policy decides on it.

use crate::base::cut::Cuts;
use crate::base::error::{Error, Kind, Result};
use crate::base::fault::fault;
use crate::base::isa::Isa;
use crate::base::mode::{Joined, MembershipRequest, Presence};
use crate::base::sync::{Arc, AtomicU64, Ordering, RwLock, read, write};
use crate::coordination::group::{Groups, not_there};
use crate::slice::clients::Clients;
use crate::slice::frame::{Applied, Identity, Push};
use crate::slice::identity::Completion;
use crate::slice::policy::Policy;
use crate::slice::record::Sink;
use crate::slice::{Counters, Resolved, Slice, Snapshot, Surroundings, Why};
use crate::tensor::shared_directory::SharedTensor;
use crate::tensor::{SliceId, SpaceId, TensorSpec};
use foldhash::fast::RandomState;
use std::collections::{BTreeSet, HashMap, HashSet};

pub use crate::memory::{Charge, EXPOSED_TAIL_BYTES, Exposed, ExposedFile, Meter, Purpose};

/// The configuration of a shard.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Its index in the cluster.
    pub index: u32,
    /// Most bytes that the shard may take for its slices, their readers and its clients.
    pub memory_limit: u64,
    /// The instruction set of its kernels.
    pub isa: Isa,
    /// Decides when pushes are applied; `None`: the modes of the groups do.
    pub policy: Option<Arc<dyn Policy>>,
    /// Receives the records of changes, if any are wanted.
    pub sink: Option<Arc<dyn Sink>>,
    /// The memory for values of full-length `exact` slices, if other processes may read them there.
    pub exposed: Option<Arc<Exposed>>,
}

impl ShardConfig {
    /// A shard that applies pushes on arrival and keeps no records.
    pub fn new(index: u32, memory_limit: u64, isa: Isa) -> Self {
        Self { index, memory_limit, isa, policy: None, sink: None, exposed: None }
    }
}

/// The slices of one server.
#[derive(Debug)]
pub struct Shard {
    config: ShardConfig,
    groups: Arc<Groups>,
    policy: Arc<dyn Policy>,
    slices: RwLock<SliceTable>,
    clients: Arc<Clients>,
    /// Number of slices that calls other than pushes and pulls have visited.
    touched: AtomicU64,
    meter: Arc<Meter>,
    counters: Arc<Counters>,
    cuts: Arc<Cuts>,
}

/// Bytes of all slices of a tensor.
pub fn memory_for(spec: &TensorSpec) -> u64 {
    let last = spec.slice_count() - 1;
    let memory = |index| Slice::memory_for(spec, spec.slice_range(index).len());
    memory(0).saturating_mul(last as u64).saturating_add(memory(last))
}

#[derive(Debug, Default)]
struct SliceTable {
    slices: HashMap<SliceId, Arc<Slice>, RandomState>,
    /// The slices of each group.
    groups: HashMap<u32, HashSet<SliceId, RandomState>>,
}

impl SliceTable {
    fn insert(&mut self, slice: Arc<Slice>) {
        self.groups.entry(slice.group()).or_default().insert(slice.id());
        self.slices.insert(slice.id(), slice);
    }

    fn remove(&mut self, id: SliceId) -> Option<Arc<Slice>> {
        let slice = self.slices.remove(&id)?;
        if let Some(group) = self.groups.get_mut(&slice.group()) {
            group.remove(&id);
            if group.is_empty() {
                self.groups.remove(&slice.group());
            }
        }
        Some(slice)
    }
}

impl Shard {
    /// An empty shard.
    pub fn new(config: ShardConfig) -> Self {
        let meter = Meter::new(config.memory_limit);
        let groups = Arc::new(Groups::default());
        let policy = config.policy.clone().unwrap_or_else(|| groups.clone());
        let (counters, cuts) = (Arc::default(), Arc::default());
        let (slices, clients, touched) = (RwLock::default(), Arc::default(), AtomicU64::new(0));
        Self { config, groups, policy, slices, clients, touched, meter, counters, cuts }
    }

    /// Its index in the cluster.
    pub fn index(&self) -> u32 {
        self.config.index
    }

    /// The groups of workers, which are also the default policy.
    pub fn groups(&self) -> &Arc<Groups> {
        &self.groups
    }

    /// The meter of the shard's memory, for callers that take memory on its behalf.
    pub fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    /// The memory where other processes may read values.
    pub fn exposed(&self) -> Option<&Arc<Exposed>> {
        self.config.exposed.as_ref()
    }

    /// Creates these slices (identifier, index in the tensor), all or none. Values start at 0, the state at
    /// the optimizer's initial value.
    pub fn create(&self, spec: &Arc<TensorSpec>, group: u32, slices: &[(SliceId, usize)]) -> Result<()> {
        self.create_in(None, spec, group, slices)
    }

    /// As [`Shard::create`], in memory shared between processes if `shared` is given.
    pub(crate) fn create_in(
        &self,
        shared: Option<&Arc<SharedTensor>>,
        spec: &Arc<TensorSpec>,
        group: u32,
        slices: &[(SliceId, usize)],
    ) -> Result<()> {
        spec.validate()?;
        if let Some((_, index)) = slices.iter().find(|(_, index)| *index >= spec.slice_count()) {
            return Err(Error::new(Kind::Config, "the tensor has no such slice")
                .tensor(spec.name.clone())
                .shard(self.index())
                .expected(format!("an index below {}", spec.slice_count()), index));
        }
        let mut charge = self.take_memory(spec, slices.iter().map(|(_, index)| *index))?;
        let whole = |(_, index): &&(SliceId, usize)| spec.slice_range(*index).len() == spec.dtype.slice_len();
        let mut pieces = Slice::pieces(spec, slices.iter().filter(whole).count(), self.exposed());
        let made: Vec<_> = slices
            .iter()
            .map(|(id, index)| {
                let surroundings = Surroundings {
                    isa: self.config.isa,
                    sink: self.config.sink.clone(),
                    counters: self.counters.clone(),
                    cuts: self.cuts.clone(),
                    meter: self.meter.clone(),
                    clients: self.clients.clone(),
                };
                let charge = charge.split(Slice::memory_for(spec, spec.slice_range(*index).len()));
                Arc::new(Slice::new(*id, spec, *index, group, surroundings, (charge, shared), &mut pieces))
            })
            .collect();
        let mut all = write(&self.slices);
        let exists =
            |(id, _): &&(SliceId, usize)| all.slices.contains_key(id) && !fault("existence_not_checked");
        if let Some((id, _)) = slices.iter().find(exists) {
            let error = Error::new(Kind::Precondition, format!("slice {} exists already", id.0));
            return Err(error.tensor(spec.name.clone()).shard(self.index()));
        }
        for slice in made {
            if fault("created_one_by_one") {
                drop(all);
                all = write(&self.slices);
            }
            all.insert(slice);
        }
        Ok(())
    }

    /// The memory that these slices of a tensor need. Indices that the tensor does not have need none.
    pub fn memory_for(spec: &TensorSpec, slices: impl IntoIterator<Item = usize>) -> u64 {
        let there = slices.into_iter().filter(|index| *index < spec.slice_count());
        there.map(|index| Slice::memory_for(spec, spec.slice_range(index).len())).sum()
    }

    /// Takes the memory that these slices of a tensor need.
    pub(crate) fn take_memory(
        &self,
        spec: &TensorSpec,
        slices: impl IntoIterator<Item = usize>,
    ) -> Result<Charge> {
        let taken = self.meter.take(Purpose::Slices, Self::memory_for(spec, slices));
        taken.map_err(|error| error.tensor(spec.name.clone()).shard(self.index()))
    }

    /// Frees slices; unknown ones are ignored. Pulls that are being sent keep their values until they are
    /// done.
    pub fn remove(&self, slices: &[SliceId]) {
        let mut all = write(&self.slices);
        let removed: Vec<_> =
            slices.iter().filter(|_| !fault("slice_kept")).filter_map(|id| all.remove(*id)).collect();
        drop(all);
        self.touch(slices.len());
        for slice in removed {
            slice.end_waiting(Why::Removed);
        }
    }

    /// A slice by its identifier.
    pub fn slice(&self, id: SliceId) -> Result<Arc<Slice>> {
        read(&self.slices).slices.get(&id).cloned().ok_or_else(|| self.no_slice(id))
    }

    /// Slices by their identifiers, in the order given.
    pub fn slices(&self, ids: impl IntoIterator<Item = SliceId>) -> Vec<Result<Arc<Slice>>> {
        let all = read(&self.slices);
        // Slices are scattered in memory, so prefetch all before touching the first.
        let find = |id| {
            let found = all.slices.get(&id);
            if let Some(slice) = found {
                slice.prefetch();
            }
            (id, found)
        };
        let found: Vec<_> = ids.into_iter().map(find).collect();
        found.into_iter().map(|(id, slice)| slice.cloned().ok_or_else(|| self.no_slice(id))).collect()
    }

    /// The error of an unknown slice.
    pub fn no_slice(&self, id: SliceId) -> Error {
        let message = format!("the shard has no slice {}", id.0);
        Error::new(Kind::UnknownTensor, message).shard(self.index())
    }

    /// Applies, holds or refuses a push; `done` is called exactly once, possibly later and on another thread.
    pub fn push(&self, push: &Push<'_>, done: impl FnOnce(Result<Applied>) + Send + 'static) {
        let mut done = Some(done);
        let settled = match self.slice(push.slice) {
            Ok(slice) => self.push_to(&slice, push, || {
                let done = done.take();
                Box::new(move |result| {
                    if let Some(done) = done {
                        done(result);
                    }
                })
            }),
            Err(error) => Some(Err(error)),
        };
        if let (Some(result), Some(done)) = (settled, done) {
            done(result);
        }
    }

    /// As [`Shard::push`], for a caller that already has the slice. `None`: the push must wait, because a
    /// policy holds it or it repeats a pending one; the completion from `later` then gets the answer, once,
    /// possibly on another thread.
    #[inline(always)]
    pub fn push_to(
        &self,
        slice: &Arc<Slice>,
        push: &Push<'_>,
        later: impl FnOnce() -> Completion,
    ) -> Option<Result<Applied>> {
        let index = self.index();
        let later = || -> Completion {
            let done = later();
            Box::new(move |result| done(result.map_err(|error: Error| error.shard(index))))
        };
        let settled = slice.push(push, &*self.policy, later);
        settled.map(|result| result.map_err(|error| error.shard(index)))
    }

    /// The spaces that slices have open.
    pub fn open_spaces(&self) -> BTreeSet<SpaceId> {
        self.all().iter().filter_map(|slice| slice.space().map(|(space, _)| space.id)).collect()
    }

    /// The slices that have a space open.
    pub fn slices_of_space(&self, space: SpaceId) -> Vec<Arc<Slice>> {
        let open = |slice: &Arc<Slice>| slice.space().is_some_and(|(open, _)| open.id == space);
        self.all().into_iter().filter(open).collect()
    }

    /// Closes a space on all slices that have it open.
    pub fn close_space(&self, space: SpaceId) {
        for slice in self.all() {
            slice.close_space(space);
        }
    }

    /// The values of a slice at one version.
    pub fn pull(&self, client: u64, slice: SliceId) -> Result<Snapshot> {
        self.slice(slice)?.pull(client).map_err(|error| error.shard(self.index()))
    }

    /// The optimizer state of a slice, with all slots in order.
    pub fn pull_state(&self, client: u64, slice: SliceId) -> Result<Snapshot> {
        self.slice(slice)?.pull_state(client).map_err(|error| error.shard(self.index()))
    }

    /// The average of a slice's values; fails unless its tensor keeps one.
    pub fn pull_average(&self, client: u64, slice: SliceId) -> Result<Snapshot> {
        self.slice(slice)?.pull_average(client).map_err(|error| error.shard(self.index()))
    }

    /// Values pulled from a slice, in bfloat16: see [`Slice::in_bfloat16`].
    pub fn in_bfloat16(&self, slice: SliceId, pulled: Snapshot) -> Result<Snapshot> {
        self.slice(slice)?.in_bfloat16(pulled).map_err(|error| error.shard(self.index()))
    }

    /// Resolves a push in doubt: if it was not applied, it is fenced.
    pub fn resolve(&self, slice: SliceId, identity: Identity) -> Result<Resolved> {
        self.slice(slice)?.resolve(identity).map_err(|error| error.shard(self.index()))
    }

    /// As [`Shard::resolve`], but answers later if the outcome is not known yet: see
    /// [`Slice::resolve_later`].
    pub fn resolve_later(
        &self,
        slice: SliceId,
        identity: Identity,
        later: impl FnOnce() -> Completion,
    ) -> Option<Result<Resolved>> {
        let slice = match self.slice(slice) {
            Ok(slice) => slice,
            Err(error) => return Some(Err(error)),
        };
        let resolved = slice.resolve_later(identity, later);
        resolved.map(|resolved| resolved.map_err(|error| error.shard(self.index())))
    }

    /// Drops everything known about a client whose lease ended.
    pub fn forget_client(&self, client: u64) {
        let left = self.groups.leave_all(client);
        self.policy.forget(client);
        let met = self.clients.take(client);
        for slice in self.known(&met) {
            slice.forget_client(client);
        }
        for group in left {
            self.end_rounds(group);
        }
    }

    /// Returns whether the end of the client's session would drop anything: knowledge of the client in
    /// slices, or its place in a group.
    pub fn remembers(&self, client: u64) -> bool {
        self.clients.knows(client) || self.groups.has(client)
    }

    /// Returns whether the shard has a slice of this group.
    pub fn has_group(&self, group: u32) -> bool {
        read(&self.slices).groups.contains_key(&group)
    }

    /// Gives a worker a place in a group, and makes the versions that no longer wait for it: see
    /// [`Groups::join`].
    pub fn join(&self, group: u32, client: u64, seat: &MembershipRequest) -> Result<Joined> {
        let joined = self.groups.join(group, client, seat.clone(), self.meter());
        if matches!(seat.presence, Presence::Idle(_)) {
            self.end_rounds(group);
        }
        joined
    }

    /// Removes a worker from a group or from its warm start. False: it had no place there.
    pub fn leave(&self, group: u32, client: u64, warm: bool) -> bool {
        let left = self.groups.leave(group, client, warm);
        if left {
            self.end_rounds(group);
        }
        left
    }

    /// Refuses the gradients that wait for others, because no more will come.
    pub fn end_waiting(&self) {
        for slice in self.all() {
            slice.end_waiting(Why::Ends);
        }
    }

    /// Returns whether the version after `base` of a slice of the group no longer waits for a worker that has
    /// a place there: its quorum is in without that worker, or it is made.
    pub fn goes_on_without(&self, group: u32, slice: SliceId, client: u64, base: u64) -> Result<bool> {
        let slice = self.slice(slice)?;
        if slice.group() != group || !self.groups.is_member_of(group, client, false) {
            return Err(not_there());
        }
        Ok(slice.goes_on_without(&*self.policy, client, base))
    }

    /// Makes the versions that waited for a worker that has left.
    fn end_rounds(&self, group: u32) {
        let slices = read(&self.slices).groups.get(&group).map(|ids| ids.iter().copied().collect());
        let slices: Vec<SliceId> = slices.unwrap_or_default();
        for slice in self.known(&slices) {
            slice.end_round(&*self.policy, None);
        }
    }

    /// Makes the versions whose grace is over. `now`: milliseconds of the caller's clock, which never goes back.
    pub fn end_graces(&self, now: u64) {
        for group in self.groups.with_grace() {
            let slices: Vec<_> = {
                let all = read(&self.slices);
                let ids = all.groups.get(&group).into_iter().flatten();
                ids.filter_map(|id| all.slices.get(id).cloned()).collect()
            };
            for slice in slices {
                slice.end_round(&*self.policy, Some(now));
            }
        }
    }

    /// The given slices, except those that the shard does not have.
    fn known(&self, ids: &[SliceId]) -> Vec<Arc<Slice>> {
        self.touch(ids.len());
        let all = read(&self.slices);
        ids.iter().filter_map(|id| all.slices.get(id).cloned()).collect()
    }

    fn touch(&self, slices: usize) {
        self.touched.fetch_add(slices as u64, Ordering::Relaxed);
    }

    /// Begins a cut over a group at this moment: [`Slice::image_in_cut`] returns each of its slices in its
    /// present state. Until [`Shard::end_cut`], pushes take memory to preserve the values that they
    /// overwrite, up to one more copy of the optimizer state. Fails if there is no room for that.
    pub fn begin_cut(&self, group: &str) -> Result<()> {
        let own = |slice: &&Arc<Slice>| *slice.spec().group == *group;
        let mut slices = self.all();
        // Their locks are taken in an order that depends on no hash, so that models of this repeat.
        slices.sort_unstable_by_key(|slice| slice.id());
        let needed: u64 = slices.iter().filter(own).map(|slice| slice.cut_bytes()).sum();
        let left = self.meter.limit().saturating_sub(self.meter.used());
        if needed > left {
            let why = format!("there is no memory for a cut over group {group:?} while pushes continue");
            let error = Error::new(Kind::Capacity, why).shard(self.index());
            return Err(error.expected(format!("{needed} bytes"), left));
        }
        self.cuts.begin(group).map_err(|error| error.shard(self.index()))
    }

    /// Ends the cut, and frees its remaining images.
    pub fn end_cut(&self) {
        self.cuts.end();
        for slice in self.all() {
            slice.leave_cut();
        }
    }

    fn all(&self) -> Vec<Arc<Slice>> {
        read(&self.slices).slices.values().cloned().collect()
    }

    /// Sets the moment of all slices that have changed since the last call; 0 for older changes. Moments are
    /// the caller's: the core has no clock.
    pub fn note_changes(&self, moment: u64) {
        for slice in self.all() {
            slice.note_change(moment);
        }
    }

    /// The name of a group, if the shard has a slice of it.
    pub fn group_name(&self, group: u32) -> Option<Arc<str>> {
        let table = read(&self.slices);
        let any = table.groups.get(&group)?.iter().next()?;
        Some(table.slices.get(any)?.spec().group.clone())
    }

    /// Of some tensors, of those that are allowed and have slices here: the smallest version of these, and the
    /// noted moment of their last change; 0 without one.
    pub fn last_changes(
        &self,
        names: &HashSet<&str>,
        allowed: impl Fn(&TensorSpec) -> bool,
    ) -> HashMap<Arc<str>, (u64, u64)> {
        let mut last = HashMap::new();
        for slice in self.all() {
            let name = &slice.spec().name;
            if names.contains(&**name) && allowed(slice.spec()) {
                let (version, moment) = last.entry(name.clone()).or_insert((u64::MAX, 0));
                *version = slice.version(0).0.min(*version);
                *moment = slice.changed_at().max(*moment);
            }
        }
        last
    }

    /// Counters since the start.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let slices = self.all();
        let live = |counter: fn(&Slice) -> u64| slices.iter().map(|slice| counter(slice)).sum::<u64>();
        let of_slices = |name: &str| match name {
            "pushes" => live(|slice| slice.changes().0),
            "assigns" => live(|slice| slice.changes().1),
            "updates_probed" => live(|slice| slice.probed().0),
            "updates_lost" => live(|slice| slice.probed().1),
            _ => 0,
        };
        let used_for =
            |purposes: &[Purpose]| purposes.iter().map(|purpose| self.meter.used_for(*purpose)).sum();
        let mut counters = vec![
            ("slices", slices.len() as u64),
            ("slices_touched", self.touched.load(Ordering::Relaxed)),
            ("versions", live(|slice| slice.version(0).0)),
            ("identity_entries", live(|slice| slice.known_clients() as u64)),
            ("memory_used", self.meter.used()),
            ("memory_limit", self.meter.limit()),
            ("memory_slices", self.meter.used_for(Purpose::Slices)),
            ("memory_copies", self.meter.used_for(Purpose::Copies)),
            ("memory_answers", self.meter.used_for(Purpose::Answers)),
            ("memory_held", self.meter.used_for(Purpose::Held)),
            ("memory_identities", used_for(&[Purpose::Identities, Purpose::Outcomes])),
            ("memory_connections", used_for(&[Purpose::Connections, Purpose::Backlog, Purpose::Rings])),
            ("memory_map", self.meter.used_for(Purpose::Map)),
            ("memory_vectors", self.meter.used_for(Purpose::Vectors)),
            ("workers", self.groups.len() as u64),
            ("slices_not_finite", slices.iter().filter(|slice| slice.overflowed()).count() as u64),
        ];
        counters.extend(self.counters.list().map(|(name, count)| (name, count + of_slices(name))));
        counters
    }
}
