//! Registering a tensor: a place from shard 0, memory and values on the shards, then the entry in the map.

use crate::calls::receipts::{plain, pushed};
use crate::calls::submit::{Draft, next};
use crate::client::Client;
use crate::link::call::payload::Payload;
use crate::link::unary::{call, request};
use crate::state::map::Entry;
use crate::state::time::after;
use bytes::Bytes;
use fastps_core::dtype::View;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::isa::Isa;
use fastps_core::outgoing;
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_proto::v1 as pb;
use fastps_transport::convert::header;
use fastps_transport::convert::{self, Retry, retry};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Most slices of initial values under way at a time: each is a copy.
const MAX_SLICES_IN_FLIGHT: usize = 16;
/// How long to wait for a link's new session.
const SESSION_RENEWAL_PAUSE: Duration = Duration::from_millis(100);
/// Renewal interval of the reservation of a long upload.
const RESERVATION_RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// Attempts at a registration that fails on the way.
const MAX_REGISTER_ATTEMPTS: usize = 5;

impl Client {
    pub(crate) fn register_tensor(
        &self,
        spec: TensorSpec,
        values: View<'_>,
        timeout: Duration,
    ) -> Result<()> {
        self.alive()?;
        self.shared.lost.raise()?;
        let deadline = after(timeout);
        let spec = Arc::new(spec);
        let named = |error: Error| error.tensor(spec.name.clone());
        spec.validate()?;
        outgoing::check_values(Isa::get()?, values, &spec)?;
        self.check_knows_tensors_of(&spec).map_err(named)?;
        // A client owns its reservations as a whole, so its threads take turns.
        let _alone = self.lock_registration(deadline).map_err(named)?;
        let mut failed = None;
        for _ in 0..MAX_REGISTER_ATTEMPTS {
            let Some((reservation, entry)) = self.reserve_place(&spec, deadline).map_err(named)? else {
                return Ok(());
            };
            match self.fill(&entry, reservation, values, deadline) {
                Ok(()) => match self.commit(&entry, reservation, deadline) {
                    Ok(()) => {
                        self.map.insert(entry);
                        return Ok(());
                    }
                    Err(error) if retry(error.kind) == Retry::Session => failed = Some(named(error)),
                    Err(error) => return Err(named(error)),
                },
                Err(error) => {
                    // Nothing was committed. Slices on an unreachable shard end with the reservation's lease.
                    let _ = self.drop_slices(&entry, after(Duration::from_secs(1)).min(deadline));
                    let expired = matches!(retry(error.kind), Retry::Session | Retry::Map)
                        || error.kind == Kind::Fenced;
                    if !expired {
                        return Err(named(error));
                    }
                    failed = Some(named(error));
                }
            }
        }
        Err(failed.unwrap_or_else(|| Error::new(Kind::Internal, "a registration without an outcome")))
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

    /// Makes the tensor exist. A lost answer may have been a success, so slices are dropped only once shard 0
    /// shows by another reservation that this one has ended.
    fn commit(&self, entry: &Arc<Entry>, reservation: u64, deadline: Instant) -> Result<()> {
        let link = self.links[0].clone();
        let committed = self.block(async move {
            let ask = pb::CommitRequest { reservation, client: link.client() };
            call(&link, deadline, |mut client, left| async move { client.commit(request(ask, left)).await })
                .await
        });
        match committed {
            Ok(pb::CommitResponse {}) => Ok(()),
            Err(mut error) => match self.reserve_place(&entry.spec, deadline) {
                Ok(None) => Ok(()),
                Ok(Some((other, _))) if other != reservation => {
                    let _ = self.drop_slices(entry, deadline);
                    error.kind = Kind::Lease;
                    Err(error)
                }
                _ => Err(error),
            },
        }
    }

    /// Asks shard 0 for a place; `None` if the tensor exists already. Waits while another client registers
    /// it.
    fn reserve_place(&self, spec: &Arc<TensorSpec>, deadline: Instant) -> Result<Option<(u64, Arc<Entry>)>> {
        let (link, spec, shards) = (self.links[0].clone(), spec.clone(), self.links.len());
        let there = convert::spec_to_wire(&self.map.run().spec_there(&spec));
        self.block(async move {
            loop {
                let ask = pb::RegisterRequest { spec: Some(there.clone()), client: link.client() };
                let answer = call(&link, deadline, |mut client, left| {
                    let ask = ask.clone();
                    async move { client.register(request(ask, left)).await }
                })
                .await;
                let answer: pb::RegisterResponse = match answer {
                    // The session ended while we were suspended; the link is about to open a new one.
                    Err(error)
                        if retry(error.kind) == Retry::Session
                            && Instant::now() + SESSION_RENEWAL_PAUSE < deadline =>
                    {
                        tokio::time::sleep(SESSION_RENEWAL_PAUSE).await;
                        continue;
                    }
                    answer => answer?,
                };
                if answer.exists {
                    return Ok(None);
                }
                if !answer.under_way {
                    let entry = Entry::new(spec.clone(), answer.placement.as_ref(), shards)?;
                    return Ok(Some((answer.reservation, entry)));
                }
                let pause = Duration::from_millis(u64::from(answer.retry_after_ms.max(1)));
                if Instant::now() + pause >= deadline {
                    return Err(Error::new(
                        Kind::Deadline,
                        "another client was still registering the tensor",
                    ));
                }
                tokio::time::sleep(pause).await;
            }
        })
    }

    /// Takes the memory on the shards and fills it.
    fn fill(&self, entry: &Arc<Entry>, reservation: u64, values: View<'_>, deadline: Instant) -> Result<()> {
        for (shard, link) in self.links.iter().enumerate() {
            let here = |(_, (_, place)): &(usize, &(_, usize))| *place == shard;
            let (indices, slices): (Vec<_>, Vec<_>) = entry
                .slices
                .iter()
                .enumerate()
                .filter(here)
                .map(|(k, (slice, _))| (k as u64, slice.0))
                .unzip();
            if slices.is_empty() {
                continue;
            }
            let (link, client) = (link.clone(), link.client());
            let spec = Some(convert::spec_to_wire(&self.map.run().spec_there(&entry.spec)));
            let ask = pb::ReserveRequest { reservation, spec, slices, indices, group: entry.group, client };
            self.block(async move {
                call(&link, deadline, |mut client, left| {
                    let ask = ask.clone();
                    async move { client.reserve(request(ask, left)).await }
                })
                .await
            })?;
        }
        let sequence = next(&mut self.lock_sequence());
        let (epoch, _) = self.map.look_up(std::iter::empty());
        let all: Vec<_> = entry.spec.slices().enumerate().collect();
        let (isa, mut renewed) = (Isa::get()?, Instant::now());
        for window in all.chunks(MAX_SLICES_IN_FLIGHT) {
            // Shard 0 does not see the upload, so repeat the first step to keep the reservation.
            if renewed.elapsed() > RESERVATION_RENEW_INTERVAL {
                match self.reserve_place(&entry.spec, deadline)? {
                    Some((same, _)) if same == reservation => renewed = Instant::now(),
                    _ => return Err(Error::new(Kind::Lease, "the reservation was taken over")),
                }
            }
            let draft = |(k, range): &(usize, std::ops::Range<usize>)| {
                let body = outgoing::assigned_body(isa, values.get(range.clone()), &entry.spec);
                let body = Bytes::from(body.into_owned());
                let (dtype, count) = (entry.spec.dtype, range.len() as u64);
                let header = header::assignment(entry.target(*k, epoch), dtype, count, None, reservation);
                Draft::new(0, entry, *k, header, None, Payload::Owned(body))
            };
            let call = self.submit(window.iter().map(draft).collect(), Vec::new(), deadline, Some(sequence));
            call.wait(Duration::MAX, None)?;
            pushed(&self.shared, &call, std::slice::from_ref(&entry.spec.name)).map_err(plain)?;
        }
        for (shard, link) in self.links.iter().enumerate() {
            if !entry.slices.iter().any(|(_, place)| *place == shard) {
                continue;
            }
            let link = link.clone();
            self.block(async move {
                call(&link, deadline, |mut client, left| async move {
                    client.seal(request(pb::SealRequest { reservation }, left)).await
                })
                .await
            })?;
        }
        Ok(())
    }

    /// Frees the slices of a tensor that is not in the map. Shard 0 gets all of them, so that it ends a
    /// registration that they belong to.
    fn drop_slices(&self, entry: &Entry, deadline: Instant) -> Result<()> {
        let mut result = Ok(());
        for (shard, link) in self.links.iter().enumerate() {
            let concerned = |(_, place): &&(_, usize)| shard == 0 || *place == shard;
            let slices: Vec<_> = entry.slices.iter().filter(concerned).map(|(slice, _)| slice.0).collect();
            if slices.is_empty() {
                continue;
            }
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
        self.drop_slices(placed.as_ref().unwrap_or(known), deadline)?;
        // Kept until now, so that a failed call may be repeated.
        self.map.remove(&name);
        answer.map(drop)
    }
}
