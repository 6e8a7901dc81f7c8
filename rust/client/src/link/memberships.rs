//! Joins a client's groups again when a connection begins.

use crate::link::state::Link;
use crate::link::unary::{Control, call, request};
use crate::state::memberships::{Membership, is_warm};
use crate::state::time::after;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::mode::{Joined, MembershipRequest, Mode};
use fastps_proto::v1 as pb;
use fastps_transport::convert::membership_to_wire;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Limit on a request to join when a connection begins, and on leaving without one.
pub(crate) const REJOIN_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) async fn ask_for(
    link: &Link,
    group: u32,
    seat: &MembershipRequest,
    deadline: Instant,
) -> Result<Joined> {
    check_rounds(link, seat.mode)?;
    let ask = |mut control: Control, left| {
        let join = membership_to_wire(link.client(), group, seat);
        async move { control.join(request(join, left)).await }
    };
    let pb::JoinResponse { clock, workers, present } = call(link, deadline, ask).await?;
    Ok(Joined { clock, present, workers })
}

/// Fails if the server does not know the mode's settings: it would make other versions.
fn check_rounds(link: &Link, mode: Mode) -> Result<()> {
    let Mode::Sync(quorum) = mode else { return Ok(()) };
    let is_new = quorum.weighted || quorum.enough > 0 || quorum.every > 0 || quorum.robust.is_some();
    if !is_new || link.rounds.load(Ordering::Relaxed) {
        return Ok(());
    }
    let why =
        format!("the server {} is of an earlier version, which does not know this mode", link.address());
    Err(Error::new(Kind::Precondition, why)
        .shard(link.shard())
        .expected(mode, "Sync(workers=..., backup=...)"))
}

/// Joins the client's groups again, in case the server has forgotten its memberships. After a refusal, pushes
/// fail. Lost memberships are left to the worker, which rejoins when it continues: until then no worker waits
/// for it.
pub(crate) async fn rejoin(link: &Link) {
    let deadline = after(REJOIN_TIMEOUT);
    for membership in link.shared.memberships.held_at(link.shard()) {
        match ask_for(link, membership.group, &membership.seat, deadline).await {
            Ok(joined) => change(link, &membership, |known| known.rejoined(joined.clock)),
            Err(error) => tracing::warn!(shard = link.shard(), %error, "the worker's place is taken"),
        }
    }
}

/// Changes a membership whose clock shard 0 keeps.
pub(crate) fn change(link: &Link, membership: &Membership, change: impl FnMut(&mut Membership)) {
    if link.shard() == 0 {
        link.shared.memberships.change(membership.group, is_warm(membership.seat.mode), change);
    }
}
