//! Memberships in groups of workers. The first one at shard 0 decides on the mode of a group; the other
//! shards follow.

use crate::auth::caller::Caller;
use crate::cluster::node::Node;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use fastps_core::mode::{Joined, MembershipRequest, Mode};
use fastps_durable::{Event, Member};
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use std::time::Instant;

/// Retry delay of a client that came before shard 0 was asked, or whose place in the group others occupy.
const RETRY_MS: u64 = 200;

/// Returns whether the client has no such membership yet.
pub(super) fn is_new(node: &Node, m: &pb::JoinRequest) -> bool {
    let warm = m.mode.is_some_and(|mode| mode.kind() == pb::ModeKind::ModeWarmStart);
    !node.shard.groups().is_member_of(m.group, m.client, warm)
}

/// Gives a client a membership, and logs it. `first` is shard 0's answer, if it was asked.
pub(super) fn join(
    node: &Node,
    by: &Caller,
    m: pb::JoinRequest,
    first: Result<Option<pb::SettleResponse>>,
) -> Result<pb::JoinResponse> {
    let is_new = is_new(node, &m);
    let (client, group, name) = (m.client, m.group, m.name.clone());
    let joined = convert::membership_from_wire(m).and_then(|seat| {
        let first = if is_new { first? } else { None };
        check_scope(node, by, group, first.as_ref())?;
        take(node, (group, client), is_new, &seat, first).map(|joined| (seat, joined))
    });
    let (shard, of) = (node.index(), node.sessions.name(client));
    match joined {
        Ok((seat, joined)) => {
            if is_new {
                tracing::info!(shard, group, worker = name, client = of, mode = %seat.mode, "a worker joined its group");
            }
            let member = Member { client, group, seat };
            node.files.note(|| Event::Joined(member, node.shard.groups().is_complete(group)));
            let Joined { clock, present, workers } = joined;
            Ok(pb::JoinResponse { clock, workers, present })
        }
        Err(error) => {
            tracing::warn!(shard, group, worker = name, client = of, %error, "a worker is refused");
            Err(error)
        }
    }
}

/// Fails unless the group is within the scope of the caller; another one is answered as unknown. Shard 0
/// names a group of which no slice is here.
fn check_scope(node: &Node, by: &Caller, group: u32, first: Option<&pb::SettleResponse>) -> Result<()> {
    let scope = &by.principal.scope;
    if scope.is_everything() {
        return Ok(());
    }
    let listed = first.and_then(|first| first.binding.as_ref()).map(|binding| binding.group.as_str());
    let name = node.group_name(group);
    let name = name.as_deref().or(listed);
    name.filter(|name| scope.allows_group(name)).map(|_| ()).ok_or_else(|| no_group(group))
}

fn take(
    node: &Node,
    (group, client): (u32, u64),
    is_new: bool,
    seat: &MembershipRequest,
    first: Option<pb::SettleResponse>,
) -> Result<Joined> {
    let now = Instant::now();
    node.sessions.touch(client, now)?;
    if is_new {
        seat.check_new_name()?;
        let is_known = node.has_group(group)
            || node.shard.groups().is_member(group, client)
            || first.as_ref().is_some_and(|first| first.groups.contains(&group));
        is_known.then_some(()).ok_or_else(|| no_group(group))?;
        if let Some(first) = first {
            check_first(&first, seat.mode)?;
        }
        check_free(node, (group, client), seat, now)?;
    }
    node.shard.join(group, client, seat)
}

/// Fails unless the group has this mode at shard 0. An older shard 0 omits it. A warm start binds no client.
fn check_first(first: &pb::SettleResponse, mode: Mode) -> Result<()> {
    let Some(binding) = &first.binding else { return Ok(()) };
    let asked = convert::mode_to_wire(mode);
    match &binding.mode {
        _ if matches!(mode, Mode::WarmStart { .. }) => Ok(()),
        Some(bound) if *bound == asked => Ok(()),
        Some(bound) => {
            let bound = convert::mode_from_wire(Some(*bound))?;
            let why = "the group's workers use another mode at shard 0, which decides";
            Err(Error::new(Kind::Precondition, why).expected(bound, mode))
        }
        None => {
            let why = "the group has no workers at shard 0, which decides on its mode";
            let error = Error::new(Kind::Unavailable, why).expected("a Join at shard 0 first", mode);
            Err(error.retry_after_ms(RETRY_MS))
        }
    }
}

/// Fails if the membership would bind a client that pushes gradients without one: `Sync` refuses them. A
/// retry may succeed, since a client that stops pushing is free.
fn check_free(
    node: &Node,
    (group, client): (u32, u64),
    seat: &MembershipRequest,
    now: Instant,
) -> Result<()> {
    let groups = node.shard.groups();
    if !matches!(seat.mode, Mode::Sync(_)) || groups.mode(group).is_some() || fault("free_pusher_bound") {
        return Ok(());
    }
    let Some(name) = node.sessions.free_pusher(group, client, now) else { return Ok(()) };
    let why = format!(
        "client {name:?} pushes gradients to the group without a place, until it ends or pushes none for a lease"
    );
    let error = Error::new(Kind::Unavailable, why).expected(Mode::Free, seat.mode);
    Err(error.retry_after_ms(RETRY_MS))
}

fn no_group(group: u32) -> Error {
    let error = Error::new(Kind::UnknownTensor, "the group has no tensors");
    error.expected("the number of a group in the map", group)
}
