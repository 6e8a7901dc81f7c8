//! The cluster map, on shard 0 alone: which tensors exist, where their slices lie, and which registrations are under
//! way.

use crate::convert::{spec_difference, spec_to_wire};
use crate::durable::Files;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::placement::Load;
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_durable::{Event, Holding};
use fastps_proto::v1 as pb;
use prost::Message;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most slices of one tensor, so that its placement fits one message: 256 GiB of float32.
pub(crate) const MAX_SLICES: usize = 1 << 18;
/// Most tensors, registered and under way.
const MAX_TENSORS: usize = 1 << 20;
/// Most groups since the start; their numbers are not reused.
const MAX_GROUPS: usize = 1 << 16;
/// Entries of a page, unless the caller wants fewer.
const PAGE: usize = 1000;
/// A page ends behind the entry that passes this many bytes.
const PAGE_BYTES: usize = 1 << 20;
/// When to ask again for a registration that is under way.
const RETRY_MS: u32 = 50;

#[derive(Debug)]
struct Entry {
    spec: Arc<TensorSpec>,
    wire: pb::MapEntry,
    reservation: u64,
}

#[derive(Debug)]
struct Pending {
    entry: Entry,
    client: u64,
    deadline: Instant,
}

/// The map of a cluster.
#[derive(Debug)]
pub(crate) struct Map {
    entries: BTreeMap<Arc<str>, Entry>,
    pending: HashMap<Arc<str>, Pending>,
    /// The tensor of each reservation, under way or committed.
    reservations: HashMap<u64, Arc<str>>,
    groups: HashMap<Arc<str>, u32>,
    /// Bytes placed on each shard.
    load: Load,
    /// The next slice or reservation identifier.
    next: u64,
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
    /// An empty map over `shards` shards. Identifiers count up from `first`: drawn at random by each server, so that a
    /// client with the map of an earlier one never meets its identifiers again.
    pub(crate) fn new(shards: usize, first: u64, lease: Duration) -> Self {
        Self {
            entries: BTreeMap::new(),
            pending: HashMap::new(),
            reservations: HashMap::new(),
            groups: HashMap::new(),
            load: Load::new(shards),
            next: first.max(1),
            lease,
            files: Files::default(),
            noted: 0,
        }
    }

    /// Goes on with the tensors of an earlier process, and notes what changes from here on.
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
            self.groups.insert(spec.group.clone(), group);
            self.reservations.insert(reservation, spec.name.clone());
            let placement = pb::Placement { group, slices, shards };
            let wire = pb::MapEntry { spec: Some(spec_to_wire(&spec)), placement: Some(placement) };
            self.entries.insert(spec.name.clone(), Entry { spec: Arc::new(spec), wire, reservation });
        }
        self.files = files;
        Ok(self)
    }

    /// First step of a registration. Its owner repeats it to keep it alive.
    pub(crate) fn register(&mut self, spec: &TensorSpec, client: u64, now: Instant) -> Result<Registered> {
        if let Some(entry) = self.entries.get(&spec.name) {
            same(&entry.spec, spec, "the tensor is registered with another")?;
            return Ok(Registered::Exists(entry.placement()));
        }
        if let Some(pending) = self.pending.get_mut(&spec.name).filter(|p| p.deadline >= now) {
            let other = same(&pending.entry.spec, spec, "the tensor is being registered with another");
            if pending.client != client {
                return other.map(|()| Registered::UnderWay { retry_after_ms: RETRY_MS });
            }
            if other.is_ok() {
                pending.deadline = now + self.lease;
                return Ok(pending.entry.reserved());
            }
            // The owner thinks better of it: the place is given up.
        }
        // What ran out is taken over, with new slices: a late frame or Drop of the former owner finds none of them.
        if let Some(abandoned) = self.pending.remove(&spec.name) {
            self.release(&abandoned.entry);
        }
        let reservation = self.identifier();
        let entry = self.place(spec, reservation)?;
        let reserved = entry.reserved();
        self.reservations.insert(reservation, spec.name.clone());
        self.pending.insert(spec.name.clone(), Pending { entry, client, deadline: now + self.lease });
        Ok(reserved)
    }

    fn identifier(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn place(&mut self, spec: &TensorSpec, reservation: u64) -> Result<Entry> {
        let refuse = |error: Error| Err(error.tensor(spec.name.clone()));
        if spec.slice_count() > MAX_SLICES {
            return refuse(
                Error::new(Kind::Capacity, "the tensor has too many slices")
                    .expected(format!("at most {MAX_SLICES}"), spec.slice_count()),
            );
        }
        if self.entries.len() + self.pending.len() >= MAX_TENSORS {
            return refuse(
                Error::new(Kind::Capacity, "too many tensors")
                    .expected(format!("at most {MAX_TENSORS}"), "one more"),
            );
        }
        let group = match self.groups.get(&spec.group) {
            Some(group) => *group,
            None if self.groups.len() >= MAX_GROUPS => {
                return refuse(
                    Error::new(Kind::Capacity, "too many groups")
                        .expected(format!("at most {MAX_GROUPS}"), "one more"),
                );
            }
            None => {
                let group = self.groups.values().max().map_or(1, |last| last + 1);
                self.groups.insert(spec.group.clone(), group);
                group
            }
        };
        let mut placement = pb::Placement { group, ..Default::default() };
        for slice in 0..spec.slice_count() {
            placement.shards.push(self.load.place(spec, slice));
            placement.slices.push(self.identifier());
        }
        let wire = pb::MapEntry { spec: Some(spec_to_wire(spec)), placement: Some(placement) };
        Ok(Entry { spec: Arc::new(spec.clone()), wire, reservation })
    }

    /// Forgets where an entry lies.
    fn release(&mut self, entry: &Entry) {
        self.reservations.remove(&entry.reservation);
        for (slice, shard) in entry.placement().shards.into_iter().enumerate() {
            self.load.remove(shard, &entry.spec, slice);
        }
    }

    /// The slices of a reservation that lie on `shard`, while it is not committed.
    pub(crate) fn pending_on(&self, reservation: u64, shard: u32) -> Vec<SliceId> {
        let pending = self.reservations.get(&reservation).and_then(|name| self.pending.get(name));
        let placement = pending.map(|p| p.entry.placement()).unwrap_or_default();
        let pairs = placement.slices.into_iter().zip(placement.shards);
        pairs.filter(|(_, s)| *s == shard).map(|(id, _)| SliceId(id)).collect()
    }

    /// Last step of a registration: the tensor exists. Repeats change nothing.
    pub(crate) fn commit(&mut self, reservation: u64, client: u64) -> Result<()> {
        let lost = || {
            Error::new(
                Kind::Lease,
                format!("reservation {reservation} ran out or was taken over: register again"),
            )
        };
        let name = self.reservations.get(&reservation).cloned().ok_or_else(lost)?;
        match self.pending.get(&name) {
            Some(pending) if pending.client != client => {
                Err(Error::new(Kind::Precondition, "the reservation is another client's").tensor(name))
            }
            Some(_) => {
                if let Some(pending) = self.pending.remove(&name) {
                    self.noted = self.files.step(|| Event::Entered(reservation, pending.entry.holding()));
                    self.entries.insert(name, pending.entry);
                }
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// What became of these reservations. One that is under way and whose lease has run out ends here and now.
    pub(crate) fn settle(&mut self, reservations: &[u64], now: Instant) -> pb::SettleResponse {
        let mut settled = pb::SettleResponse::default();
        for reservation in reservations {
            let name = self.reservations.get(reservation);
            match (name, name.and_then(|name| self.pending.get(name))) {
                (Some(_), None) => settled.committed.push(*reservation),
                (Some(_), Some(pending)) if pending.deadline >= now => {}
                (Some(name), Some(_)) => {
                    let name = name.clone();
                    if let Some(pending) = self.pending.remove(&name) {
                        self.release(&pending.entry);
                    }
                    settled.ended.push(*reservation);
                }
                (None, _) => settled.ended.push(*reservation),
            }
        }
        settled
    }

    /// Ends the registrations that nobody goes on with, and that nobody will ask about if no shard has sealed them.
    pub(crate) fn sweep(&mut self, now: Instant) {
        let over: Vec<_> =
            self.pending.extract_if(|_, pending| pending.deadline + self.lease < now).collect();
        for (_, pending) in over {
            self.release(&pending.entry);
        }
    }

    /// Ends the registrations under way that own one of these slices.
    pub(crate) fn abandon(&mut self, slices: &[u64]) {
        let gone: HashSet<_> = slices.iter().collect();
        let owns = |entry: &Entry| entry.placement().slices.iter().any(|id| gone.contains(id));
        let over: Vec<_> = self.pending.extract_if(|_, pending| owns(&pending.entry)).collect();
        for (_, pending) in over {
            self.release(&pending.entry);
        }
    }

    /// Removes a tensor, or a registration that ran out; says where slices may still lie.
    pub(crate) fn unregister(&mut self, name: &str, now: Instant) -> Result<pb::Placement> {
        let abandoned = self.pending.get(name).is_some_and(|p| p.deadline < now);
        let pending = if abandoned { self.pending.remove(name).map(|p| p.entry) } else { None };
        let entered = self.entries.remove(name);
        if let Some(entry) = &entered {
            self.noted = self.files.step(|| Event::Removed(entry.spec.name.clone()));
        }
        let entry = entered.or(pending).ok_or_else(|| {
            let shown: String = name.chars().take(1024).collect();
            Error::new(Kind::UnknownTensor, "no such tensor is registered").tensor(shown)
        })?;
        self.release(&entry);
        Ok(entry.placement())
    }

    /// One page in the order of names, and the name to continue after, if there is more.
    pub(crate) fn page(
        &self,
        names: &[String],
        after: &str,
        page_size: usize,
    ) -> (Vec<pb::MapEntry>, String) {
        let wanted: HashSet<&str> = names.iter().map(String::as_str).collect();
        let limit = if page_size == 0 { PAGE } else { page_size.min(PAGE) };
        let mut page = Vec::new();
        let (mut bytes, mut last) = (0, None);
        let from = if after.is_empty() { Bound::Unbounded } else { Bound::Excluded(after) };
        let all = self.entries.range::<str, _>((from, Bound::Unbounded));
        for (name, entry) in all.filter(|(name, _)| wanted.is_empty() || wanted.contains(&***name)) {
            if page.len() >= limit || bytes >= PAGE_BYTES {
                return (page, last.unwrap_or_default());
            }
            // One entry can have a placement of 3 MiB: it gets a page of its own.
            let size = entry.wire.encoded_len();
            if !page.is_empty() && bytes + size > 2 * PAGE_BYTES {
                return (page, last.unwrap_or_default());
            }
            bytes += size;
            page.push(entry.wire.clone());
            last = Some(name.to_string());
        }
        (page, String::new())
    }

    /// What is durable before others are told what the map has.
    pub(crate) fn noted(&self) -> u64 {
        self.noted
    }

    /// Tensors, registrations under way, and bytes placed.
    pub(crate) fn counts(&self) -> (u64, u64, u64) {
        (self.entries.len() as u64, self.pending.len() as u64, self.load.total())
    }
}

impl Entry {
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

fn same(registered: &TensorSpec, other: &TensorSpec, message: &str) -> Result<()> {
    match spec_difference(registered, other) {
        None => Ok(()),
        Some((what, is, wanted)) => Err(Error::new(Kind::Precondition, format!("{message} {what}"))
            .tensor(other.name.clone())
            .expected(is, wanted)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastps_core::dtype::DType;
    use fastps_core::optim::{Adagrad, Optimizer, Sgd};
    use fastps_core::tensor::Apply;

    const LEASE: Duration = Duration::from_secs(30);

    fn spec(name: &str, elements: u64) -> TensorSpec {
        TensorSpec {
            name: name.into(),
            shape: vec![elements],
            dtype: DType::Float32,
            apply: Apply::Exact,
            group: "default".into(),
            optimizer: Optimizer::Sgd(Sgd::default()),
        }
    }

    fn reserved(outcome: Registered) -> (u64, pb::Placement) {
        match outcome {
            Registered::Reserved { reservation, placement } => (reservation, placement),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn slices_go_where_the_load_is_least() {
        let (mut map, now) = (Map::new(3, 1, LEASE), Instant::now());
        let (_, placement) = reserved(map.register(&spec("big", 3 * 258_048), 1, now).unwrap());
        assert_eq!(placement.shards, [0, 1, 2]);
        let (_, small) = reserved(map.register(&spec("a", 10), 1, now).unwrap());
        let (_, other) = reserved(map.register(&spec("b", 10), 1, now).unwrap());
        assert_eq!((small.shards, other.shards), (vec![0], vec![1]));
        let all: HashSet<_> =
            [&placement.slices, &small.slices, &other.slices].into_iter().flatten().collect();
        assert_eq!(all.len(), 5);
    }

    #[test]
    fn a_registration_is_owned_waited_for_and_taken_over() {
        let (mut map, now) = (Map::new(2, 1, LEASE), Instant::now());
        let w = spec("w", 10);
        let (first, placement) = reserved(map.register(&w, 1, now).unwrap());
        assert_eq!(reserved(map.register(&w, 1, now).unwrap()), (first, placement.clone()));
        assert!(matches!(map.register(&w, 2, now).unwrap(), Registered::UnderWay { .. }));
        assert!(map.page(&[], "", 0).0.is_empty());
        let later = now + LEASE + Duration::from_secs(1);
        let (second, again) = reserved(map.register(&w, 2, later).unwrap());
        assert!(second != first && again.slices != placement.slices);
        assert_eq!(map.commit(first, 1).unwrap_err().kind, Kind::Lease);
        assert_eq!(map.commit(second, 1).unwrap_err().kind, Kind::Precondition);
        map.commit(second, 2).unwrap();
        map.commit(second, 2).unwrap();
        assert_eq!(map.register(&w, 3, later).unwrap(), Registered::Exists(again));
        assert_eq!(map.counts().0, 1);
    }

    #[test]
    fn another_spec_is_refused_and_says_what_differs() {
        let (mut map, now) = (Map::new(1, 1, LEASE), Instant::now());
        let (reservation, _) = reserved(map.register(&spec("w", 10), 1, now).unwrap());
        for committed in [false, true] {
            let shape = map.register(&spec("w", 11), 2, now).unwrap_err();
            assert_eq!(
                (shape.kind, shape.expected.as_deref()),
                (Kind::Precondition, Some("[10]")),
                "{committed}"
            );
            let rule = Optimizer::Adagrad(Adagrad::default());
            let error = map.register(&TensorSpec { optimizer: rule, ..spec("w", 10) }, 2, now).unwrap_err();
            assert!(error.message.contains("optimizer"), "{error}");
            map.commit(reservation, 1).unwrap();
        }
    }

    #[test]
    fn what_was_not_committed_in_time_ends_when_asked() {
        let (mut map, now) = (Map::new(1, 1, LEASE), Instant::now());
        let (kept, _) = reserved(map.register(&spec("kept", 10), 1, now).unwrap());
        let (left, _) = reserved(map.register(&spec("left", 10), 1, now).unwrap());
        let all = [kept, left, 4711];
        map.commit(kept, 1).unwrap();
        let early = pb::SettleResponse { committed: vec![kept], ended: vec![4711] };
        assert_eq!(map.settle(&all, now + LEASE), early);
        let late = pb::SettleResponse { committed: vec![kept], ended: vec![left, 4711] };
        for _ in 0..2 {
            assert_eq!(map.settle(&all, now + 2 * LEASE), late);
        }
        assert_eq!(map.commit(left, 1).unwrap_err().kind, Kind::Lease);
        assert_eq!((map.counts().0, map.counts().1), (1, 0));
    }

    #[test]
    fn what_nobody_goes_on_with_is_forgotten() {
        let (mut map, now) = (Map::new(1, 1, LEASE), Instant::now());
        let (kept, _) = reserved(map.register(&spec("kept", 10), 1, now).unwrap());
        let (left, _) = reserved(map.register(&spec("left", 10), 1, now).unwrap());
        map.commit(kept, 1).unwrap();
        map.sweep(now + 2 * LEASE);
        assert_eq!((map.counts().0, map.counts().1), (1, 1));
        map.sweep(now + 3 * LEASE);
        assert_eq!((map.counts().0, map.counts().1), (1, 0));
        assert_eq!(map.commit(left, 1).unwrap_err().kind, Kind::Lease);
        map.unregister("kept", now).unwrap();
        assert_eq!(map.counts(), (0, 0, 0));
    }

    #[test]
    fn an_owner_may_give_up() {
        let (mut map, now) = (Map::new(1, 1, LEASE), Instant::now());
        let (first, placement) = reserved(map.register(&spec("w", 10), 1, now).unwrap());
        let (second, other) = reserved(map.register(&spec("w", 11), 1, now).unwrap());
        assert!(first != second && placement != other);
        map.abandon(&placement.slices);
        assert_eq!(map.counts().1, 1);
        map.abandon(&other.slices);
        assert_eq!(map.counts(), (0, 0, 0));
        reserved(map.register(&spec("w", 12), 2, now).unwrap());
    }

    #[test]
    fn identifiers_never_recur_and_load_is_given_back() {
        let (mut map, now) = (Map::new(1, 1, LEASE), Instant::now());
        let mut seen = HashSet::new();
        for _ in 0..3 {
            let (reservation, placement) = reserved(map.register(&spec("w", 10), 1, now).unwrap());
            assert!(seen.insert(reservation) && seen.insert(placement.slices[0]));
            assert_eq!(map.unregister("w", now).unwrap_err().kind, Kind::UnknownTensor);
            map.commit(reservation, 1).unwrap();
            assert_eq!(map.unregister("w", now).unwrap(), placement);
            assert_eq!(map.counts(), (0, 0, 0));
        }
    }

    #[test]
    fn pages_follow_each_other() {
        let (mut map, now) = (Map::new(1, 1, LEASE), Instant::now());
        for k in 0..25 {
            let (reservation, _) = reserved(map.register(&spec(&format!("w{k:02}"), 1), 1, now).unwrap());
            map.commit(reservation, 1).unwrap();
        }
        let (mut after, mut names) = (String::new(), Vec::new());
        loop {
            let (page, next) = map.page(&[], &after, 10);
            names.extend(page.into_iter().filter_map(|e| e.spec).map(|s| s.name));
            if next.is_empty() {
                break;
            }
            after = next;
        }
        assert_eq!(names, (0..25).map(|k| format!("w{k:02}")).collect::<Vec<_>>());
        assert_eq!(map.page(&["w07".into(), "none".into()], "", 0).0.len(), 1);
    }
}
