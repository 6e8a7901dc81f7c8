//! The steps of a registration and of its end. Shard 0 reserves a place, each shard reserves and seals memory
//! for its slices, and shard 0 commits; a shard that does not know a reservation asks shard 0 first. A call
//! takes the step for one tensor or for several.

use crate::auth::caller::{Caller, taken};
use crate::cluster::map::{Map, Registered};
use crate::cluster::node::Node;
use crate::cluster::reservation::{MAX_ASKED_RESERVATIONS, Reserve, lost};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_proto::v1 as pb;
use fastps_transport::convert::{
    self, MAX_REGISTERED, MAX_REGISTERED_BYTES, MAX_RESERVATIONS, registered_bytes,
};
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

/// Reserves places in the map. Returns the position of the log up to which it must be durable.
pub(super) fn register(
    node: &Node,
    by: &Caller,
    m: &pb::RegisterRequest,
) -> Result<(pb::RegisterResponse, u64)> {
    let mut map = node.map()?;
    let specs = specs(m)?;
    let scope = &by.principal.scope;
    for spec in &specs {
        if !scope.allows(&spec.name, &spec.group) {
            return Err(by.outside(&spec.name));
        }
        if map.hides(&spec.name, scope) {
            return Err(taken(&spec.name));
        }
    }
    let now = Instant::now();
    node.sessions.touch(m.client, now)?;
    let registered = map.register_all(&specs, m.client, by.budget.as_ref(), now)?;
    let noted = map.noted();
    std::mem::drop(map);
    reach("registration_placed");
    let mut outcomes = Vec::with_capacity(specs.len());
    for (spec, registered) in specs.iter().zip(registered) {
        let outcome = outcome(registered);
        if outcome.reservation != 0 {
            node.audit_often(by, "register", json!({"tensor": spec.name, "group": spec.group}));
        }
        outcomes.push(outcome);
    }
    let answer = if m.specs.is_empty() {
        outcomes.pop().unwrap_or_default()
    } else {
        pb::RegisterResponse { outcomes, ..Default::default() }
    };
    Ok((answer, noted))
}

/// The specifications of a first step: one, or several of different names.
fn specs(m: &pb::RegisterRequest) -> Result<Vec<TensorSpec>> {
    if m.specs.is_empty() {
        return Ok(vec![convert::spec_from_wire(m.spec.as_ref())?]);
    }
    if m.spec.is_some() {
        return Err(both("spec", "specs"));
    }
    check_count(m.specs.len(), MAX_REGISTERED)?;
    let (mut specs, mut bytes, mut names) = (Vec::with_capacity(m.specs.len()), 0, HashSet::new());
    for wire in &m.specs {
        let spec = convert::spec_from_wire(Some(wire))?;
        bytes += registered_bytes(wire, spec.slice_count());
        if !names.insert(spec.name.clone()) {
            return Err(Error::new(Kind::Config, "a tensor is named twice in one call").tensor(spec.name));
        }
        if bytes > MAX_REGISTERED_BYTES {
            return Err(Error::new(Kind::Config, "the tensors of one call have too many slices")
                .tensor(spec.name)
                .expected(
                    format!("at most {MAX_REGISTERED_BYTES} bytes of specifications and places"),
                    bytes,
                ));
        }
        specs.push(spec);
    }
    Ok(specs)
}

fn outcome(registered: Registered) -> pb::RegisterResponse {
    let empty = pb::RegisterResponse::default();
    match registered {
        Registered::Exists(placement) => {
            pb::RegisterResponse { exists: true, placement: Some(placement), ..empty }
        }
        Registered::UnderWay { retry_after_ms } => {
            pb::RegisterResponse { under_way: true, retry_after_ms, ..empty }
        }
        Registered::Reserved { reservation, placement } => {
            pb::RegisterResponse { reservation, placement: Some(placement), ..empty }
        }
    }
}

/// The error of a call that names one tensor in one field and several in another.
fn both(one: &str, several: &str) -> Error {
    Error::new(Kind::Config, format!("a call has both {one} and {several}"))
        .expected("one of the two fields", "both")
}

fn check_count(count: usize, most: usize) -> Result<()> {
    if count <= most {
        return Ok(());
    }
    Err(Error::new(Kind::Config, "one call names too many tensors")
        .expected(format!("at most {most}"), count))
}

/// The reservations of a second step.
fn reservations(m: pb::ReserveRequest) -> Result<Vec<pb::Reservation>> {
    let pb::ReserveRequest { reservation, spec, slices, indices, group, client: _, reservations } = m;
    if reservations.is_empty() {
        return Ok(vec![pb::Reservation { reservation, spec, slices, indices, group }]);
    }
    if reservation != 0 || spec.is_some() || !slices.is_empty() || !indices.is_empty() || group != 0 {
        return Err(both("reservation", "reservations"));
    }
    check_count(reservations.len(), MAX_REGISTERED)?;
    Ok(reservations)
}

/// The reservations of a third or last step.
fn numbers(reservation: u64, reservations: Vec<u64>) -> Result<Vec<u64>> {
    if reservations.is_empty() {
        return Ok(vec![reservation]);
    }
    if reservation != 0 {
        return Err(both("reservation", "reservations"));
    }
    check_count(reservations.len(), MAX_RESERVATIONS)?;
    Ok(reservations)
}

/// Question to shard 0 about unknown reservations.
pub(super) fn to_reserve(node: &Node, m: &pb::ReserveRequest) -> Option<pb::SettleRequest> {
    let is_new = |reservation: &u64| !node.reservations.knows(*reservation);
    if m.reservations.is_empty() {
        let describe = Some(m.reservation).filter(is_new)?;
        return Some(pb::SettleRequest { describe, ..Default::default() });
    }
    let several = m.reservations.iter().take(MAX_REGISTERED).map(|one| one.reservation);
    let describe_each: Vec<_> = several.filter(is_new).collect();
    let asks = !describe_each.is_empty();
    asks.then(|| pb::SettleRequest { describe_each, ..Default::default() })
}

/// Shard 0's answer about reservations that the shard does not know.
pub(super) struct Described {
    /// The registration, if one was asked for.
    one: Option<pb::Registration>,
    each: HashMap<u64, pb::Registration>,
    /// Why a registration is not here.
    why: Option<Error>,
}

impl Described {
    /// The answer, if shard 0 was asked; `asked` are the reservations, if it was asked for several.
    pub(super) fn new(asked: &[u64], answer: Result<Option<pb::SettleResponse>>) -> Self {
        let (answer, mut why) = match answer {
            Ok(answer) => (answer.unwrap_or_default(), None),
            Err(error) => (pb::SettleResponse::default(), Some(error)),
        };
        let described = answer.registrations.len();
        if described < asked.len() && why.is_none() {
            let error =
                Error::new(Kind::Config, "one call reserves more than shard 0 describes in one answer");
            why = Some(error.expected(format!("at most {described} tensors"), asked.len()));
        }
        let each = asked.iter().copied().zip(answer.registrations).collect();
        Self { one: answer.registration, each, why }
    }

    /// Takes out the registration of a reservation; `None`: it is not under way.
    fn take(&mut self, reservation: u64) -> Result<Option<pb::Registration>> {
        match self.each.remove(&reservation).or_else(|| self.one.take()) {
            None => self.why.clone().map_or(Ok(None), Err),
            registration => Ok(registration),
        }
    }
}

/// Reserves memory for slices of this shard, up to the first reservation that is refused.
pub(super) fn reserve(
    node: &Node,
    by: &Caller,
    m: pb::ReserveRequest,
    mut first: Described,
) -> Result<pb::ReserveResponse> {
    let (client, is_one) = (m.client, m.reservations.is_empty());
    let reservations = reservations(m)?;
    let lease_ms = node.reservations.lease().as_millis() as u32;
    let mut answer = pb::ReserveResponse { lease_ms, ..Default::default() };
    for one in reservations {
        let number = one.reservation;
        if !reserve_one(node, by, client, one, &mut first)? {
            answer.sealed.push(number);
        }
    }
    if is_one && answer.sealed.pop().is_some() {
        answer.lease_ms = 0;
    }
    Ok(answer)
}

/// Returns false if the reservation is sealed already.
fn reserve_one(
    node: &Node,
    by: &Caller,
    client: u64,
    one: pb::Reservation,
    first: &mut Described,
) -> Result<bool> {
    let spec = Arc::new(convert::spec_from_wire(one.spec.as_ref())?);
    if !by.principal.scope.allows(&spec.name, &spec.group) {
        return Err(by.outside(&spec.name));
    }
    if one.slices.len() != one.indices.len() {
        return Err(Error::new(Kind::Config, "a reservation needs one index per slice")
            .tensor(spec.name.clone())
            .expected(one.slices.len(), one.indices.len()));
    }
    let now = Instant::now();
    node.sessions.touch(client, now)?;
    let pairs = one.slices.iter().zip(&one.indices);
    let wish = Reserve {
        reservation: one.reservation,
        client,
        spec,
        group: one.group,
        budget: by.budget.clone(),
        slices: pairs.map(|(id, index)| (SliceId(*id), *index as usize)).collect(),
    };
    let named = |error: Error| match error.tensor {
        Some(_) => error,
        None => error.tensor(wish.spec.name.clone()),
    };
    if !node.reservations.knows(one.reservation) {
        let registration = first.take(one.reservation)?;
        wish.check_registered(registration, node.index()).map_err(named)?;
    }
    let open = node.reservations.reserve(&node.shard, &wish, now).map_err(named)?;
    reach("registration_reserved");
    Ok(open)
}

/// The refusal of one of several reservations.
fn refused(node: &Node, reservation: u64, error: Error) -> pb::RefusedReservation {
    let refusal = Some(convert::refusal(&node.sign(error)));
    pb::RefusedReservation { reservation, refusal }
}

/// Closes reservations once all their values have arrived, up to the first that is refused.
pub(super) fn seal(node: &Node, by: &Caller, m: pb::SealRequest) -> Result<pb::SealResponse> {
    let is_one = m.reservations.is_empty();
    for number in numbers(m.reservation, m.reservations)? {
        match seal_one(node, by, number) {
            Ok(()) => {}
            Err(error) if is_one => return Err(error),
            Err(error) => return Ok(pb::SealResponse { refused: Some(refused(node, number, error)) }),
        }
    }
    Ok(pb::SealResponse::default())
}

fn seal_one(node: &Node, by: &Caller, reservation: u64) -> Result<()> {
    let slice = node.reservations.first_slice(reservation).and_then(|slice| node.shard.slice(slice).ok());
    if slice.is_some_and(|slice| !by.may_use(&slice)) {
        return Err(lost(reservation));
    }
    node.reservations.seal(reservation, Instant::now())?;
    reach("registration_sealed");
    Ok(())
}

/// Enters the tensors of sealed reservations in the map: of all, or of none.
pub(super) fn commit(node: &Node, by: &Caller, m: pb::CommitRequest) -> Result<pb::CommitResponse> {
    let (client, is_one) = (m.client, m.reservations.is_empty());
    let numbers = numbers(m.reservation, m.reservations)?;
    let mut map = node.map()?;
    node.sessions.touch(client, Instant::now())?;
    for number in &numbers {
        match check_commit(node, by, &map, *number, client) {
            Ok(()) => {}
            Err(error) if is_one => return Err(error),
            Err(error) => return Ok(pb::CommitResponse { refused: Some(refused(node, *number, error)) }),
        }
    }
    for number in numbers {
        map.commit(number, client)?;
        reach("registration_committed");
    }
    Ok(pb::CommitResponse::default())
}

fn check_commit(node: &Node, by: &Caller, map: &Map, reservation: u64, client: u64) -> Result<()> {
    if map.hides_reservation(reservation, &by.principal.scope) {
        return Err(lost(reservation));
    }
    let own = map.pending_on(reservation, node.index());
    if own.iter().any(|slice| !node.reservations.is_sealed(*slice, reservation)) {
        return Err(Error::new(Kind::Precondition, "the reservation is not sealed"));
    }
    map.check_commit(reservation, client).map(std::mem::drop)
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
