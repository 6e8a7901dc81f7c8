//! Takes a client's places in groups again when a connection begins.

use crate::link::state::Link;
use crate::link::unary::{Control, call, request};
use crate::state::places::{Place, is_warm};
use crate::state::time::after;
use fastps_core::error::Result;
use fastps_core::mode::{Joined, PlaceRequest};
use fastps_proto::v1 as pb;
use fastps_transport::convert::mode_to_wire;
use std::time::{Duration, Instant};

/// Limit on a request for a place when a connection begins, and on leaving without one.
pub(crate) const REJOIN_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) async fn ask_for(
    link: &Link,
    group: u32,
    seat: &PlaceRequest,
    deadline: Instant,
) -> Result<Joined> {
    let ask = |mut control: Control, left| {
        let mode = Some(mode_to_wire(seat.mode));
        let join =
            pb::JoinRequest { client: link.client(), group, mode, rank: seat.rank, name: seat.name.clone() };
        async move { control.join(request(join, left)).await }
    };
    let pb::JoinResponse { clock, workers, present } = call(link, deadline, ask).await?;
    Ok(Joined { clock, present, workers })
}

/// Takes the client's places again, in case the server has forgotten them. After a refusal, pushes fail. Lost
/// places are left to the worker, which rejoins when it continues: until then no worker waits for it.
pub(crate) async fn rejoin(link: &Link) {
    let deadline = after(REJOIN_TIMEOUT);
    for place in link.shared.places.held_at(link.shard()) {
        match ask_for(link, place.group, &place.seat, deadline).await {
            Ok(joined) => change(link, &place, |known| known.rejoined(joined.clock)),
            Err(error) => tracing::warn!(shard = link.shard(), %error, "the worker's place is taken"),
        }
    }
}

/// Changes a place whose clock shard 0 keeps.
pub(crate) fn change(link: &Link, place: &Place, change: impl FnMut(&mut Place)) {
    if link.shard() == 0 {
        link.shared.places.change(place.group, is_warm(place.seat.mode), change);
    }
}
