//! A client's places in groups of workers: taken at shard 0 first, kept over connections and incarnations.

use super::control::{Control, call, request};
use super::link::Link;
use super::runtime::lock;
use super::{Client, Shared, after};
use crate::convert::{Retry, mode_to_wire, retry};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::mode::{Clocks, Joined, Mode, Seat};
use fastps_core::store::still_behind;
use fastps_proto::v1 as pb;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What an answer needs to come back in time.
const MARGIN: Duration = Duration::from_millis(100);
/// How long a place is asked for when a connection begins, or given back without one.
const AGAIN: Duration = Duration::from_secs(2);
/// How long a server is told that a worker leaves.
const FAREWELL: Duration = Duration::from_secs(5);

/// A place in a group.
#[derive(Clone, Debug)]
pub(super) struct Place {
    group: u32,
    /// The group's, which the map does not know any more when its last tensor is gone.
    name: Arc<str>,
    seat: Seat,
    /// Steps taken.
    clock: u64,
    /// The steps that shard 0 is known to know of.
    told: u64,
    /// A server has forgotten it, so the others go on without this worker until it joins again, everywhere.
    lost: bool,
}

impl Place {
    fn is(&self, group: u32, warm: bool) -> bool {
        self.group == group && is_warm(self.seat.mode) == warm
    }

    /// Taken again where it may have been forgotten: a server that was started anew counts anew; else the last step may just not
    /// have been told.
    fn rejoined(&mut self, clock: u64) {
        self.clock = if clock < self.told { clock } else { self.clock.max(clock) };
        self.told = clock;
    }

    /// Other shards need to know of what concerns pushes alone.
    fn concerns(&self, link: &Link) -> bool {
        link.shard() == 0 || matches!(self.seat.mode, Mode::Sync(_))
    }
}

impl Shared {
    /// Places among workers that wait for each other end everywhere when one shard has forgotten the client.
    pub(super) fn lose_places(&self) {
        let mut places = lock(&self.places);
        let waits = |mode| matches!(mode, Mode::Sync(_) | Mode::Bounded { .. });
        places.iter_mut().for_each(|place| place.lost |= waits(place.seat.mode));
        self.note_lost_places(&places);
    }

    fn note_lost_places(&self, places: &[Place]) {
        self.some_place_is_lost.store(places.iter().any(|place| place.lost), Ordering::Release);
    }

    /// Why a frame is not sent: it is a gradient of a worker whose place is lost.
    pub(super) fn fences(&self, header: &pb::Header) -> Option<Error> {
        if !self.some_place_is_lost.load(Ordering::Acquire) || header.kind() != pb::Kind::Gradient {
            return None;
        }
        let lost = lock(&self.places).iter().any(|place| place.lost && place.group == header.group);
        let why =
            "the worker's lease ran out, and the others went on without it: it must join its group again";
        lost.then(|| Error::new(Kind::Lease, why))
    }
}

fn is_warm(mode: Mode) -> bool {
    matches!(mode, Mode::WarmStart { .. })
}

async fn ask_for(link: &Link, group: u32, seat: &Seat, deadline: Instant) -> Result<Joined> {
    let ask = |mut control: Control, left| {
        let mode = Some(mode_to_wire(seat.mode));
        let join =
            pb::JoinRequest { client: link.client(), group, mode, rank: seat.rank, name: seat.name.clone() };
        async move { control.join(request(join, left)).await }
    };
    let pb::JoinResponse { clock, workers, present } = call(link, deadline, ask).await?;
    Ok(Joined { clock, present, workers })
}

/// Takes the client's places again, where a server may have forgotten them. What it refuses, pushes will find out. Lost
/// ones are the worker's to take again, when it goes on: until then nobody shall wait for it.
pub(super) async fn rejoin(link: &Link) {
    let here = |place: &&Place| place.concerns(link) && !place.lost;
    let places: Vec<_> = lock(&link.shared.places).iter().filter(here).cloned().collect();
    let deadline = after(AGAIN);
    for place in places {
        match ask_for(link, place.group, &place.seat, deadline).await {
            Ok(joined) => change(link, &place, |known| known.rejoined(joined.clock)),
            Err(error) => tracing::warn!(shard = link.shard(), %error, "the worker's place is taken"),
        }
    }
}

/// Changes a place whose clock shard 0 keeps.
fn change(link: &Link, place: &Place, change: impl FnMut(&mut Place)) {
    if link.shard() != 0 {
        return;
    }
    let mut places = lock(&link.shared.places);
    places.iter_mut().filter(|known| known.is(place.group, is_warm(place.seat.mode))).for_each(change);
}

impl Client {
    pub(super) fn join_group(&self, group: &str, seat: &Seat, timeout: Duration) -> Result<Joined> {
        seat.check()?;
        let deadline = after(timeout);
        let (name, group) = (group.into(), self.group(group, deadline)?);
        let place = Place { group, name, seat: seat.clone(), clock: 0, told: 0, lost: false };
        let links: Vec<_> = self.links.iter().filter(|link| place.concerns(link)).cloned().collect();
        let shared = self.shared.clone();
        self.block(async move {
            loop {
                let incarnations = shared.incarnations.load(Ordering::Acquire);
                let joined = join_all(&links, &place, deadline).await?;
                let mut places = lock(&shared.places);
                // A lease that was lost meanwhile has ended a place that was just taken.
                if shared.incarnations.load(Ordering::Acquire) == incarnations {
                    places.retain(|known| !known.is(group, is_warm(place.seat.mode)));
                    places.push(Place { clock: joined.clock, told: joined.clock, ..place });
                    shared.note_lost_places(&places);
                    return Ok(joined);
                }
            }
        })
    }

    pub(super) fn leave_group(&self, group: &str, warm: bool, timeout: Duration) -> Result<()> {
        let deadline = after(timeout);
        let group = self.group(group, deadline)?;
        let mut places = lock(&self.shared.places);
        let left: Vec<_> = places.extract_if(.., |place| place.is(group, warm)).collect();
        self.shared.note_lost_places(&places);
        drop(places);
        let links = self.links.clone();
        self.block(async move {
            // All at once: one that does not answer takes no time from the others.
            let concerned = links.iter().filter(|link| left.iter().any(|place| place.concerns(link)));
            futures_util::future::join_all(concerned.map(|link| give_back(link, group, warm, deadline)))
                .await;
            Ok(())
        })
    }

    pub(super) fn advance_in(
        &self,
        group: &str,
        warm: bool,
        steps: u64,
        timeout: Duration,
    ) -> Result<Clocks> {
        // Who does not want to wait is told all the same whether it must.
        let deadline = after(timeout.max(MARGIN));
        let group = self.group(group, deadline)?;
        let (link, places) = (self.links[0].clone(), self.shared.clone());
        let place = move |steps: u64| {
            let mut places = lock(&places.places);
            let place = places.iter_mut().find(|place| place.is(group, warm))?;
            // A server may have said any number.
            place.clock = place.clock.saturating_add(steps);
            Some(place.clone())
        };
        self.block(async move {
            let mut behind = Vec::new();
            // They are taken, even if the next may not be yet.
            let mut taken = steps;
            loop {
                let Some(place) = place(std::mem::take(&mut taken)) else {
                    return Err(Error::new(
                        Kind::Config,
                        "the worker has no place in the group: join it first",
                    ));
                };
                let told = tell(&link, &place, behind.is_empty(), deadline).await;
                let late = Instant::now() + MARGIN >= deadline;
                if told.is_ok() {
                    change(&link, &place, |known| known.told = known.clock);
                }
                match told {
                    Ok(answer) if answer.ready => {
                        return Ok(Clocks { slowest: answer.slowest, leads: answer.leads });
                    }
                    Ok(answer) if !late => behind = answer.behind,
                    Ok(answer) => return Err(still_behind(&answer.behind).shard(0)),
                    // The server was started anew, or the lease ran out: a place is taken anew, if nobody else has.
                    Err(error) if retry(error.kind) == Retry::Session && !late => {
                        tokio::time::sleep(MARGIN).await;
                        let joined = ask_for(&link, group, &place.seat, deadline).await?;
                        change(&link, &place, |known| {
                            (known.clock, known.told) = (joined.clock, joined.clock);
                        });
                        taken = steps;
                    }
                    Err(error) if error.kind == Kind::Deadline && !behind.is_empty() => {
                        return Err(still_behind(&behind).shard(0));
                    }
                    Err(error) => return Err(error),
                }
            }
        })
    }

    /// The number of a group, which the map tells.
    pub(super) fn group(&self, name: &str, deadline: Instant) -> Result<u32> {
        self.alive()?;
        let taken =
            || lock(&self.shared.places).iter().find(|place| *place.name == *name).map(|place| place.group);
        if let Some(group) = self.map.group(name).or_else(taken) {
            return Ok(group);
        }
        self.refresh(Vec::new(), deadline)?;
        self.map.group(name).ok_or_else(|| {
            let message =
                format!("no tensor of group {name:?} is registered at {}", self.addresses().join(", "));
            Error::new(Kind::UnknownTensor, message)
        })
    }
}

/// Takes a place at all of them, or at none.
async fn join_all(links: &[Arc<Link>], place: &Place, deadline: Instant) -> Result<Joined> {
    let mut first = None;
    for link in links {
        match join_one(link, place, deadline).await {
            Ok(joined) => first = first.or(Some(joined)),
            Err(error) => {
                // Nobody shall wait for one that is not everywhere.
                for link in links.iter().take_while(|other| !Arc::ptr_eq(other, link)) {
                    give_back(link, place.group, is_warm(place.seat.mode), deadline).await;
                }
                return Err(error);
            }
        }
    }
    first.ok_or_else(|| Error::new(Kind::Internal, "a cluster without shards"))
}

/// The same at one. Where the client's lease is lost, it is renewed first.
async fn join_one(link: &Link, place: &Place, deadline: Instant) -> Result<Joined> {
    loop {
        let client = link.client();
        match ask_for(link, place.group, &place.seat, deadline).await {
            Err(error) if retry(error.kind) == Retry::Session && Instant::now() + MARGIN < deadline => {
                link.lease_is_lost(client);
                tokio::time::sleep(MARGIN / 4).await;
            }
            joined => return joined,
        }
    }
}

async fn give_back(link: &Link, group: u32, warm: bool, deadline: Instant) {
    let ask = |mut control: Control, left| {
        let leave = pb::LeaveRequest { client: link.client(), group, warm };
        async move { control.leave(request(leave, left)).await }
    };
    // A server that cannot be told finds out when the lease ends.
    let longest = if link.is_connected() { FAREWELL } else { AGAIN };
    if let Err(error) = call(link, deadline.min(after(longest)), ask).await {
        tracing::debug!(shard = link.shard(), %error, "leaving a group was not told");
    }
}

/// Says what the clock is, and waits. The first answer comes at half time: who is behind is known then, however late the
/// last one is.
async fn tell(link: &Link, place: &Place, first: bool, deadline: Instant) -> Result<pb::AdvanceResponse> {
    let ask = |mut control: Control, left: Duration| {
        let wait = left.saturating_sub(MARGIN).min(if first { left / 2 } else { left });
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let (client, group, warm) = (link.client(), place.group, is_warm(place.seat.mode));
        // Said again to a server that was started anew, it is what that counts from.
        let mut clock = place.clock;
        change(link, place, |known| clock = known.clock);
        let advance = pb::AdvanceRequest { client, group, warm, clock, wait_ms };
        async move { control.advance(request(advance, left)).await }
    };
    call(link, deadline, ask).await
}
