//! Registering tensors: places from shard 0, memory and values on the shards, then the entries in the map.
//! `reservations` makes the calls.

use crate::calls::assign::{small_header, small_slice};
use crate::calls::receipts::{plain, pushed};
use crate::calls::reservations::{Placed, Places, Sealed, Wanted};
use crate::calls::small::SmallSlices;
use crate::calls::submit::{Draft, next};
use crate::client::Client;
use crate::link::call::payload::Payload;
use crate::link::unary::{call, request};
use crate::state::map::Entry;
use crate::state::time::after;
use bytes::Bytes;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_core::isa::Isa;
use fastps_core::outgoing;
use fastps_core::registration;
use fastps_core::store::same_spec;
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_core::verbs::NewTensor;
use fastps_proto::v1 as pb;
use fastps_transport::convert::header;
use fastps_transport::convert::{self, Retry, retry};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Most slices, and bytes of them, of initial values under way at a time: each is a copy.
const MAX_SLICES_IN_FLIGHT: usize = 1024;
const MAX_BYTES_IN_FLIGHT: usize = 16 << 20;
/// Renewal interval of the reservations of a long upload.
const RESERVATION_RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// Attempts at a registration that fails on the way.
const MAX_REGISTER_ATTEMPTS: usize = 5;
/// Limit on giving reservations back after a failure.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);
/// Most slices that one call frees, unless one tensor has more.
const MAX_SLICES_DROPPED: usize = 10_000;

/// What is known of the tensors of a call.
struct Fates {
    exist: Vec<bool>,
    /// Those whose last step has no known outcome.
    unknown: HashSet<usize>,
}

impl Fates {
    fn open(&self) -> Vec<usize> {
        (0..self.exist.len()).filter(|k| !self.exist[*k]).collect()
    }

    fn exists(&mut self, k: usize) {
        self.exist[k] = true;
        self.unknown.remove(&k);
    }
}

/// A last step that has failed: its error, and the reservations that it named.
struct Failed {
    error: Error,
    placed: HashMap<usize, Placed>,
}

impl Client {
    pub(crate) fn register_tensors(&self, tensors: Vec<NewTensor<'_>>, timeout: Duration) -> Result<()> {
        self.alive()?;
        self.shared.lost.raise()?;
        let deadline = after(timeout);
        let (all, isa) = (tensors.len(), Isa::get()?);
        registration::check(isa, &tensors)?;
        for NewTensor { spec, .. } in &tensors {
            self.check_knows_tensors_of(spec).map_err(|error| error.tensor(spec.name.clone()))?;
        }
        let Some(first) = tensors.first().map(|new| new.spec.name.clone()) else { return Ok(()) };
        // A client owns its reservations as a whole, so its threads take turns.
        let alone = self.lock_registration(deadline).map_err(|error| error.tensor(first.clone()));
        let _alone = alone.map_err(|error| registration::tell(error, all, 0, 0))?;
        let wanted: Vec<_> = tensors
            .into_iter()
            .map(|NewTensor { spec, values }| {
                let there = convert::spec_to_wire(&self.map.run().spec_there(&spec));
                Wanted::new(spec, there, values)
            })
            .collect();
        let most = self.most_registered();
        if all > most {
            self.check_others(&wanted, deadline)?;
        }
        let (mut exist, mut unknown) = (0, 0);
        for batch in wanted.chunks(most) {
            let mut fates = Fates { exist: vec![false; batch.len()], unknown: HashSet::new() };
            let result = self.register_batch(batch, &mut fates, deadline);
            exist += fates.exist.iter().filter(|exists| **exists).count();
            unknown += fates.unknown.len();
            if let Err(error) = result {
                let error = self.name_here(error, (all == 1).then_some(&first));
                return Err(registration::tell(error, all, exist, unknown));
            }
        }
        Ok(())
    }

    /// The error with the tensor's name as users know it; of a call for one tensor it names that.
    fn name_here(&self, error: Error, only: Option<&Arc<str>>) -> Error {
        let here = error.tensor.as_ref().and_then(|name| self.map.run().here(name));
        match (only, here) {
            (Some(only), _) => error.tensor(only.clone()),
            (None, Some(here)) => error.tensor(here),
            (None, None) => error,
        }
    }

    /// Fails if tensors that are registered in several batches differ from those that exist.
    fn check_others(&self, wanted: &[Wanted<'_>], deadline: Instant) -> Result<()> {
        self.refresh(wanted.iter().map(|wanted| wanted.spec.name.to_string()).collect(), deadline)?;
        let (_, known) = self.map.look_up(wanted.iter().map(|wanted| &wanted.spec.name));
        let both = known.iter().zip(wanted);
        both.filter_map(|(known, wanted)| Some((known.as_ref()?, wanted)))
            .try_for_each(|(known, wanted)| same_spec(&known.spec, &wanted.spec))
            .map_err(|error| registration::tell(error, wanted.len(), known.iter().flatten().count(), 0))
    }

    /// Registers tensors together. Waits for those that another client registers once its own are committed,
    /// so that two clients never wait for each other.
    fn register_batch(&self, wanted: &[Wanted<'_>], fates: &mut Fates, deadline: Instant) -> Result<()> {
        let (mut attempts, mut failed) = (0, None);
        loop {
            let mut places = Places::default();
            let asked = self.place(wanted, &fates.open(), &mut places, deadline);
            places.exist.iter().for_each(|k| fates.exists(*k));
            if let Some(failed) = failed.take() {
                self.judge(failed, &asked, &places, fates, deadline)?;
            } else if let Err(error) = asked {
                self.give_up(&places.placed, deadline);
                return Err(error);
            }
            if places.placed.is_empty() {
                match places.under_way {
                    None => return Ok(()),
                    Some((k, pause)) => self.pause(&wanted[k].spec, pause, deadline)?,
                }
                continue;
            }
            attempts += 1;
            reach("client_placed");
            if let Err(error) = self.fill(wanted, &places.placed, deadline) {
                // Nothing was committed. Slices on an unreachable shard end with the reservation's lease.
                self.give_up(&places.placed, deadline);
                let expired =
                    matches!(retry(error.kind), Retry::Session | Retry::Map) || error.kind == Kind::Fenced;
                if !expired || attempts == MAX_REGISTER_ATTEMPTS {
                    return Err(error);
                }
                continue;
            }
            match self.commit(&places.placed, deadline) {
                Ok(()) => {
                    reach("client_committed");
                    for Placed { wanted, entry, .. } in places.placed {
                        self.map.insert(entry);
                        fates.exists(wanted);
                    }
                }
                Err(error) => {
                    fates.unknown.extend(places.placed.iter().map(|placed| placed.wanted));
                    if attempts == MAX_REGISTER_ATTEMPTS {
                        return Err(error);
                    }
                    let placed = places.placed.into_iter().map(|placed| (placed.wanted, placed)).collect();
                    failed = Some(Failed { error, placed });
                }
            }
        }
    }

    /// What the first step, repeated, says of a last step that failed: a lost answer may have been a success.
    /// Slices are dropped only where shard 0 shows by another reservation that the former has ended. Fails
    /// unless what is left may be tried again.
    fn judge(
        &self,
        failed: Failed,
        asked: &Result<()>,
        places: &Places,
        fates: &mut Fates,
        deadline: Instant,
    ) -> Result<()> {
        let Failed { error, mut placed } = failed;
        if asked.is_err() {
            return Err(error);
        }
        placed.retain(|k, _| !fates.exist[*k]);
        let before = placed.len();
        for now in &places.placed {
            if placed.get(&now.wanted).is_some_and(|before| before.reservation == now.reservation) {
                placed.remove(&now.wanted);
            }
        }
        let is_under_way = placed.len() < before;
        fates.unknown.retain(|k| !placed.contains_key(k));
        let ended: Vec<_> = placed.into_values().map(|placed| placed.entry).collect();
        let _ = self.drop_slices(&ended, deadline);
        if is_under_way && retry(error.kind) != Retry::Session {
            return Err(error);
        }
        fates.unknown.clear();
        Ok(())
    }

    /// Gives places back that no last step has named.
    fn give_up(&self, placed: &[Placed], deadline: Instant) {
        let entries: Vec<_> = placed.iter().map(|placed| placed.entry.clone()).collect();
        let _ = self.drop_slices(&entries, after(DROP_TIMEOUT).min(deadline));
    }

    /// Waits before it asks again for a tensor that another client registers.
    fn pause(&self, spec: &TensorSpec, pause: Duration, deadline: Instant) -> Result<()> {
        if Instant::now() + pause >= deadline {
            let error = Error::new(Kind::Deadline, "another client was still registering the tensor");
            return Err(error.tensor(self.map.run().there(&spec.name)));
        }
        self.block(async move {
            tokio::time::sleep(pause).await;
            Ok(())
        })
    }

    /// Fails if a server would drop the average or the rounding from the spec.
    fn check_knows_tensors_of(&self, spec: &TensorSpec) -> Result<()> {
        if spec.average.is_none() && spec.rounding.is_none() {
            return Ok(());
        }
        let Some(link) = self.links.iter().find(|link| !link.dtypes.load(Ordering::Relaxed)) else {
            return Ok(());
        };
        let (lacks, expected, got) = match spec.average {
            Some(average) => ("keep no average", "average=None", average.to_string()),
            None => ("are not bfloat16", "dtype=\"float32\"", spec.dtype.name().to_owned()),
        };
        let why = format!("the server {} is of an earlier version, whose tensors {lacks}", link.address());
        Err(Error::new(Kind::Precondition, why).shard(link.shard()).expected(expected, got))
    }

    fn lock_registration(&self, deadline: Instant) -> Result<tokio::sync::OwnedMutexGuard<()>> {
        let registering = self.registering.clone();
        self.block(async move {
            let late = |_| {
                Error::new(Kind::Deadline, "another thread of this client was still registering a tensor")
            };
            tokio::time::timeout_at(deadline.into(), registering.lock_owned()).await.map_err(late)
        })
    }

    /// Takes the memory on the shards, fills it and seals it.
    fn fill(&self, wanted: &[Wanted<'_>], placed: &[Placed], deadline: Instant) -> Result<()> {
        let sealed = self.reserve(wanted, placed, deadline)?;
        reach("client_reserved");
        let mut renewed = Instant::now();
        for window in windows(placed, &sealed) {
            // No server sees the upload of the other tensors, so repeat both steps to keep the reservations.
            if renewed.elapsed() > RESERVATION_RENEW_INTERVAL {
                self.renew(wanted, placed, deadline)?;
                renewed = Instant::now();
            }
            self.assign(wanted, &window, deadline)?;
            reach("client_assigned");
        }
        self.seal(placed, deadline)?;
        reach("client_sealed");
        Ok(())
    }

    /// Repeats the first two steps. Fails if a reservation has ended.
    fn renew(&self, wanted: &[Wanted<'_>], placed: &[Placed], deadline: Instant) -> Result<()> {
        let open: Vec<_> = placed.iter().map(|placed| placed.wanted).collect();
        let mut places = Places::default();
        self.place(wanted, &open, &mut places, deadline)?;
        let same = |(before, now): (&Placed, &Placed)| before.reservation == now.reservation;
        if places.placed.len() != placed.len() || !placed.iter().zip(&places.placed).all(same) {
            return Err(Error::new(Kind::Lease, "the reservation was taken over"));
        }
        self.reserve(wanted, placed, deadline).map(drop)
    }

    /// Sends the values of some slices.
    fn assign(&self, wanted: &[Wanted<'_>], window: &[(&Placed, usize)], deadline: Instant) -> Result<()> {
        let isa = Isa::get()?;
        let (epoch, _) = self.map.look_up(std::iter::empty());
        let mut names: Vec<Arc<str>> = Vec::new();
        let mut drafts = Vec::with_capacity(window.len());
        let mut small = SmallSlices::new(small_header(epoch));
        for (placed, k) in window {
            let Placed { entry, reservation, .. } = placed;
            if names.last() != Some(&entry.spec.name) {
                names.push(entry.spec.name.clone());
            }
            let range = entry.spec.slice_range(*k);
            let (dtype, count) = (entry.spec.dtype, range.len() as u64);
            let body = outgoing::assigned_body(isa, wanted[placed.wanted].values.get(range), &entry.spec);
            let tensor = names.len() - 1;
            let together = self.links[entry.slices[*k].1].initial_parts.load(Ordering::Relaxed);
            if together && self.is_small(entry, *k, body.len(), None) {
                drafts.extend(small.add(small_slice((tensor, entry, *k), &body, *reservation)));
                continue;
            }
            let body = Bytes::from(body.into_owned());
            let header = header::assignment(entry.target(*k, epoch), dtype, count, None, *reservation);
            drafts.push(Draft::new(tensor, entry, *k, header, None, Payload::Owned(body)));
        }
        drafts.extend(small.finish());
        let call = {
            let mut last = self.lock_sequence();
            let sequence = next(&mut last);
            self.submit(drafts, Vec::new(), deadline, Some(sequence))
        };
        call.wait(Duration::MAX, None)?;
        pushed(&self.shared, &call, &names).map(drop).map_err(plain)
    }

    /// Frees the slices of tensors that are not in the map. Shard 0 gets all of them, so that it ends the
    /// registrations that they belong to.
    fn drop_slices(&self, entries: &[Arc<Entry>], deadline: Instant) -> Result<()> {
        let mut result = Ok(());
        for (shard, link) in self.links.iter().enumerate() {
            let mut calls: Vec<Vec<u64>> = Vec::new();
            for entry in entries {
                let concerned = |(_, place): &&(_, usize)| shard == 0 || *place == shard;
                let slices = entry.slices.iter().filter(concerned).map(|(slice, _)| slice.0);
                match calls.last_mut().filter(|last| last.len() < MAX_SLICES_DROPPED) {
                    Some(last) => last.extend(slices),
                    None => calls.push(slices.collect()),
                }
            }
            for slices in calls.into_iter().filter(|slices| !slices.is_empty()) {
                for slice in &slices {
                    link.forget(SliceId(*slice));
                }
                let link = link.clone();
                let dropped = self.block(async move {
                    call(&link, deadline, |mut client, left| {
                        let ask = pb::DropRequest { slices: slices.clone() };
                        async move { client.drop(request(ask, left)).await }
                    })
                    .await
                });
                result = result.and(dropped.map(drop));
            }
        }
        result
    }

    pub(crate) fn unregister_tensor(&self, name: &str, timeout: Duration) -> Result<()> {
        let deadline = after(timeout);
        let name: Arc<str> = name.into();
        let (_, entries) = self.look_up(std::iter::once(&name), deadline)?;
        let link = self.links[0].clone();
        let (asked, there) = (name.to_string(), self.map.run().there(&name));
        let answer: Result<pb::UnregisterResponse> = self.block(async move {
            call(&link, deadline, |mut client, left| {
                let ask = pb::UnregisterRequest { name: there.clone() };
                async move { client.unregister(request(ask, left)).await }
            })
            .await
            .map_err(|error| error.tensor(asked.clone()))
        });
        if answer.as_ref().is_err_and(|error| error.kind != Kind::UnknownTensor) {
            return answer.map(drop);
        }
        let Some(known) = entries.first() else {
            return answer.map(drop);
        };
        // Gone already, perhaps by an attempt of this call whose answer was lost: still drop its slices.
        let placed = answer.as_ref().ok().and_then(|answer| {
            Entry::new(known.spec.clone(), answer.placement.as_ref(), self.links.len()).ok()
        });
        self.drop_slices(std::slice::from_ref(placed.as_ref().unwrap_or(known)), deadline)?;
        // Kept until now, so that a failed call may be repeated.
        self.map.remove(&name);
        answer.map(drop)
    }
}

/// The slices that need values, in the order of tensors, as many at a time as may be under way.
fn windows<'a>(placed: &'a [Placed], sealed: &Sealed) -> Vec<Vec<(&'a Placed, usize)>> {
    let (mut windows, mut bytes) = (vec![Vec::new()], 0);
    for placed in placed {
        for (k, (_, shard)) in placed.entry.slices.iter().enumerate() {
            if sealed.contains(&(*shard, placed.reservation)) {
                continue;
            }
            let spec = &placed.entry.spec;
            let more = spec.slice_range(k).len() * spec.dtype.size();
            let full = |window: &Vec<_>| {
                window.len() == MAX_SLICES_IN_FLIGHT
                    || !window.is_empty() && bytes + more > MAX_BYTES_IN_FLIGHT
            };
            if windows.last().is_none_or(full) {
                windows.push(Vec::new());
                bytes = 0;
            }
            bytes += more;
            windows.last_mut().into_iter().for_each(|window: &mut Vec<_>| window.push((placed, k)));
        }
    }
    windows.retain(|window| !window.is_empty());
    windows
}
