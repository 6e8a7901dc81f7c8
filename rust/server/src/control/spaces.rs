//! Opens, closes and lists spaces of vectors, and seats their coordinators.

use crate::auth::budget::{Budget, Held, hold};
use crate::auth::caller::{Caller, taken};
use crate::cluster::node::Node;
use crate::cluster::spaces::opened;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::slice::Slice;
use fastps_core::spaces::{Claimant, SeatRequest, SpaceSpec, no_space};
use fastps_core::tensor::{SliceId, Space, SpaceId, check_tensors};
use fastps_durable::{CoordinatorState, Event, SecretHash};
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use prost::Message;
use serde_json::json;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of spaces in one answer, excluding the one that exceeds it.
const MAX_PAGE_BYTES: usize = 1 << 20;

/// A client as a coordinator: its secret proves that it is the same one.
pub(super) fn claimant(client: u64, shown: Option<&SecretHash>) -> Claimant {
    Claimant { client, key: shown.map(SecretHash::bytes).unwrap_or_default() }
}

/// Returns whether a space of shard 0's list is within the scope of the caller.
pub(super) fn is_within(node: &Node, by: &Caller, spec: &SpaceSpec) -> bool {
    let scope = &by.principal.scope;
    let Ok(map) = node.map() else { return false };
    let allows = |tensor: &Arc<str>| scope.allows_space(&spec.space.name, tensor) && map.has(tensor, scope);
    scope.is_everything() || spec.tensors.iter().all(allows)
}

/// Fails unless a space is within the scope of the caller; another one is answered as unknown.
pub(super) fn check_within(node: &Node, by: &Caller, space: SpaceId) -> Result<()> {
    if by.principal.scope.is_everything() {
        return Ok(());
    }
    let spec = node.spaces()?.spec(space)?;
    if is_within(node, by, &spec) { Ok(()) } else { Err(no_space()) }
}

/// Question to shard 0 before another shard opens a space.
pub(super) fn to_open(node: &Node, request: &pb::OpenSpaceRequest) -> Option<pb::SettleRequest> {
    let asks = !node.is_coordinator() && request.space != 0;
    asks.then(|| pb::SettleRequest { describe_space: request.space, ..Default::default() })
}

/// Question to shard 0 before another shard closes a space.
pub(super) fn to_close(node: &Node, request: &pb::CloseSpaceRequest) -> Option<pb::SettleRequest> {
    let asks = !node.is_coordinator();
    asks.then(|| pb::SettleRequest { spaces: vec![request.space], ..Default::default() })
}

/// Frees a space; on other shards than shard 0 only if shard 0's answer `first` no longer lists it. One
/// outside the scope of the caller, as shard 0 or the slices here have it, is ignored like an unknown one.
pub(super) fn close(node: &Node, by: &Caller, space: u64, first: Option<&pb::SettleResponse>) -> Result<()> {
    let within = if node.is_coordinator() {
        check_within(node, by, SpaceId(space)).is_ok()
    } else {
        let slices = node.shard.slices_of_space(SpaceId(space));
        by.principal.scope.is_everything()
            || !slices.is_empty() && slices.iter().all(|slice| by.may_use(slice))
    };
    if !within {
        return Ok(());
    }
    if first.is_some_and(|first| !first.closed_spaces.contains(&space)) {
        let error = Error::new(Kind::Precondition, "shard 0 lists the space: it is closed there first");
        return Err(error.expected("a space that is closed", format!("space {space}")));
    }
    node.close_space(SpaceId(space));
    Ok(())
}

/// Lists the space, if this is shard 0, and opens it on this shard's slices: on all of them or none. Another
/// shard opens the space that shard 0's answer `first` lists.
pub(super) fn open(
    node: &Node,
    by: &Caller,
    request: pb::OpenSpaceRequest,
    first: Option<pb::SettleResponse>,
) -> Result<pb::OpenSpaceResponse> {
    node.sessions.touch(request.client, Instant::now())?;
    let slices = slices_of(node, by, &request)?;
    let is_first = node.is_coordinator();
    if is_first != (request.space == 0) {
        let error = Error::new(Kind::Config, "shard 0 gives spaces their numbers, and the others take them");
        return Err(error.expected(if is_first { "0" } else { "a number of shard 0" }, request.space));
    }
    let (spec, new) = if is_first { list(node, by, request)? } else { (listed(by, request, first)?, false) };
    match open_slices(&slices, &spec.space, by.budget.as_ref()) {
        Ok((term, last, held)) => {
            node.space_table.keep(spec.space.id, held);
            node.files.steps_end_here();
            Ok(pb::OpenSpaceResponse { space: spec.space.id.0, new, term, last })
        }
        Err(error) => {
            if new {
                node.close_space(spec.space.id);
            }
            Err(error)
        }
    }
}

fn shared(names: Vec<String>) -> Vec<Arc<str>> {
    names.into_iter().map(Arc::from).collect()
}

/// Lists a space on shard 0, or finds it.
fn list(node: &Node, by: &Caller, request: pb::OpenSpaceRequest) -> Result<(SpaceSpec, bool)> {
    check_name(node, by, &request)?;
    let (map, scope) = (node.map()?, &by.principal.scope);
    let specs = request.tensors.iter().map(|name| map.spec(name, scope)).collect::<Result<Vec<_>>>()?;
    check_tensors(&specs)?;
    let (name, tensors, vectors) = (request.name.into(), shared(request.tensors), shared(request.vectors));
    let (client, keep_for_ms) = (request.client, request.keep_for_ms);
    let (spec, new) = node.spaces()?.open(client, &name, (&tensors, &vectors), keep_for_ms)?;
    if new {
        node.files.step(|| opened(&spec, client));
    }
    Ok((spec, new))
}

/// Fails if a limited caller may not use the name of a space, or if it names a space outside its scope.
fn check_name(node: &Node, by: &Caller, request: &pb::OpenSpaceRequest) -> Result<()> {
    let (scope, name) = (&by.principal.scope, &request.name);
    if scope.is_everything() {
        return Ok(());
    }
    let spaces = node.spaces()?.list();
    let holder = spaces.iter().find(|(spec, _)| *spec.space.name == **name);
    if !request.tensors.iter().all(|tensor| scope.allows_space(name, tensor)) {
        return Err(by.outside(name));
    }
    if holder.is_none_or(|(spec, _)| is_within(node, by, spec)) { Ok(()) } else { Err(taken(name)) }
}

/// The space of a request, as shard 0 lists it.
fn listed(
    by: &Caller,
    request: pb::OpenSpaceRequest,
    first: Option<pb::SettleResponse>,
) -> Result<SpaceSpec> {
    let absent = || {
        let error = Error::new(Kind::Config, "shard 0 lists no such space: it was closed, or never opened");
        error.expected("the number of an open space", request.space)
    };
    let entry = first.and_then(|first| first.space).filter(|entry| entry.space == request.space);
    let entry = entry.ok_or_else(absent)?;
    let spec = convert::space_from_wire(entry).spec;
    let same = |own: &[Arc<str>], wanted: &[String]| {
        own.len() == wanted.len() && own.iter().zip(wanted).all(|(own, wanted)| **own == **wanted)
    };
    let space = &spec.space;
    if *space.name != *request.name
        || !same(&spec.tensors, &request.tensors)
        || !same(&space.vectors, &request.vectors)
    {
        if !by.principal.scope.is_everything() {
            return Err(absent()); // it may be of others
        }
        let error = Error::new(Kind::Precondition, "shard 0 lists the space with another name, or others");
        let describe = |name: &str, vectors: usize, tensors: usize| {
            format!("space {name:?} of {vectors} vectors over {tensors} tensors")
        };
        let is = describe(&space.name, space.vectors.len(), spec.tensors.len());
        let wanted = describe(&request.name, request.vectors.len(), request.tensors.len());
        return Err(error.expected(is, wanted));
    }
    space.check()?;
    Ok(spec)
}

/// The slices that a request names, which must be of its tensors.
fn slices_of(node: &Node, by: &Caller, request: &pb::OpenSpaceRequest) -> Result<Vec<Arc<Slice>>> {
    let ids = || request.slices.iter().map(|id| SliceId(*id));
    let sealed = node.reservations.admit_all(ids());
    let tensors: HashSet<_> = request.tensors.iter().map(String::as_str).collect();
    let check = |(slice, sealed): (Result<Arc<Slice>>, Result<()>)| {
        let slice = slice?;
        if !by.may_use(&slice) {
            return Err(node.shard.no_slice(slice.id()));
        }
        let name = &slice.spec().name;
        sealed.map_err(|error| error.tensor(name.clone()))?;
        if tensors.contains(&**name) {
            return Ok(slice);
        }
        let error = Error::new(Kind::Config, "the slice is of another tensor").tensor(name.clone());
        Err(error.expected("slices of the tensors", format!("slice {}", slice.id().0)))
    };
    node.shard.slices(ids()).into_iter().zip(sealed).map(check).collect()
}

/// Opens the space on all slices. On an error, closes it where it was just opened. Returns the largest term
/// and program number that they know, and the memory charged to a budget.
fn open_slices(
    slices: &[Arc<Slice>],
    space: &Arc<Space>,
    budget: Option<&Budget>,
) -> Result<(u64, u64, Vec<Held>)> {
    let (mut term, mut last, mut new, mut all) = (0, 0, Vec::new(), Vec::new());
    for slice in slices {
        let was_open = slice.space().is_some_and(|(open, _)| open.id == space.id);
        let bytes = if was_open { 0 } else { slice.bytes() as u64 * space.vectors.len() as u64 };
        let opened = hold(budget, "the space", bytes).and_then(|held| {
            all.extend(held);
            slice.open_space(space)
        });
        match opened {
            Ok(standing) => (term, last) = (standing.term.max(term), standing.number.max(last)),
            Err(error) => {
                for slice in new {
                    Slice::close_space(slice, space.id);
                }
                return Err(error);
            }
        }
        if !was_open {
            new.push(slice);
        }
    }
    Ok((term, last, all))
}

/// One page of the open spaces within the scope of the caller.
pub(super) fn page(node: &Node, by: &Caller, after: &str) -> Result<pb::ListSpacesResponse> {
    let (mut answer, mut bytes) = (pb::ListSpacesResponse::default(), 0);
    let all = node.spaces_after(after)?.into_iter();
    for info in all.filter(|info| is_within(node, by, &info.spec)) {
        if bytes > MAX_PAGE_BYTES {
            answer.next = answer.spaces.last().map_or_else(String::new, |last| last.name.clone());
            break;
        }
        let entry = convert::space_to_wire(&info);
        bytes += entry.encoded_len();
        answer.spaces.push(entry);
    }
    Ok(answer)
}

/// Carries out a coordinator's request about its seat.
pub(super) fn coordinate(
    node: &Node,
    by: &Caller,
    request: pb::CoordinateRequest,
) -> Result<pb::CoordinateResponse> {
    let (client, space) = (request.client, SpaceId(request.space));
    let request = convert::seat_request_from_wire(request)?;
    node.sessions.touch(client, Instant::now())?;
    check_within(node, by, space)?;
    let seat = node.spaces()?.coordinate(claimant(client, by.secret.as_ref()), space, &request)?;
    match &request {
        SeatRequest::Take { name, .. } => {
            let (space, term, holder) = (space.0, seat.term, name.clone());
            let key = by.secret;
            if term > 1 {
                node.audit_often(
                    by,
                    "space taken over",
                    json!({"space": space, "term": term, "holder": name}),
                );
            }
            node.files.step(|| Event::SeatTaken { space, term, holder, client, key });
        }
        SeatRequest::Store { state, .. } => {
            node.files.step(|| Event::StateStored(space.0, CoordinatorState::new(state)));
        }
        SeatRequest::Leave { .. } => {
            if node.spaces()?.is_vacant(space) {
                node.files.step(|| Event::SeatLeft(space.0));
            }
        }
    }
    let takes = matches!(request, SeatRequest::Take { .. });
    let state = if takes { seat.state.to_vec() } else { Vec::new() };
    Ok(pb::CoordinateResponse { term: seat.term, state: state.into() })
}
