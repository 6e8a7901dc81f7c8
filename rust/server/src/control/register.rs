//! The steps of a registration and of its end. Shard 0 reserves a place, each shard reserves and seals memory
//! for its slices, and shard 0 commits; a shard that does not know a reservation asks shard 0 first.

use crate::auth::caller::{Caller, taken};
use crate::cluster::map::Registered;
use crate::cluster::node::Node;
use crate::cluster::reservation::{MAX_ASKED_RESERVATIONS, Reserve, lost};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

/// Reserves a place in the map. Returns the position of the log up to which it must be durable.
pub(super) fn register(
    node: &Node,
    by: &Caller,
    m: &pb::RegisterRequest,
) -> Result<(pb::RegisterResponse, u64)> {
    let mut map = node.map()?;
    let spec = convert::spec_from_wire(m.spec.as_ref())?;
    let scope = &by.principal.scope;
    if !scope.allows(&spec.name, &spec.group) {
        return Err(by.outside(&spec.name));
    }
    if map.hides(&spec.name, scope) {
        return Err(taken(&spec.name));
    }
    let now = Instant::now();
    node.sessions.touch(m.client, now)?;
    let empty = pb::RegisterResponse::default();
    let registered = match map.register(&spec, m.client, by.budget.as_ref(), now)? {
        Registered::Exists(placement) => {
            pb::RegisterResponse { exists: true, placement: Some(placement), ..empty }
        }
        Registered::UnderWay { retry_after_ms } => {
            pb::RegisterResponse { under_way: true, retry_after_ms, ..empty }
        }
        Registered::Reserved { reservation, placement } => {
            pb::RegisterResponse { reservation, placement: Some(placement), ..empty }
        }
    };
    let noted = map.noted();
    std::mem::drop(map);
    if registered.reservation != 0 {
        node.audit_often(by, "register", json!({"tensor": spec.name, "group": spec.group}));
    }
    Ok((registered, noted))
}

/// Question to shard 0 about an unknown reservation.
pub(super) fn to_reserve(node: &Node, m: &pb::ReserveRequest) -> Option<pb::SettleRequest> {
    let is_new = !node.reservations.knows(m.reservation);
    is_new.then(|| pb::SettleRequest { describe: m.reservation, ..Default::default() })
}

/// Reserves memory for slices of this shard. `first` is shard 0's answer, if it was asked.
pub(super) fn reserve(
    node: &Node,
    by: &Caller,
    m: &pb::ReserveRequest,
    first: Result<Option<pb::SettleResponse>>,
) -> Result<pb::ReserveResponse> {
    let spec = Arc::new(convert::spec_from_wire(m.spec.as_ref())?);
    if !by.principal.scope.allows(&spec.name, &spec.group) {
        return Err(by.outside(&spec.name));
    }
    if m.slices.len() != m.indices.len() {
        return Err(Error::new(Kind::Config, "a reservation needs one index per slice")
            .tensor(spec.name.clone())
            .expected(m.slices.len(), m.indices.len()));
    }
    let now = Instant::now();
    node.sessions.touch(m.client, now)?;
    let pairs = m.slices.iter().zip(&m.indices);
    let wish = Reserve {
        reservation: m.reservation,
        client: m.client,
        spec,
        group: m.group,
        budget: by.budget.clone(),
        slices: pairs.map(|(id, index)| (SliceId(*id), *index as usize)).collect(),
    };
    if !node.reservations.knows(m.reservation) {
        let registration = first?.and_then(|first| first.registration);
        wish.check_registered(registration, node.index())?;
    }
    let open = node.reservations.reserve(&node.shard, &wish, now)?;
    let lease_ms = if open { node.reservations.lease().as_millis() as u32 } else { 0 };
    Ok(pb::ReserveResponse { lease_ms })
}

/// Closes a reservation once all its values have arrived.
pub(super) fn seal(node: &Node, by: &Caller, m: pb::SealRequest) -> Result<pb::SealResponse> {
    let slice = node.reservations.first_slice(m.reservation).and_then(|slice| node.shard.slice(slice).ok());
    if slice.is_some_and(|slice| !by.may_use(&slice)) {
        return Err(lost(m.reservation));
    }
    node.reservations.seal(m.reservation, Instant::now())?;
    Ok(pb::SealResponse {})
}

/// Enters the tensor of a sealed reservation in the map.
pub(super) fn commit(node: &Node, by: &Caller, m: &pb::CommitRequest) -> Result<pb::CommitResponse> {
    let mut map = node.map()?;
    node.sessions.touch(m.client, Instant::now())?;
    if map.hides_reservation(m.reservation, &by.principal.scope) {
        return Err(lost(m.reservation));
    }
    let own = map.pending_on(m.reservation, node.index());
    if own.iter().any(|slice| !node.reservations.is_sealed(*slice, m.reservation)) {
        return Err(Error::new(Kind::Precondition, "the reservation is not sealed"));
    }
    map.commit(m.reservation, m.client)?;
    Ok(pb::CommitResponse {})
}

/// Removes a tensor from the map; its slices are dropped by `drop`.
pub(super) fn unregister(
    node: &Node,
    by: &Caller,
    m: &pb::UnregisterRequest,
) -> Result<pb::UnregisterResponse> {
    let scope = &by.principal.scope;
    if !node.map()?.hides(&m.name, scope) {
        node.check_no_space(&m.name)?;
    }
    let placement = node.map()?.unregister(&m.name, Instant::now(), scope)?;
    node.audit_often(by, "unregister", json!({"tensor": m.name}));
    Ok(pb::UnregisterResponse { placement: Some(placement) })
}

/// Returns whether a caller may free a slice. Unknown ones pass, and are ignored.
pub(super) fn may_drop(node: &Node, by: &Caller, slice: u64) -> bool {
    node.shard.slice(SliceId(slice)).map_or(true, |slice| by.may_use(&slice))
}

/// Question to shard 0 about the sealed reservations of slices to be dropped.
pub(super) fn to_drop(node: &Node, m: &pb::DropRequest) -> Option<pb::SettleRequest> {
    let sealed = node.reservations.sealed_of(&m.slices);
    (!sealed.is_empty() && sealed.len() <= MAX_ASKED_RESERVATIONS).then(|| pb::SettleRequest {
        reservations: sealed.iter().copied().collect(),
        abandon: true,
        ..Default::default()
    })
}

/// Drops slices. `first` is shard 0's answer, if it was asked.
pub(super) fn drop(
    node: &Node,
    by: &Caller,
    m: pb::DropRequest,
    first: Result<Option<pb::SettleResponse>>,
) -> Result<pb::DropResponse> {
    node.check_dropped(&m.slices, first)?;
    if let Ok(mut map) = node.map() {
        map.abandon(&m.slices, &by.principal.scope);
    }
    let slices: Vec<_> = m.slices.into_iter().map(SliceId).collect();
    let here = slices.iter().filter(|slice| node.shard.slice(**slice).is_ok()).count();
    node.reservations.drop_slices(&node.shard, &slices);
    if here > 0 {
        node.audit_often(by, "drop", json!({"slices": here}));
    }
    Ok(pb::DropResponse {})
}
