//! Places in groups of workers.

use crate::cluster::node::Node;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::mode::{Joined, PlaceRequest};
use fastps_durable::{Event, Member};
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use std::time::Instant;

/// Gives a client a place, and logs that. `told` is the answer of shard 0, if it was asked.
pub(super) fn join(
    node: &Node,
    m: pb::JoinRequest,
    told: Result<Option<pb::SettleResponse>>,
) -> Result<pb::JoinResponse> {
    let pb::JoinRequest { client, group, mode, rank, name } = m;
    let is_new = !node.shard.groups().has_place(group, client);
    let joined = convert::seat_from_wire(mode, rank, name.clone()).and_then(|seat| {
        let told = if is_new { told? } else { None };
        take(node, (group, client), is_new, &seat, told).map(|joined| (seat, joined))
    });
    let (shard, of) = (node.index(), node.sessions.name(client));
    match joined {
        Ok((seat, joined)) => {
            if is_new {
                tracing::info!(shard, group, name, client = of, mode = %seat.mode, "a worker joined its group");
            }
            let member = Member { client, group, seat };
            node.files.note(|| Event::Joined(member, node.shard.groups().is_complete(group)));
            let Joined { clock, present, workers } = joined;
            Ok(pb::JoinResponse { clock, workers, present })
        }
        Err(error) => {
            tracing::warn!(shard, group, name, client = of, %error, "a worker is refused");
            Err(error)
        }
    }
}

fn take(
    node: &Node,
    (group, client): (u32, u64),
    is_new: bool,
    seat: &PlaceRequest,
    told: Option<pb::SettleResponse>,
) -> Result<Joined> {
    node.sessions.touch(client, Instant::now())?;
    if is_new {
        let has_tensors =
            node.has_group(group) || told.is_some_and(|told| told.groups.contains(&group));
        has_tensors.then_some(()).ok_or_else(|| no_group(group))?;
    }
    node.shard.groups().join(group, client, seat.clone(), node.shard.meter())
}

fn no_group(group: u32) -> Error {
    let error = Error::new(Kind::UnknownTensor, "the group has no tensors");
    error.expected("the number of a group in the map", group)
}
