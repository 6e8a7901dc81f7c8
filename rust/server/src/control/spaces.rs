//! Opens, closes and lists spaces of vectors, and seats their coordinators.

use crate::cluster::node::Node;
use crate::cluster::spaces::opened;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::slice::Slice;
use fastps_core::spaces::{SeatRequest, SpaceSpec};
use fastps_core::tensor::{SliceId, Space, SpaceId, check_tensors};
use fastps_durable::{CoordinatorState, Event};
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use prost::Message;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of spaces in one answer, but for the one that goes over it.
const MAX_PAGE_BYTES: usize = 1 << 20;

/// Lists the space, if this is shard 0, and opens it on this shard's slices: on all of them or none.
pub(super) fn open(node: &Node, request: pb::OpenSpaceRequest) -> Result<pb::OpenSpaceResponse> {
    node.sessions.touch(request.client, Instant::now())?;
    let slices = slices_of(node, &request)?;
    let is_first = node.map.is_some();
    if is_first != (request.space == 0) {
        let error = Error::new(Kind::Config, "shard 0 gives spaces their numbers, and the others take them");
        return Err(error.expected(if is_first { "0" } else { "a number of shard 0" }, request.space));
    }
    let (spec, new) = if is_first { list(node, request)? } else { (told(request)?, false) };
    match open_slices(&slices, &spec.space) {
        Ok((term, last)) => {
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
fn list(node: &Node, request: pb::OpenSpaceRequest) -> Result<(SpaceSpec, bool)> {
    let map = node.map()?;
    let specs = request.tensors.iter().map(|name| map.spec(name)).collect::<Result<Vec<_>>>()?;
    check_tensors(&specs)?;
    let (name, tensors, vectors) = (request.name.into(), shared(request.tensors), shared(request.vectors));
    let (spec, new) = node.spaces()?.open(&name, &tensors, &vectors, request.keep_for_ms)?;
    if new {
        node.files.step(|| opened(&spec));
    }
    Ok((spec, new))
}

/// A space that shard 0 lists.
fn told(request: pb::OpenSpaceRequest) -> Result<SpaceSpec> {
    let pb::OpenSpaceRequest { name, tensors, vectors, keep_for_ms, space, .. } = request;
    let space = Space { id: SpaceId(space), name: name.into(), vectors: shared(vectors) };
    space.check()?;
    Ok(SpaceSpec { space: Arc::new(space), tensors: shared(tensors), keep_for_ms })
}

/// The slices that a request names, which must be of its tensors.
fn slices_of(node: &Node, request: &pb::OpenSpaceRequest) -> Result<Vec<Arc<Slice>>> {
    let ids = || request.slices.iter().map(|id| SliceId(*id));
    let sealed = node.reservations.admit_all(ids());
    let check = |(slice, sealed): (Result<Arc<Slice>>, Result<()>)| {
        let slice = slice?;
        let name = &slice.spec().name;
        sealed.map_err(|error| error.tensor(name.clone()))?;
        if request.tensors.iter().any(|tensor| **tensor == **name) {
            return Ok(slice);
        }
        let error = Error::new(Kind::Config, "the slice is of none of the tensors").tensor(name.clone());
        Err(error.expected("slices of the tensors", format!("slice {}", slice.id().0)))
    };
    node.shard.slices(ids()).into_iter().zip(sealed).map(check).collect()
}

/// Opens the space on all slices. On an error, those that have just opened it close it. Returns the largest
/// term and number of a program that they know.
fn open_slices(slices: &[Arc<Slice>], space: &Arc<Space>) -> Result<(u64, u64)> {
    let (mut term, mut last, mut new) = (0, 0, Vec::new());
    for slice in slices {
        let was_open = slice.space().is_some_and(|(open, _)| open.id == space.id);
        match slice.open_space(space) {
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
    Ok((term, last))
}

/// One page of the open spaces.
pub(super) fn page(node: &Node, after: &str) -> Result<pb::ListSpacesResponse> {
    let (mut answer, mut bytes) = (pb::ListSpacesResponse::default(), 0);
    for info in node.spaces_after(after)? {
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

/// Carries out what a coordinator wants of its seat.
pub(super) fn coordinate(node: &Node, request: pb::CoordinateRequest) -> Result<pb::CoordinateResponse> {
    let (client, space) = (request.client, SpaceId(request.space));
    let request = convert::seat_request_from_wire(request)?;
    node.sessions.touch(client, Instant::now())?;
    let seat = node.spaces()?.coordinate(client, space, &request)?;
    match &request {
        SeatRequest::Take { name, .. } => {
            let (space, term, holder) = (space.0, seat.term, name.clone());
            node.files.step(|| Event::SeatTaken { space, term, holder });
        }
        SeatRequest::Store { state, .. } => {
            node.files.step(|| Event::StateStored(space.0, CoordinatorState::new(state)));
        }
        SeatRequest::Leave { .. } => {}
    }
    let takes = matches!(request, SeatRequest::Take { .. });
    let state = if takes { seat.state.to_vec() } else { Vec::new() };
    Ok(pb::CoordinateResponse { term: seat.term, state: state.into() })
}
