//! Joining, leaving and advancing in groups of workers. A client joins at shard 0 first, and its membership
//! outlives connections and incarnations.

use crate::client::Client;
use crate::link::memberships::{REJOIN_TIMEOUT, ask_for, change};
use crate::link::state::Link;
use crate::link::unary::{Control, call, request};
use crate::state::memberships::{Membership, is_warm};
use crate::state::time::after;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::mode::{Clocks, Joined, MembershipRequest, Presence};
use fastps_core::store::still_behind;
use fastps_core::tensor::SliceId;
use fastps_core::verbs::{Listener, SliceVersion, Versions};
use fastps_proto::v1 as pb;
use fastps_transport::convert::{Retry, retry};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Time reserved for an answer's way back.
const ANSWER_MARGIN: Duration = Duration::from_millis(100);
/// Limit on notifying a server that a worker leaves.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one call listens for a quorum.
const LISTEN_FOR: Duration = Duration::from_secs(15);

impl Client {
    pub(crate) fn join_group(
        &self,
        group: &str,
        seat: &MembershipRequest,
        timeout: Duration,
    ) -> Result<Joined> {
        seat.check()?;
        let deadline = after(timeout);
        let (name, group) = (group.into(), self.group(group, deadline)?);
        let membership =
            Membership { group, name, seat: seat.clone(), clock: 0, acknowledged: 0, lost: false };
        let links: Vec<_> =
            self.links.iter().filter(|link| membership.concerns(link.shard())).cloned().collect();
        let shared = self.shared.clone();
        let is_member = shared.memberships.has(group, is_warm(seat.mode));
        self.block(async move {
            loop {
                let incarnations = shared.incarnations.load(Ordering::Acquire);
                let joined = join_all(&links, &membership, is_member, deadline).await?;
                let mut membership =
                    Membership { clock: joined.clock, acknowledged: joined.clock, ..membership.clone() };
                if matches!(membership.seat.presence, Presence::Rouses(_)) {
                    membership.seat.presence = Presence::Active;
                }
                // A lost lease has ended a membership that has just begun.
                let is_lost = || shared.incarnations.load(Ordering::Acquire) != incarnations;
                if shared.memberships.take(membership, is_lost) {
                    return Ok(joined);
                }
            }
        })
    }

    pub(crate) fn leave_group(&self, group: &str, warm: bool, timeout: Duration) -> Result<()> {
        let deadline = after(timeout);
        let group = self.group(group, deadline)?;
        let left = self.shared.memberships.leave(group, warm);
        let links = self.links.clone();
        self.block(async move {
            // All at once: one that does not answer takes no time from the others.
            let concerned =
                links.iter().filter(|link| left.iter().any(|membership| membership.concerns(link.shard())));
            futures_util::future::join_all(concerned.map(|link| give_back(link, group, warm, deadline)))
                .await;
            Ok(())
        })
    }

    pub(crate) fn advance_in(
        &self,
        group: &str,
        warm: bool,
        steps: u64,
        timeout: Duration,
    ) -> Result<Clocks> {
        // A caller without time to wait still learns whether it must.
        let deadline = after(timeout.max(ANSWER_MARGIN));
        let group = self.group(group, deadline)?;
        let (link, shared) = (self.links[0].clone(), self.shared.clone());
        self.block(async move {
            let mut behind = Vec::new();
            // These are taken, even if the next may not be yet.
            let mut taken = steps;
            loop {
                let Some(membership) = shared.memberships.advance(group, warm, std::mem::take(&mut taken))
                else {
                    return Err(Error::new(
                        Kind::Config,
                        "the worker has no place in the group: join it first",
                    ));
                };
                let response = report_clock(&link, &membership, behind.is_empty(), deadline).await;
                let late = Instant::now() + ANSWER_MARGIN >= deadline;
                if response.is_ok() {
                    change(&link, &membership, |known| known.acknowledged = known.clock);
                }
                match response {
                    Ok(answer) if answer.ready => {
                        return Ok(Clocks { slowest: answer.slowest, leads: answer.leads });
                    }
                    Ok(answer) if !late => behind = answer.behind,
                    Ok(answer) => return Err(still_behind(&answer.behind).shard(0)),
                    // The server restarted, or the lease expired: the client joins again, unless another
                    // worker has its place.
                    Err(error) if retry(error.kind) == Retry::Session && !late => {
                        tokio::time::sleep(ANSWER_MARGIN).await;
                        let joined = ask_for(&link, group, &membership.seat, deadline).await?;
                        change(&link, &membership, |known| {
                            (known.clock, known.acknowledged) = (joined.clock, joined.clock);
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

    /// Asks the shard of a tensor's first slice, and keeps asking until the listener is dropped.
    pub(crate) fn listen_for_quorum(
        &self,
        name: &Arc<str>,
        at: &Versions,
        timeout: Duration,
    ) -> Result<Listener> {
        let (_, entries) = self.look_up(std::iter::once(name), after(timeout))?;
        let first = at.tensor(name).and_then(<[_]>::first).copied();
        let place = first.and_then(|first| entries[0].slices.iter().find(|(slice, _)| *slice == first.slice));
        let (Some(SliceVersion { slice, version, .. }), Some(&(_, shard))) = (first, place) else {
            return Ok(Listener::new(|| false));
        };
        let (link, group) = (self.links[shard].clone(), entries[0].group);
        let (heard, (wanted, mut dropped)) = (Arc::new(AtomicBool::new(false)), oneshot::channel::<()>());
        let told = heard.clone();
        let ask = async move {
            let goes_on = async || loop {
                match await_quorum(&link, group, slice, version).await {
                    Ok(pb::AdvanceResponse { ready: true, .. }) => {
                        return told.store(true, Ordering::Relaxed);
                    }
                    Ok(_) => {}
                    Err(_) => tokio::time::sleep(REJOIN_TIMEOUT).await,
                }
            };
            tokio::select! {
                () = goes_on() => {}
                _ = &mut dropped => {}
            }
        };
        self.driver.spawn(ask);
        self.driver.nudge();
        Ok(Listener::new(move || {
            let _open = &wanted;
            heard.load(Ordering::Relaxed)
        }))
    }

    /// The number of a group, from the map.
    pub(crate) fn group(&self, name: &str, deadline: Instant) -> Result<u32> {
        self.alive()?;
        if let Some(group) = self.map.group(name).or_else(|| self.shared.memberships.group(name)) {
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

/// Joins at all shards, or at none; a member that cannot reach one of them keeps its places.
async fn join_all(
    links: &[Arc<Link>],
    membership: &Membership,
    is_member: bool,
    deadline: Instant,
) -> Result<Joined> {
    let mut first = None;
    for link in links {
        match join_one(link, membership, deadline).await {
            Ok(joined) => first = first.or(Some(joined)),
            Err(error) => {
                // No worker may wait for a worker that has not joined everywhere.
                let joined = links.iter().take_while(|other| !Arc::ptr_eq(other, link) && !is_member);
                for link in joined {
                    give_back(link, membership.group, is_warm(membership.seat.mode), deadline).await;
                }
                return Err(error);
            }
        }
    }
    first.ok_or_else(|| Error::new(Kind::Internal, "a cluster without shards"))
}

/// Joins at one shard. A lost lease is renewed first.
async fn join_one(link: &Link, membership: &Membership, deadline: Instant) -> Result<Joined> {
    loop {
        let client = link.client();
        match ask_for(link, membership.group, &membership.seat, deadline).await {
            Err(error)
                if retry(error.kind) == Retry::Session && Instant::now() + ANSWER_MARGIN < deadline =>
            {
                link.lease_is_lost(client);
                tokio::time::sleep(ANSWER_MARGIN / 4).await;
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
    // A server that cannot be reached finds out when the lease ends.
    let longest = if link.is_connected() { LEAVE_TIMEOUT } else { REJOIN_TIMEOUT };
    if let Err(error) = call(link, deadline.min(after(longest)), ask).await {
        tracing::debug!(shard = link.shard(), %error, "cannot report that a worker leaves its group");
    }
}

/// Waits for a while until a version of a slice goes on without this worker.
async fn await_quorum(
    link: &Link,
    group: u32,
    slice: SliceId,
    base_version: u64,
) -> Result<pb::AdvanceResponse> {
    let ask = |mut control: Control, left: Duration| {
        let wait_ms = LISTEN_FOR.saturating_sub(ANSWER_MARGIN).as_millis() as u32;
        let (client, slice) = (link.client(), Some(slice.0));
        let advance =
            pb::AdvanceRequest { client, group, slice, base_version, wait_ms, ..Default::default() };
        async move { control.advance(request(advance, left)).await }
    };
    call(link, after(LISTEN_FOR), ask).await
}

/// Reports the clock, and waits. The first answer comes at half time, so that the workers behind are known
/// even if the last one is late.
async fn report_clock(
    link: &Link,
    membership: &Membership,
    first: bool,
    deadline: Instant,
) -> Result<pb::AdvanceResponse> {
    let ask = |mut control: Control, left: Duration| {
        let wait = left.saturating_sub(ANSWER_MARGIN).min(if first { left / 2 } else { left });
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let (client, group, warm) = (link.client(), membership.group, is_warm(membership.seat.mode));
        // A restarted server counts from this clock.
        let mut clock = membership.clock;
        change(link, membership, |known| clock = known.clock);
        let advance = pb::AdvanceRequest { client, group, warm, clock, wait_ms, ..Default::default() };
        async move { control.advance(request(advance, left)).await }
    };
    call(link, deadline, ask).await
}
