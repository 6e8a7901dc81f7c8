//! Which registration each slice of this shard belongs to. A reservation holds memory under a lease and
//! takes initial values only until it is sealed; once sealed it stays until shard 0 answers that it was not
//! committed (see `reaper`).

use crate::auth::budget::{Budget, Held, hold};
use crate::persistence::Files;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::{Charge, Meter, Purpose, Shard};
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_durable::{Event, Reservation, Stage};
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use fastps_transport::memory_budget::{MoreSlices, WorkerRoom};
use foldhash::fast::RandomState;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Reservations that one question to shard 0 names.
pub(crate) const MAX_ASKED_RESERVATIONS: usize = 10_000;

type Slices = HashSet<SliceId, RandomState>;

#[derive(Debug)]
struct Open {
    client: u64,
    slices: Slices,
    missing: Slices,
    deadline: Instant,
}

/// A reservation with all its values; only shard 0 knows whether its tensor exists.
#[derive(Debug)]
struct Sealed {
    slices: Slices,
    /// Time to ask.
    deadline: Instant,
}

#[derive(Debug, Default)]
struct ReservationTable {
    /// The reservation of every slice that the shard holds.
    slices: HashMap<SliceId, u64, RandomState>,
    /// Number of slices of each reservation.
    held: HashMap<u64, usize>,
    /// Memory charged to principals with a limit, by reservation.
    charged: HashMap<u64, Held>,
    /// Open reservations.
    open: HashMap<u64, Open>,
    /// Number of open reservations by client.
    open_by_client: HashMap<u64, usize>,
    /// Reservations that are sealed and not known to be committed.
    sealed: HashMap<u64, Sealed>,
    expired: u64,
}

impl ReservationTable {
    /// Fails unless the slice is sealed. Until then it takes only initial values.
    fn check_sealed(&self, slice: SliceId) -> Result<()> {
        match self.slices.get(&slice) {
            Some(own) if self.open.contains_key(own) => {
                let error = Error::new(Kind::UnknownTensor, "the tensor is still being registered");
                Err(error.retry_after_ms(100))
            }
            Some(_) => Ok(()),
            None => Err(Error::new(Kind::UnknownTensor, format!("the shard has no slice {}", slice.0))),
        }
    }
}

/// The second step of a registration as the client sends it.
#[derive(Debug)]
pub(crate) struct Reserve {
    pub(crate) reservation: u64,
    pub(crate) client: u64,
    pub(crate) spec: Arc<TensorSpec>,
    pub(crate) group: u32,
    /// The budget of the principal that registers; `None`: it has no limits.
    pub(crate) budget: Option<Budget>,
    /// Identifier and index in the tensor.
    pub(crate) slices: Vec<(SliceId, usize)>,
}

impl Reserve {
    /// Fails unless shard 0 knows the registration, and these are its slices on this shard.
    pub(crate) fn check_registered(&self, registration: Option<pb::Registration>, shard: u32) -> Result<()> {
        let entry = registration.and_then(|registration| registration.entry);
        let entry = entry.ok_or_else(|| lost(self.reservation))?;
        let differs = |what: &str, is: String, got: String| {
            let error = Error::new(Kind::Precondition, format!("wrong registration: {what}"));
            Err(error.tensor(self.spec.name.clone()).expected(is, got))
        };
        let spec = convert::spec_from_wire(entry.spec.as_ref())?;
        if spec.name != self.spec.name {
            return differs("another tensor", spec.name.to_string(), self.spec.name.to_string());
        }
        if let Some((what, is, got)) = spec.difference(&self.spec) {
            return differs(&format!("another {what}"), is, got);
        }
        let placement = entry.placement.unwrap_or_default();
        if placement.group != self.group {
            return differs("another group", placement.group.to_string(), self.group.to_string());
        }
        let placed = |index: usize| Some((*placement.slices.get(index)?, *placement.shards.get(index)?));
        let strange = |(id, index): &&(SliceId, usize)| placed(*index) != Some((id.0, shard));
        match self.slices.iter().find(strange) {
            Some((id, index)) => {
                let is =
                    placed(*index).map_or_else(String::new, |(id, at)| format!("slice {id} on shard {at}"));
                differs("other slices", is, format!("slice {} on shard {shard} at index {index}", id.0))
            }
            None => Ok(()),
        }
    }

    /// Charges the memory to the principal. What it registered before the server's start is not counted.
    fn charge(&self) -> Result<Option<Held>> {
        let needed = Shard::memory_for(&self.spec, self.slices.iter().map(|(_, index)| *index));
        hold(self.budget.as_ref(), "the tensor", needed).map_err(|error| error.tensor(self.spec.name.clone()))
    }

    fn as_kept(&self) -> Reservation {
        let slices = self.slices.iter().map(|(id, index)| (id.0, *index as u64)).collect();
        Reservation { spec: TensorSpec::clone(&self.spec), group: self.group, slices, stage: Stage::Open }
    }
}

/// The reservations of one shard.
///
/// ```text
///           Reserve        Seal, all values are here          shard 0: committed
/// unknown ---------> open --------------------------> sealed --------------------> committed
///                     |                                 |                             |
///                     | its lease ends, or a restart    | shard 0: not committed      | Drop
///                     v                                 v                             v
///                   freed                             freed                         freed
/// ```
#[derive(Debug)]
pub(crate) struct Reservations {
    lease: Duration,
    pub(crate) room: WorkerRoom,
    files: Files,
    table: Mutex<ReservationTable>,
}

/// The error of an unknown reservation.
pub(crate) fn lost(reservation: u64) -> Error {
    Error::new(Kind::Lease, format!("reservation {reservation} ran out or was taken over: register again"))
}

impl Reservations {
    pub(crate) fn new(lease: Duration, room: WorkerRoom, files: Files) -> Self {
        Self { lease, room, files, table: Mutex::default() }
    }

    /// Adopts the slices of an earlier process. Shard 0 is asked which sealed reservations were committed;
    /// clients register the others again.
    pub(crate) fn restore(&self, shard: &Shard, all: &BTreeMap<u64, Reservation>, now: Instant) {
        let mut table = self.table();
        for (id, Reservation { slices, stage, .. }) in all {
            let slices: Slices = slices.iter().map(|(id, _)| SliceId(*id)).collect();
            table.hold(*id, &slices);
            if *stage == Stage::Open {
                table.forget(shard, &slices, &self.files);
                continue;
            }
            if *stage == Stage::Sealed {
                table.sealed.insert(*id, Sealed { slices, deadline: now + self.lease });
            }
        }
    }

    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    fn table(&self) -> MutexGuard<'_, ReservationTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the shard holds, or has held, slices for this reservation.
    pub(crate) fn knows(&self, reservation: u64) -> bool {
        self.table().held.contains_key(&reservation)
    }

    /// A slice that the shard holds for this reservation, all of which are of one tensor.
    pub(crate) fn first_slice(&self, reservation: u64) -> Option<SliceId> {
        let table = self.table();
        let open = table.open.get(&reservation).map(|open| &open.slices);
        open.or_else(|| table.sealed.get(&reservation).map(|sealed| &sealed.slices))?.iter().next().copied()
    }

    /// How many slices the shard holds for this reservation.
    pub(crate) fn held(&self, reservation: u64) -> usize {
        self.table().held.get(&reservation).copied().unwrap_or(0)
    }

    /// Returns whether the shard holds any slices.
    pub(crate) fn holds_any(&self) -> bool {
        !self.table().held.is_empty()
    }

    /// Returns whether the shard holds slices of registered tensors.
    pub(crate) fn holds_committed(&self) -> bool {
        let table = self.table();
        table.held.keys().any(|own| !table.open.contains_key(own) && !table.sealed.contains_key(own))
    }

    /// Frees all slices. Returns their number.
    pub(crate) fn drop_all(&self, shard: &Shard) -> usize {
        let all: Vec<_> = self.table().slices.keys().copied().collect();
        self.drop_slices(shard, &all);
        all.len()
    }

    /// Returns whether a client has reservations here that are not sealed.
    pub(crate) fn has_open_of(&self, client: u64) -> bool {
        self.table().open_by_client.contains_key(&client)
    }

    /// The sealed reservations of these slices; shard 0 knows their outcome.
    pub(crate) fn sealed_of(&self, slices: &[u64]) -> BTreeSet<u64> {
        let table = self.table();
        let own = slices.iter().filter_map(|slice| table.slices.get(&SliceId(*slice)));
        own.filter(|own| !table.open.contains_key(own)).copied().collect()
    }

    /// Takes memory that a connection shares with its client, of at most half the shard's, and of what is
    /// left beside the room for workers.
    pub(crate) fn charge_rings(&self, meter: &Arc<Meter>, bytes: u64) -> Result<Charge> {
        let none = MoreSlices::default();
        let (free, room) = (self.room.free_beside(meter, none), self.room.bytes(meter, none));
        let half = (meter.limit() / 2).saturating_sub(meter.used_for(Purpose::Rings));
        if bytes <= free.min(half) {
            return meter.take(Purpose::Rings, bytes);
        }
        let workers = self.room.0;
        let why = format!(
            "the shard's memory is full: shared memory must leave room for {workers} workers ({room} bytes), and half of the shard's {} bytes",
            meter.limit()
        );
        let error = Error::new(Kind::Capacity, why).retry_after_ms(1000);
        Err(error.expected(format!("at most {} free bytes", free.min(half)), format!("{bytes} bytes")))
    }

    /// Fails if tensors would leave no room for workers.
    fn check_room(&self, shard: &Shard, wish: &Reserve) -> Result<()> {
        let (meter, workers) = (shard.meter(), self.room.0);
        let needed = Shard::memory_for(&wish.spec, wish.slices.iter().map(|(_, index)| *index));
        let more = MoreSlices { count: wish.slices.len() as u64, bytes: needed };
        let (free, room) = (self.room.free_beside(meter, more), self.room.bytes(meter, more));
        if needed <= free {
            return Ok(());
        }
        let why =
            format!("tensors must leave room for {workers} workers ({room} bytes of {})", meter.limit());
        Err(Error::new(Kind::Capacity, why)
            .tensor(wish.spec.name.clone())
            .shard(shard.index())
            .expected(format!("at most {free} free bytes"), format!("{needed} bytes"))
            .retry_after_ms(1000))
    }

    /// Takes the memory. Repeats change nothing. Returns false if the reservation is sealed already.
    pub(crate) fn reserve(&self, shard: &Shard, wish: &Reserve, now: Instant) -> Result<bool> {
        check(wish)?;
        let ids: Slices = wish.slices.iter().map(|(id, _)| *id).collect();
        let mut table = self.table();
        if let Some(open) = table.open.get_mut(&wish.reservation) {
            if open.slices != ids || open.client != wish.client {
                return Err(Error::new(
                    Kind::Precondition,
                    "the reservation was made for other slices or another client",
                ));
            }
            open.deadline = now + self.lease;
            return Ok(true);
        }
        // A late repeat must not reopen what was sealed, so it is not an error either.
        if ids.iter().all(|id| table.slices.get(id) == Some(&wish.reservation)) {
            return Ok(false);
        }
        if table.held.contains_key(&wish.reservation) {
            return Err(Error::new(Kind::Precondition, "the reservation is sealed: it takes no more slices")
                .tensor(wish.spec.name.clone()));
        }
        self.check_room(shard, wish)?;
        let charge = wish.charge().map_err(|error| error.shard(shard.index()))?;
        shard.create(&wish.spec, wish.group, &wish.slices)?;
        self.files.step(|| Event::Reserved(wish.reservation, wish.as_kept()));
        table.hold(wish.reservation, &ids);
        table.charged.extend(charge.map(|charge| (wish.reservation, charge)));
        let missing = ids.clone();
        let open = Open { client: wish.client, slices: ids, missing, deadline: now + self.lease };
        table.open.insert(wish.reservation, open);
        *table.open_by_client.entry(wish.client).or_default() += 1;
        Ok(true)
    }

    /// Checks that a frame suits its slice's state: initial values while reserved, anything else once sealed.
    pub(crate) fn admit(&self, slice: SliceId, given: Option<u64>, client: u64, now: Instant) -> Result<()> {
        let mut table = self.table();
        let Some(given) = given else {
            return table.check_sealed(slice);
        };
        let own = table.slices.get(&slice).copied().filter(|own| *own == given).ok_or_else(|| lost(given))?;
        match table.open.get_mut(&own) {
            Some(open) if open.client == client => {
                open.deadline = now + self.lease;
                Ok(())
            }
            Some(_) => Err(Error::new(Kind::Precondition, "the reservation is another client's")),
            None => {
                Err(Error::new(Kind::Precondition, "the reservation is sealed: initial values came too late"))
            }
        }
    }

    /// [`Reservations::admit`] of many slices without a reservation: the outcome of each.
    pub(crate) fn admit_all(&self, slices: impl Iterator<Item = SliceId>) -> Vec<Result<()>> {
        let table = self.table();
        slices.map(|slice| table.check_sealed(slice)).collect()
    }

    /// Notes that a slice's initial values were applied.
    pub(crate) fn arrived(&self, slice: SliceId, reservation: u64) {
        if let Some(open) = self.table().open.get_mut(&reservation) {
            open.missing.remove(&slice);
        }
    }

    /// Closes a reservation once all its values have arrived. Repeats change nothing.
    pub(crate) fn seal(&self, reservation: u64, now: Instant) -> Result<()> {
        let mut table = self.table();
        match table.open.get(&reservation) {
            Some(open) if open.missing.is_empty() => {
                if let Some(Open { slices, .. }) = table.close(reservation) {
                    self.files.step(|| Event::Sealed(reservation));
                    table.sealed.insert(reservation, Sealed { slices, deadline: now + self.lease });
                }
                Ok(())
            }
            Some(open) => {
                let (all, missing) = (open.slices.len(), open.missing.len());
                Err(Error::new(Kind::Precondition, "initial values are missing")
                    .expected(format!("{all} slices"), format!("{} slices", all - missing)))
            }
            None if table.held.contains_key(&reservation) => Ok(()),
            None => Err(lost(reservation)),
        }
    }

    /// Returns whether the slice exists, sealed under this reservation.
    pub(crate) fn is_sealed(&self, slice: SliceId, reservation: u64) -> bool {
        let table = self.table();
        table.slices.get(&slice) == Some(&reservation) && !table.open.contains_key(&reservation)
    }

    /// Returns whether the slice belongs to one of these reservations.
    pub(crate) fn is_of(&self, slice: SliceId, reservations: &[u64]) -> bool {
        self.table().slices.get(&slice).is_some_and(|own| reservations.contains(own))
    }

    /// Frees slices.
    pub(crate) fn drop_slices(&self, shard: &Shard, slices: &[SliceId]) {
        let mut table = self.table();
        for slice in slices {
            let Some(reservation) = table.slices.get(slice).copied() else { continue };
            if let Some(open) = table.open.get_mut(&reservation) {
                open.slices.remove(slice);
                open.missing.remove(slice);
                if open.slices.is_empty() {
                    table.close(reservation);
                }
            } else if let Some(sealed) = table.sealed.get_mut(&reservation) {
                sealed.slices.remove(slice);
                if sealed.slices.is_empty() {
                    table.sealed.remove(&reservation);
                }
            }
        }
        table.forget(shard, slices, &self.files);
    }

    /// Frees expired reservations.
    pub(crate) fn sweep(&self, shard: &Shard, now: Instant) -> Vec<u64> {
        let mut table = self.table();
        let over = table.open.iter().filter(|(_, open)| open.deadline < now);
        let over: Vec<_> = over.map(|(reservation, _)| *reservation).collect();
        for reservation in &over {
            if let Some(open) = table.close(*reservation) {
                table.forget(shard, &open.slices, &self.files);
                table.expired += 1;
            }
        }
        over
    }

    /// Reservations that were sealed a lease ago and are not known to be committed, at most `limit`.
    pub(crate) fn unsettled(&self, limit: usize, now: Instant) -> Vec<u64> {
        let table = self.table();
        let due = table.sealed.iter().filter(|(_, sealed)| sealed.deadline < now);
        due.map(|(reservation, _)| *reservation).take(limit).collect()
    }

    /// Applies shard 0's answer about the reservations asked for: frees those not committed, keeps the
    /// committed ones, and asks about the others again after another lease.
    pub(crate) fn settle(&self, shard: &Shard, asked: &[u64], answer: &pb::SettleResponse, now: Instant) {
        let mut table = self.table();
        for reservation in asked {
            if let Some(sealed) = table.sealed.get_mut(reservation) {
                sealed.deadline = now + self.lease;
            }
        }
        for reservation in &answer.committed {
            if table.sealed.remove(reservation).is_some() {
                self.files.step(|| Event::Committed(*reservation));
            }
        }
        for reservation in &answer.ended {
            if let Some(sealed) = table.sealed.remove(reservation) {
                table.forget(shard, &sealed.slices, &self.files);
                table.expired += 1;
            }
        }
    }

    /// Numbers of open and of expired reservations.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let table = self.table();
        (table.open.len() as u64, table.expired)
    }
}

impl ReservationTable {
    /// Takes an open reservation out.
    fn close(&mut self, reservation: u64) -> Option<Open> {
        let open = self.open.remove(&reservation)?;
        if let Some(count) = self.open_by_client.get_mut(&open.client) {
            *count -= 1;
            if *count == 0 {
                self.open_by_client.remove(&open.client);
            }
        }
        Some(open)
    }

    fn hold(&mut self, reservation: u64, slices: &Slices) {
        self.slices.extend(slices.iter().map(|id| (*id, reservation)));
        *self.held.entry(reservation).or_default() += slices.len();
    }

    fn forget<'a>(&mut self, shard: &Shard, slices: impl IntoIterator<Item = &'a SliceId>, files: &Files) {
        let slices: Vec<_> = slices.into_iter().copied().filter(|id| self.slices.contains_key(id)).collect();
        if slices.is_empty() {
            return;
        }
        shard.remove(&slices);
        files.step(|| Event::Dropped(slices.iter().map(|id| id.0).collect()));
        for reservation in slices.iter().filter_map(|id| self.slices.remove(id)) {
            if let Entry::Occupied(mut held) = self.held.entry(reservation) {
                *held.get_mut() -= 1;
                if *held.get() == 0 {
                    held.remove();
                    self.charged.remove(&reservation);
                }
            }
        }
    }
}

fn check(wish: &Reserve) -> Result<()> {
    let name = |error: Error| Err(error.tensor(wish.spec.name.clone()));
    if wish.reservation == 0 || wish.slices.is_empty() {
        return name(Error::new(Kind::Config, "a reservation needs an identifier and slices"));
    }
    let count = wish.spec.slice_count();
    if let Some((_, index)) = wish.slices.iter().find(|(_, index)| *index >= count) {
        return name(
            Error::new(Kind::Shape, "the tensor has no such slice")
                .expected(format!("an index below {count}"), index),
        );
    }
    if wish.slices.iter().map(|(id, _)| id).collect::<HashSet<_>>().len() != wish.slices.len() {
        return name(Error::new(Kind::Config, "a slice is named twice in one reservation"));
    }
    Ok(())
}
