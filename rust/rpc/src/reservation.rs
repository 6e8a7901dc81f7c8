//! Which registration each slice of this shard belongs to. A reservation holds memory under a lease; until it is
//! sealed its slices take nothing but their initial values. Once sealed it stays until shard 0 tells that it was not
//! committed (`settle` asks).

use crate::durable::Files;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::Shard;
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_durable::{Event, Reservation, Stage};
use fastps_proto::v1 as pb;
use foldhash::fast::RandomState;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
struct Open {
    client: u64,
    slices: Vec<SliceId>,
    missing: HashSet<SliceId>,
    deadline: Instant,
}

/// All values are here; whether the tensor exists, shard 0 knows.
#[derive(Debug)]
struct Sealed {
    slices: Vec<SliceId>,
    /// When to ask.
    deadline: Instant,
}

#[derive(Debug, Default)]
struct Table {
    /// The reservation of every slice that the shard holds.
    slices: HashMap<SliceId, u64, RandomState>,
    /// How many of them each reservation has.
    held: HashMap<u64, usize>,
    /// Those that are not sealed.
    open: HashMap<u64, Open>,
    /// Those that are sealed and not known to be committed.
    sealed: HashMap<u64, Sealed>,
    expired: u64,
}

impl Table {
    /// Whether the slice takes anything but initial values.
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
    /// Identifier and index in the tensor.
    pub(crate) slices: Vec<(SliceId, usize)>,
}

impl Reserve {
    fn as_kept(&self) -> Reservation {
        let slices = self.slices.iter().map(|(id, index)| (id.0, *index as u64)).collect();
        Reservation { spec: TensorSpec::clone(&self.spec), group: self.group, slices, stage: Stage::Open }
    }
}

/// The reservations of one shard.
#[derive(Debug)]
pub(crate) struct Reservations {
    lease: Duration,
    files: Files,
    table: Mutex<Table>,
}

fn lost(reservation: u64) -> Error {
    Error::new(Kind::Lease, format!("reservation {reservation} ran out or was taken over: register again"))
}

impl Reservations {
    pub(crate) fn new(lease: Duration, files: Files) -> Self {
        Self { lease, files, table: Mutex::default() }
    }

    /// Goes on with the slices of an earlier process, which the shard has. Whether what is sealed was committed, shard 0
    /// is asked; what was not sealed is registered anew by its client.
    pub(crate) fn restore(&self, shard: &Shard, all: &BTreeMap<u64, Reservation>, now: Instant) {
        let mut table = self.table();
        for (id, Reservation { slices, stage, .. }) in all {
            let slices: Vec<_> = slices.iter().map(|(id, _)| SliceId(*id)).collect();
            if *stage == Stage::Open {
                table.forget(shard, &slices, &self.files);
                continue;
            }
            table.hold(*id, &slices);
            if *stage == Stage::Sealed {
                table.sealed.insert(*id, Sealed { slices, deadline: now + self.lease });
            }
        }
    }

    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the memory. Repeats change nothing. False: the reservation is sealed already.
    pub(crate) fn reserve(&self, shard: &Shard, wish: &Reserve, now: Instant) -> Result<bool> {
        check(wish)?;
        let ids: Vec<_> = wish.slices.iter().map(|(id, _)| *id).collect();
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
        shard.create(&wish.spec, wish.group, &wish.slices)?;
        self.files.step(|| Event::Reserved(wish.reservation, wish.as_kept()));
        table.hold(wish.reservation, &ids);
        let missing = ids.iter().copied().collect();
        let open = Open { client: wish.client, slices: ids, missing, deadline: now + self.lease };
        table.open.insert(wish.reservation, open);
        Ok(true)
    }

    /// Whether a frame for this slice is in order: initial values while it is reserved, anything else once sealed.
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

    /// As [`Reservations::admit`] without a reservation, of many slices: what can be said against each.
    pub(crate) fn admit_all(&self, slices: impl Iterator<Item = SliceId>) -> Vec<Result<()>> {
        let table = self.table();
        slices.map(|slice| table.check_sealed(slice)).collect()
    }

    /// The initial values of a slice were applied.
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
                if let Some(Open { slices, .. }) = table.open.remove(&reservation) {
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

    /// Whether the slice is here, sealed under this reservation.
    pub(crate) fn is_sealed(&self, slice: SliceId, reservation: u64) -> bool {
        let table = self.table();
        table.slices.get(&slice) == Some(&reservation) && !table.open.contains_key(&reservation)
    }

    /// Frees slices.
    pub(crate) fn drop_slices(&self, shard: &Shard, slices: &[SliceId]) {
        let mut table = self.table();
        let gone: HashSet<_> = slices.iter().copied().collect();
        let of: HashSet<_> = slices.iter().filter_map(|id| table.slices.get(id).copied()).collect();
        for reservation in of {
            if let Some(open) = table.open.get_mut(&reservation) {
                open.slices.retain(|id| !gone.contains(id));
                open.missing.retain(|id| !gone.contains(id));
                if open.slices.is_empty() {
                    table.open.remove(&reservation);
                }
            }
            if let Some(sealed) = table.sealed.get_mut(&reservation) {
                sealed.slices.retain(|id| !gone.contains(id));
                if sealed.slices.is_empty() {
                    table.sealed.remove(&reservation);
                }
            }
        }
        table.forget(shard, slices, &self.files);
    }

    /// Frees the reservations whose lease ran out.
    pub(crate) fn sweep(&self, shard: &Shard, now: Instant) -> Vec<u64> {
        let mut table = self.table();
        let over: Vec<_> = table.open.extract_if(|_, open| open.deadline < now).collect();
        for (_, open) in &over {
            table.forget(shard, &open.slices, &self.files);
            table.expired += 1;
        }
        over.into_iter().map(|(reservation, _)| reservation).collect()
    }

    /// Reservations that were sealed a lease ago and are not known to be committed, at most `limit`.
    pub(crate) fn unsettled(&self, limit: usize, now: Instant) -> Vec<u64> {
        let table = self.table();
        let due = table.sealed.iter().filter(|(_, sealed)| sealed.deadline < now);
        due.map(|(reservation, _)| *reservation).take(limit).collect()
    }

    /// Takes what shard 0 says of the reservations that it was asked about: frees what was not committed, keeps what
    /// was; asks for the others again after another lease.
    pub(crate) fn settle(&self, shard: &Shard, asked: &[u64], told: &pb::SettleResponse, now: Instant) {
        let mut table = self.table();
        for reservation in asked {
            if let Some(sealed) = table.sealed.get_mut(reservation) {
                sealed.deadline = now + self.lease;
            }
        }
        for reservation in &told.committed {
            if table.sealed.remove(reservation).is_some() {
                self.files.step(|| Event::Committed(*reservation));
            }
        }
        for reservation in &told.ended {
            if let Some(sealed) = table.sealed.remove(reservation) {
                table.forget(shard, &sealed.slices, &self.files);
                table.expired += 1;
            }
        }
    }

    /// Open reservations, and how many ran out.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let table = self.table();
        (table.open.len() as u64, table.expired)
    }
}

impl Table {
    fn hold(&mut self, reservation: u64, slices: &[SliceId]) {
        self.slices.extend(slices.iter().map(|id| (*id, reservation)));
        *self.held.entry(reservation).or_default() += slices.len();
    }

    fn forget(&mut self, shard: &Shard, slices: &[SliceId], files: &Files) {
        shard.remove(slices);
        files.step(|| Event::Dropped(slices.iter().map(|id| id.0).collect()));
        for reservation in slices.iter().filter_map(|id| self.slices.remove(id)) {
            if let Entry::Occupied(mut held) = self.held.entry(reservation) {
                *held.get_mut() -= 1;
                if *held.get() == 0 {
                    held.remove();
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
        return name(Error::new(Kind::Config, "a slice stands twice in one reservation"));
    }
    Ok(())
}
