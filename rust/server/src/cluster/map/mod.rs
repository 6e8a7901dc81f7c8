//! The cluster map, on shard 0 only: registered tensors, the shards of their slices, and open registrations.

mod groups;
mod pages;

use crate::auth::budget::{Budget, Held, hold};
use crate::auth::scope::Scope;
use crate::cluster::reservation::lost;
use crate::persistence::Files;
use fastps_core::error::{Error, Kind, Result, unknown_tensor};
use fastps_core::fault::fault;
use fastps_core::placement::Load;
use fastps_core::shard::{Charge, Meter, Purpose, memory_for};
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_durable::{Event, Holding};
use fastps_proto::v1 as pb;
use fastps_transport::convert::{MAX_REGISTERED, MAX_REGISTERED_BYTES, MAX_RESERVATIONS, spec_to_wire};
use groups::Groups;
use prost::Message;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most slices of one tensor, so that its placement fits one message: 256 GiB of float32.
pub(crate) const MAX_SLICES: usize = 1 << 18;
/// Most tensors, registered and under way.
const MAX_TENSORS: usize = 1 << 20;
/// Names that an unknown one is compared with.
const MAX_COMPARED: usize = 10_000;
/// Most open registrations of one client.
const MAX_OPEN_REGISTRATIONS: usize = MAX_RESERVATIONS;
/// Retry delay of a client with too many open registrations.
const OPEN_RETRY_AFTER_MS: u64 = 1000;
/// Memory of an entry beside its names, its shape and its places: the spec, as a value and in wire form,
/// also in the catalog of the shard's files.
const ENTRY_BYTES: u64 = 1024;
/// Memory of each slice: identifier and shard, in the map and in the catalog.
const PLACE_BYTES: u64 = 24;
/// Memory to find a slice's registration while it is open.
const PENDING_BYTES: u64 = 40;
/// Retry delay of a question about an open registration.
const RETRY_AFTER_MS: u32 = 50;

#[derive(Debug)]
struct MapEntry {
    spec: Arc<TensorSpec>,
    wire: pb::MapEntry,
    reservation: u64,
    memory: Charge,
    /// The same memory, charged to the principal that registered the tensor if that has a limit.
    held: Option<Held>,
}

#[derive(Debug)]
struct Pending {
    entry: MapEntry,
    client: u64,
    deadline: Instant,
}

/// The map of a cluster.
#[derive(Debug)]
pub(crate) struct Map {
    entries: BTreeMap<Arc<str>, MapEntry>,
    pending: HashMap<Arc<str>, Pending>,
    /// The tensor of each reservation, open or committed.
    reservations: HashMap<u64, Arc<str>>,
    /// The reservation of each slice of an open registration.
    slices: HashMap<u64, u64>,
    /// Number of open registrations by client.
    open: HashMap<u64, usize>,
    groups: Groups,
    /// Bytes placed on each shard.
    load: Load,
    meter: Arc<Meter>,
    /// Number of entries that calls have read.
    touched: u64,
    lease: Duration,
    files: Files,
    /// The log's position behind the last tensor that came or went.
    noted: u64,
}

/// Outcome of the first step of a registration.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Registered {
    Exists(pb::Placement),
    UnderWay { retry_after_ms: u32 },
    Reserved { reservation: u64, placement: pb::Placement },
}

impl Map {
    /// An empty map over `shards` shards, whose memory is counted by that of shard 0.
    pub(crate) fn new(shards: usize, meter: Arc<Meter>, lease: Duration) -> Self {
        Self {
            entries: BTreeMap::new(),
            pending: HashMap::new(),
            reservations: HashMap::new(),
            slices: HashMap::new(),
            open: HashMap::new(),
            groups: Groups::new(meter.clone()),
            load: Load::new(shards),
            meter,
            touched: 0,
            lease,
            files: Files::default(),
            noted: 0,
        }
    }

    /// Adopts the tensors of an earlier process, and records changes from here on.
    pub(crate) fn restore(mut self, tensors: BTreeMap<u64, Holding>, files: Files) -> Result<Self> {
        for (reservation, Holding { spec, group, slices, shards }) in tensors {
            spec.validate()?;
            if slices.len() != spec.slice_count() || shards.len() != slices.len() {
                let error = Error::new(Kind::Config, "the data directory has a tensor without a place");
                return Err(error
                    .tensor(spec.name.clone())
                    .expected(format!("{} slices", spec.slice_count()), slices.len()));
            }
            for (slice, shard) in shards.iter().enumerate() {
                if !self.load.add(*shard, &spec, slice) {
                    let error = Error::new(Kind::Config, "the data directory is of another cluster");
                    let shards = format!("{} shards", self.load.shards());
                    return Err(error.tensor(spec.name).expected(shards, format!("shard {shard}")));
                }
            }
            self.groups.restore(&spec.group, group)?;
            let memory = self.meter.take(Purpose::Map, bytes_for(&spec, 0));
            let memory = memory.map_err(|error| error.tensor(spec.name.clone()))?;
            self.reservations.insert(reservation, spec.name.clone());
            let placement = pb::Placement { group, slices, shards };
            let wire = pb::MapEntry { spec: Some(spec_to_wire(&spec)), placement: Some(placement) };
            let (name, spec) = (spec.name.clone(), Arc::new(spec));
            self.groups.commit(&spec.group, &name);
            self.entries.insert(name, MapEntry { spec, wire, reservation, memory, held: None });
        }
        self.files = files;
        Ok(self)
    }

    /// First step of a registration, whose memory is charged to a budget. Its owner repeats it to keep it
    /// alive.
    pub(crate) fn register(
        &mut self,
        spec: &TensorSpec,
        client: u64,
        budget: Option<&Budget>,
        now: Instant,
    ) -> Result<Registered> {
        if let Some(known) = self.known(spec, client, now)? {
            return Ok(known);
        }
        // An expired registration is replaced, with new slices, which a late frame or Drop of the former
        // owner cannot reach.
        self.end(&spec.name);
        self.check(spec, client, 0)?;
        let entry = self.place(spec, budget).map_err(|error| error.tensor(spec.name.clone()))?;
        let (reserved, reservation) = (entry.reserved(), entry.reservation);
        self.reservations.insert(reservation, spec.name.clone());
        self.slices.extend(entry.slices().iter().map(|slice| (*slice, reservation)));
        *self.open.entry(client).or_default() += 1;
        self.pending.insert(spec.name.clone(), Pending { entry, client, deadline: now + self.lease });
        Ok(reserved)
    }

    /// [`Map::register`] of tensors of different names: of all, or of none that was not under way before.
    pub(crate) fn register_all(
        &mut self,
        specs: &[TensorSpec],
        client: u64,
        budget: Option<&Budget>,
        now: Instant,
    ) -> Result<Vec<Registered>> {
        let mut new = Vec::new();
        for spec in specs {
            if self.known(spec, client, now)?.is_none() {
                self.check(spec, client, new.len())?;
                new.push(spec.name.clone());
            }
        }
        let outcomes: Result<_> = specs.iter().map(|spec| self.register(spec, client, budget, now)).collect();
        if outcomes.is_err() {
            for name in new {
                self.end(&name);
            }
        }
        outcomes
    }

    /// What is there of a tensor, if it need not be placed. Fails if that has another spec.
    fn known(&mut self, spec: &TensorSpec, client: u64, now: Instant) -> Result<Option<Registered>> {
        if let Some(entry) = self.entries.get(&spec.name) {
            same(
                &entry.spec,
                spec,
                "the tensor is registered with another",
                "; unregister() frees the name",
            )?;
            return Ok(Some(Registered::Exists(entry.placement())));
        }
        let Some(pending) = self.pending.get_mut(&spec.name).filter(|p| p.deadline >= now) else {
            return Ok(None);
        };
        let other = same(&pending.entry.spec, spec, "the tensor is being registered with another", "");
        if pending.client != client {
            return other.map(|()| Some(Registered::UnderWay { retry_after_ms: RETRY_AFTER_MS }));
        }
        // If the owner's spec has changed, its reservation ends.
        Ok(other.is_ok().then(|| {
            pending.deadline = now + self.lease;
            pending.entry.reserved()
        }))
    }

    /// Identifiers that no client can guess, so none can be there first; nor does a client with the map of an
    /// earlier server meet them again.
    fn identifiers(&self, count: usize) -> Result<Vec<u64>> {
        let failed = |error| Error::new(Kind::Internal, format!("no random numbers: {error}"));
        let mut bytes = vec![0; 8 * count];
        loop {
            getrandom::fill(&mut bytes).map_err(failed)?;
            let drawn: Vec<_> = bytes.as_chunks().0.iter().map(|eight| u64::from_ne_bytes(*eight)).collect();
            let taken =
                |id: &u64| *id == 0 || self.slices.contains_key(id) || self.reservations.contains_key(id);
            if !drawn.iter().any(taken) {
                return Ok(drawn);
            }
        }
    }

    /// Checks that do not depend on free memory, before `ahead` other tensors of the client are placed.
    fn check(&self, spec: &TensorSpec, client: u64, ahead: usize) -> Result<()> {
        spec.check_new_names()?;
        let refuse = |error: Error| Err(error.tensor(spec.name.clone()));
        if spec.slice_count() > MAX_SLICES {
            return refuse(
                Error::new(Kind::Capacity, "the tensor has too many slices")
                    .expected(format!("at most {MAX_SLICES}"), spec.slice_count()),
            );
        }
        if self.entries.len() + self.pending.len() + ahead >= MAX_TENSORS {
            return refuse(
                Error::new(Kind::Capacity, "too many tensors")
                    .expected(format!("at most {MAX_TENSORS}"), "one more"),
            );
        }
        // Slices are spread evenly, so no shard can take more than shard 0, whatever its own limit is.
        let (limit, shards) = (self.meter.limit(), self.load.shards());
        let (most, needed) = (limit.saturating_mul(shards as u64), memory_for(spec));
        if needed > most {
            return refuse(
                Error::new(Kind::Capacity, "the shards together could never hold the tensor").expected(
                    format!("at most {most} bytes: {shards} times {limit}"),
                    format!("{needed} bytes"),
                ),
            );
        }
        if self.open.get(&client).map_or(0, |open| *open) + ahead >= MAX_OPEN_REGISTRATIONS {
            return refuse(
                Error::new(Kind::Capacity, "the client has too many registrations under way")
                    .expected(format!("at most {MAX_OPEN_REGISTRATIONS}"), "one more")
                    .retry_after_ms(OPEN_RETRY_AFTER_MS),
            );
        }
        Ok(())
    }

    fn place(&mut self, spec: &TensorSpec, budget: Option<&Budget>) -> Result<MapEntry> {
        let bytes = bytes_for(spec, PENDING_BYTES);
        let held = hold(budget, "the registration", bytes)?;
        let memory = self.meter.take(Purpose::Map, bytes)?;
        let mut ids = self.identifiers(1 + spec.slice_count())?;
        let reservation = ids.swap_remove(0);
        let group = self.groups.enter(&spec.group)?;
        let shards = (0..ids.len()).map(|slice| self.load.place(spec, slice)).collect();
        let placement = pb::Placement { group, slices: ids, shards };
        let wire = pb::MapEntry { spec: Some(spec_to_wire(spec)), placement: Some(placement) };
        Ok(MapEntry { spec: Arc::new(spec.clone()), wire, reservation, memory, held })
    }

    /// Forgets the reservation and slices of an entry.
    fn release(&mut self, entry: &MapEntry) {
        self.reservations.remove(&entry.reservation);
        for (slice, shard) in entry.shards().iter().enumerate() {
            self.load.remove(*shard, &entry.spec, slice);
        }
        self.groups.leave(&entry.spec.group);
    }

    /// Removes an open registration.
    fn take_pending(&mut self, name: &str) -> Option<MapEntry> {
        let Pending { mut entry, client, .. } = self.pending.remove(name)?;
        for slice in entry.slices() {
            self.slices.remove(slice);
        }
        let pending = PENDING_BYTES * entry.slices().len() as u64;
        entry.memory.give_back(pending);
        if let Some(held) = &mut entry.held {
            held.give_back(pending);
        }
        if let Some(open) = self.open.get_mut(&client) {
            *open -= 1;
            if *open == 0 {
                self.open.remove(&client);
            }
        }
        Some(entry)
    }

    /// Ends an open registration, if there is one.
    fn end(&mut self, name: &str) {
        if let Some(entry) = self.take_pending(name) {
            self.release(&entry);
        }
    }

    /// Returns whether registrations of this client are under way.
    pub(crate) fn registers(&self, client: u64) -> bool {
        self.open.contains_key(&client)
    }

    /// The name of a group.
    pub(crate) fn group_name(&self, group: u32) -> Option<Arc<str>> {
        self.groups.name(group)
    }

    /// Returns whether tensors of this group exist.
    pub(crate) fn has_group(&self, group: u32) -> bool {
        self.groups.has(group)
    }

    /// An open registration, for a shard that is to take its slices.
    pub(crate) fn registration(&self, reservation: u64) -> Option<pb::Registration> {
        let pending = self.pending.get(self.reservations.get(&reservation)?)?;
        Some(pb::Registration { entry: Some(pending.entry.wire.clone()) })
    }

    /// [`Map::registration`] of each of these, as many as one message takes.
    pub(crate) fn registrations(&self, reservations: &[u64]) -> Vec<pb::Registration> {
        let (mut described, mut bytes) = (Vec::new(), 0);
        for reservation in reservations.iter().take(MAX_REGISTERED) {
            let registration = self.registration(*reservation).unwrap_or_default();
            bytes += registration.encoded_len();
            if bytes > MAX_REGISTERED_BYTES {
                break;
            }
            described.push(registration);
        }
        described
    }

    /// The slices of an uncommitted reservation that `shard` stores.
    pub(crate) fn pending_on(&self, reservation: u64, shard: u32) -> Vec<SliceId> {
        let pending = self.reservations.get(&reservation).and_then(|name| self.pending.get(name));
        let Some(entry) = pending.map(|pending| &pending.entry) else { return Vec::new() };
        let pairs = entry.slices().iter().zip(entry.shards());
        pairs.filter(|(_, s)| **s == shard).map(|(id, _)| SliceId(*id)).collect()
    }

    /// Last step of a registration: the tensor exists. Repeats change nothing.
    pub(crate) fn commit(&mut self, reservation: u64, client: u64) -> Result<()> {
        let name = self.check_commit(reservation, client)?;
        if let Some(entry) = self.take_pending(&name) {
            self.noted = self.files.step(|| Event::Entered(reservation, entry.holding()));
            self.groups.commit(&entry.spec.group, &name);
            self.entries.insert(name, entry);
        }
        Ok(())
    }

    /// Fails if a registration has ended, or is another client's. Returns its tensor.
    pub(crate) fn check_commit(&self, reservation: u64, client: u64) -> Result<Arc<str>> {
        let name = self.reservations.get(&reservation).cloned().ok_or_else(|| lost(reservation))?;
        if self.pending.get(&name).is_some_and(|pending| pending.client != client) {
            return Err(Error::new(Kind::Precondition, "the reservation is another client's").tensor(name));
        }
        Ok(name)
    }

    /// Outcome of these reservations. An open one ends here if its lease has expired, or if its client
    /// abandons it, unless one of the others is committed.
    pub(crate) fn settle(&mut self, reservations: &[u64], abandon: bool, now: Instant) -> pb::SettleResponse {
        let mut settled = pb::SettleResponse::default();
        let committed = |id: &&u64| self.reservations.get(id).is_some_and(|n| !self.pending.contains_key(n));
        settled.committed = reservations.iter().filter(committed).copied().collect();
        let abandon = abandon && settled.committed.is_empty();
        for reservation in reservations {
            let Some(name) = self.reservations.get(reservation) else {
                settled.ended.push(*reservation);
                continue;
            };
            if self.pending.get(name).is_some_and(|pending| abandon || pending.deadline < now) {
                let name = name.clone();
                self.end(&name);
                settled.ended.push(*reservation);
            }
        }
        settled
    }

    /// Ends expired registrations that no shard has sealed and would ask about, and groups without tensors
    /// and workers.
    pub(crate) fn sweep(&mut self, now: Instant, is_joined: impl Fn(u32) -> bool) {
        let over = self.pending.iter().filter(|(_, pending)| pending.deadline + self.lease < now);
        let over: Vec<_> = over.map(|(name, _)| name.clone()).collect();
        for name in over {
            self.end(&name);
        }
        self.groups.sweep(is_joined);
    }

    /// The entry of a tensor, registered or under way.
    fn entry(&self, name: &str) -> Option<&MapEntry> {
        self.entries.get(name).or_else(|| self.pending.get(name).map(|pending| &pending.entry))
    }

    /// Returns whether a tensor of this name, registered or under way, is outside `scope`.
    pub(crate) fn hides(&self, name: &str, scope: &Scope) -> bool {
        self.entry(name).is_some_and(|entry| !entry.is_within(scope))
    }

    /// Returns whether a reservation is of a tensor outside `scope`.
    pub(crate) fn hides_reservation(&self, reservation: u64, scope: &Scope) -> bool {
        self.reservations.get(&reservation).is_some_and(|name| self.hides(name, scope))
    }

    /// Ends the open registrations within `scope` that own one of these slices.
    pub(crate) fn abandon(&mut self, slices: &[u64], scope: &Scope) {
        self.touched += slices.len() as u64;
        for slice in slices {
            let name = self.slices.get(slice).and_then(|reservation| self.reservations.get(reservation));
            let name = name.filter(|name| self.entry(name).is_some_and(|entry| entry.is_within(scope)));
            if let Some(name) = name.cloned() {
                self.end(&name);
            }
        }
    }

    fn shown(&self, name: &str, scope: &Scope) -> Option<&MapEntry> {
        self.entries.get(name).filter(|entry| entry.is_within(scope))
    }

    /// The specification of a tensor within `scope`.
    pub(crate) fn spec(&self, name: &str, scope: &Scope) -> Result<Arc<TensorSpec>> {
        Ok(self.shown(name, scope).ok_or_else(|| self.unknown(name, scope))?.spec.clone())
    }

    /// Returns whether a tensor of this name is registered, within `scope`.
    pub(crate) fn has(&self, name: &str, scope: &Scope) -> bool {
        self.shown(name, scope).is_some()
    }

    fn unknown(&self, name: &str, scope: &Scope) -> Error {
        let shown: String = name.chars().take(1024).collect();
        let known = self.within(scope, "").map(|(name, _)| name).take(MAX_COMPARED);
        unknown_tensor("no such tensor is registered", &shown, known)
    }

    /// Removes a tensor within `scope`, or an expired registration. Returns the shards that may still store
    /// its slices.
    pub(crate) fn unregister(&mut self, name: &str, now: Instant, scope: &Scope) -> Result<pb::Placement> {
        if self.hides(name, scope) {
            return Err(self.unknown(name, scope));
        }
        let abandoned = self.pending.get(name).is_some_and(|p| p.deadline < now);
        let pending = if abandoned { self.take_pending(name) } else { None };
        let entered = self.entries.remove(name);
        self.touched += 1;
        if let Some(entry) = &entered {
            self.groups.uncommit(&entry.spec.group, name);
            self.noted = self.files.step(|| Event::Removed(entry.spec.name.clone()));
        }
        let entry = entered.or(pending).ok_or_else(|| self.unknown(name, scope))?;
        self.release(&entry);
        Ok(entry.placement())
    }

    /// Log position that must be durable before others see the map's contents.
    pub(crate) fn noted(&self) -> u64 {
        self.noted
    }

    /// Numbers of tensors, open registrations, placed bytes, and entries that calls have read.
    pub(crate) fn counts(&self) -> [u64; 4] {
        [self.entries.len() as u64, self.pending.len() as u64, self.load.total(), self.touched]
    }
}

/// Memory of an entry, with `beside` bytes for each of its slices.
fn bytes_for(spec: &TensorSpec, beside: u64) -> u64 {
    let names = 4 * (spec.name.len() + spec.group.len()) + 24 * spec.shape.len();
    let places = spec.slice_count() as u64 * (PLACE_BYTES + beside);
    if fault("entry_not_charged") { 0 } else { ENTRY_BYTES + names as u64 + places }
}

impl MapEntry {
    fn is_within(&self, scope: &Scope) -> bool {
        scope.allows(&self.spec.name, &self.spec.group)
    }

    fn slices(&self) -> &[u64] {
        self.wire.placement.as_ref().map_or(&[], |placement| &placement.slices)
    }

    fn shards(&self) -> &[u32] {
        self.wire.placement.as_ref().map_or(&[], |placement| &placement.shards)
    }

    fn placement(&self) -> pb::Placement {
        self.wire.placement.clone().unwrap_or_default()
    }

    fn holding(&self) -> Holding {
        let pb::Placement { group, slices, shards } = self.placement();
        Holding { spec: TensorSpec::clone(&self.spec), group, slices, shards }
    }

    fn reserved(&self) -> Registered {
        Registered::Reserved { reservation: self.reservation, placement: self.placement() }
    }
}

fn same(registered: &TensorSpec, other: &TensorSpec, message: &str, cure: &str) -> Result<()> {
    match registered.difference(other) {
        None => Ok(()),
        Some((what, is, wanted)) => Err(Error::new(Kind::Precondition, format!("{message} {what}{cure}"))
            .tensor(other.name.clone())
            .expected(is, wanted)),
    }
}

#[cfg(test)]
mod tests;
