//! Spaces of vectors in control calls: the spaces, the coordinator's seat, batches and their portions.

use super::fields::unknown;
use fastps_core::batch::{BatchTask, FailureKind, Finished, PortionFailure};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::spaces::{
    BatchReport, GivenPortion, PortionReport, ReplicaAnswer, ReplicaRequest, SeatRequest, SpaceSpec,
};
use fastps_core::tensor::{Space, SpaceId};
use fastps_core::verbs::SpaceInfo;
use fastps_proto::v1 as pb;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Most bytes of portions in one answer, excluding the name that exceeds it.
const MAX_PAGE_BYTES: usize = 768 << 10;

fn strings(names: &[Arc<str>]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

fn shared(names: Vec<String>) -> Vec<Arc<str>> {
    names.into_iter().map(Arc::from).collect()
}

/// A space in wire form.
pub fn space_to_wire(info: &SpaceInfo) -> pb::SpaceEntry {
    let SpaceSpec { space, tensors, keep_for_ms } = &info.spec;
    pb::SpaceEntry {
        space: space.id.0,
        name: space.name.to_string(),
        tensors: strings(tensors),
        vectors: strings(&space.vectors),
        keep_for_ms: *keep_for_ms,
        coordinator: info.coordinator.as_deref().map(str::to_owned),
    }
}

/// Reads a space.
pub fn space_from_wire(entry: pb::SpaceEntry) -> SpaceInfo {
    let pb::SpaceEntry { space, name, tensors, vectors, keep_for_ms, coordinator } = entry;
    let space = Arc::new(Space { id: SpaceId(space), name: name.into(), vectors: shared(vectors) });
    let spec = SpaceSpec { space, tensors: shared(tensors), keep_for_ms };
    SpaceInfo { spec, coordinator: coordinator.map(Arc::from) }
}

/// Reads a coordinator's request about its seat.
pub fn seat_request_from_wire(request: pb::CoordinateRequest) -> Result<SeatRequest> {
    let pb::CoordinateRequest { action, term, name, state, .. } = request;
    match pb::SeatAction::try_from(action) {
        Ok(pb::SeatAction::SeatTake) => Ok(SeatRequest::Take { at_least: term, name: name.into() }),
        Ok(pb::SeatAction::SeatStore) => Ok(SeatRequest::Store { term, state: state[..].into() }),
        Ok(pb::SeatAction::SeatLeave) => Ok(SeatRequest::Leave { term }),
        Ok(pb::SeatAction::SeatUnspecified) | Err(_) => Err(unknown("action", "1 to 3", action)),
    }
}

/// A coordinator's request about its seat, in wire form.
pub fn seat_request_to_wire(client: u64, space: SpaceId, request: &SeatRequest) -> pb::CoordinateRequest {
    let empty = pb::CoordinateRequest { client, space: space.0, ..Default::default() };
    match request {
        SeatRequest::Take { at_least, name } => pb::CoordinateRequest {
            action: pb::SeatAction::SeatTake.into(),
            term: *at_least,
            name: name.to_string(),
            ..empty
        },
        SeatRequest::Store { term, state } => pb::CoordinateRequest {
            action: pb::SeatAction::SeatStore.into(),
            term: *term,
            state: state.to_vec().into(),
            ..empty
        },
        SeatRequest::Leave { term } => {
            pb::CoordinateRequest { action: pb::SeatAction::SeatLeave.into(), term: *term, ..empty }
        }
    }
}

/// Reads the task of a batch.
pub fn batch_from_wire(task: Option<pb::BatchTask>) -> Result<BatchTask> {
    let missing = || Error::new(Kind::Frame, "the message has no task");
    let pb::BatchTask { batch, portions, asked, samples, vector, min_replicas, backups } =
        task.ok_or_else(missing)?;
    Ok(BatchTask { batch, portions, asked, samples, vector, min_replicas, backups })
}

/// The task of a batch in wire form.
pub fn batch_to_wire(task: &BatchTask) -> pb::BatchTask {
    let BatchTask { batch, portions, asked, samples, vector, min_replicas, backups } = *task;
    pb::BatchTask { batch, portions, asked, samples, vector, min_replicas, backups }
}

fn failure_to_wire(kind: FailureKind) -> pb::PortionFailureKind {
    match kind {
        FailureKind::NotFinite => pb::PortionFailureKind::PortionFailureNotFinite,
        FailureKind::Outside => pb::PortionFailureKind::PortionFailureOutside,
        FailureKind::SumLost => pb::PortionFailureKind::PortionFailureSumLost,
    }
}

/// Reads a failure; `None` if unset.
fn failure_from_wire(kind: i32) -> Result<Option<FailureKind>> {
    match pb::PortionFailureKind::try_from(kind) {
        Ok(pb::PortionFailureKind::PortionFailureUnspecified) => Ok(None),
        Ok(pb::PortionFailureKind::PortionFailureNotFinite) => Ok(Some(FailureKind::NotFinite)),
        Ok(pb::PortionFailureKind::PortionFailureOutside) => Ok(Some(FailureKind::Outside)),
        Ok(pb::PortionFailureKind::PortionFailureSumLost) => Ok(Some(FailureKind::SumLost)),
        Err(_) => Err(unknown("failure", "0 to 3", kind)),
    }
}

/// The state of a batch, and of as many portions from `first` on as fit one answer.
pub fn report_to_wire(report: &BatchReport, first: u64) -> pb::BatchResponse {
    let mut answer = pb::BatchResponse {
        batch: report.batch,
        over: report.over,
        replicas: report.replicas,
        backups_issued: report.backups_issued,
        backups_won: report.backups_won,
        ..Default::default()
    };
    let failure = |failure: &PortionFailure| pb::PortionFailure {
        replica: failure.replica.to_string(),
        portion: failure.portion,
        kind: failure_to_wire(failure.kind).into(),
        tensor: failure.tensor.to_string(),
    };
    if first == 0 {
        answer.failures = report.failures.iter().map(failure).collect();
    }
    let (mut known, mut bytes) = (HashMap::new(), 0);
    let from = usize::try_from(first).unwrap_or(usize::MAX).min(report.finished.len());
    for (portion, finished) in report.finished.iter().enumerate().skip(from) {
        if bytes > MAX_PAGE_BYTES {
            answer.next = portion as u64;
            break;
        }
        bytes += size_of::<f64>() + size_of::<u32>();
        let Some(Finished { loss, replica }) = finished else {
            answer.losses.push(0.0);
            answer.by.push(0);
            continue;
        };
        let by = *known.entry(&**replica).or_insert_with(|| {
            bytes += replica.len() + 4;
            answer.names.push(replica.to_string());
            answer.names.len() as u32
        });
        answer.losses.push(*loss);
        answer.by.push(by);
    }
    answer
}

/// Adds an answer to the known state of a batch. Returns the first portion of the next one, if there is one.
pub fn report_from_wire(answer: pb::BatchResponse, report: &mut BatchReport) -> Result<Option<u64>> {
    let unfit = || Error::new(Kind::Frame, "the state of a batch contradicts itself");
    let pb::BatchResponse { losses, by, names, next, failures, .. } = answer;
    let names = shared(names);
    if losses.len() != by.len() || (next != 0 && next != (report.finished.len() + by.len()) as u64) {
        return Err(unfit());
    }
    (report.batch, report.over, report.replicas) = (answer.batch, answer.over, answer.replicas);
    (report.backups_issued, report.backups_won) = (answer.backups_issued, answer.backups_won);
    for (loss, by) in losses.into_iter().zip(by) {
        let finished = match by.checked_sub(1) {
            None => None,
            Some(k) => Some(Finished { loss, replica: names.get(k as usize).ok_or_else(unfit)?.clone() }),
        };
        report.finished.push(finished);
    }
    for failure in failures {
        let kind = failure_from_wire(failure.kind)?.ok_or_else(unfit)?;
        let pb::PortionFailure { replica, portion, tensor, .. } = failure;
        report.failures.push(PortionFailure {
            replica: replica.into(),
            portion,
            kind,
            tensor: tensor.into(),
        });
    }
    Ok((next != 0).then_some(next))
}

/// Reads a replica's request.
pub fn replica_from_wire(request: pb::BatchPortionRequest) -> Result<ReplicaRequest> {
    if request.replica == 0 {
        return Err(Error::new(Kind::Config, "a replica's number is not 0"));
    }
    let then = super::portion::then_from_wire(request.then)?;
    let report = request.report.map(|report| {
        let pb::PortionReport { batch, portion, loss, failure, tensor } = report;
        let outcome = match failure_from_wire(failure)? {
            None => Ok(loss),
            Some(kind) => Err((kind, tensor.into())),
        };
        Ok::<_, Error>(PortionReport { batch, portion, outcome })
    });
    let pb::BatchPortionRequest { space, replica, name, .. } = request;
    Ok(ReplicaRequest { space: space.into(), replica, name: name.into(), report: report.transpose()?, then })
}

/// A replica's request in wire form; `known` is the space whose tensors it knows.
pub fn replica_to_wire(
    request: &ReplicaRequest,
    client: u64,
    known: Option<SpaceId>,
    wait: Duration,
) -> pb::BatchPortionRequest {
    let report = request.report.as_ref().map(|report| {
        let (batch, portion) = (report.batch, report.portion);
        match &report.outcome {
            Ok(loss) => pb::PortionReport { batch, portion, loss: *loss, ..Default::default() },
            Err((kind, tensor)) => pb::PortionReport {
                batch,
                portion,
                failure: failure_to_wire(*kind).into(),
                tensor: tensor.to_string(),
                ..Default::default()
            },
        }
    });
    let ReplicaRequest { space, replica, name, then, .. } = request;
    pb::BatchPortionRequest {
        client,
        space: space.to_string(),
        replica: *replica,
        name: name.to_string(),
        report,
        then: super::portion::then_to_wire(*then).into(),
        wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
        known: known.map_or(0, |space| space.0),
    }
}

/// The answer to a replica in wire form, without the tensors of the space that it knows.
pub fn given_portion_to_wire(answer: ReplicaAnswer, known: u64) -> pb::BatchPortionResponse {
    let given = answer.map(|given| {
        let GivenPortion { space, tensors, task, portion, likely_next } = given;
        let tensors = if space.0 == known { Vec::new() } else { strings(&tensors) };
        let task = Some(batch_to_wire(&task));
        pb::GivenPortion { space: space.0, tensors, task, portion, likely_next }
    });
    pb::BatchPortionResponse { given }
}

/// Reads the answer to a replica; without tensors if they are known.
pub fn given_portion_from_wire(answer: pb::BatchPortionResponse) -> Result<ReplicaAnswer> {
    let Some(pb::GivenPortion { space, tensors, task, portion, likely_next }) = answer.given else {
        return Ok(None);
    };
    let (space, tensors, task) = (SpaceId(space), shared(tensors), batch_from_wire(task)?);
    Ok(Some(GivenPortion { space, tensors, task, portion, likely_next }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastps_core::portions::Then;
    use prost::Message;

    fn task() -> BatchTask {
        let (batch, portions, asked) = (4, 64, 3);
        BatchTask { batch, portions, asked, samples: 640, vector: 2, min_replicas: 5, backups: true }
    }

    #[test]
    fn spaces_and_seats_survive_both_ways() {
        for coordinator in [None, Some("host, process 1".into())] {
            let space = Arc::new(Space { id: SpaceId(7), name: "s".into(), vectors: vec!["g".into()] });
            let spec = SpaceSpec { space, tensors: vec!["w".into(), "b".into()], keep_for_ms: 9 };
            let info = SpaceInfo { spec, coordinator };
            assert_eq!(space_from_wire(space_to_wire(&info)), info);
        }
        for request in [
            SeatRequest::Take { at_least: 3, name: "c".into() },
            SeatRequest::Store { term: 4, state: Arc::from(&b"{}"[..]) },
            SeatRequest::Leave { term: 5 },
        ] {
            let wire = seat_request_to_wire(6, SpaceId(7), &request);
            assert_eq!((wire.client, wire.space), (6, 7));
            assert_eq!(seat_request_from_wire(wire).unwrap(), request);
        }
        for action in [0, 4] {
            let bad = pb::CoordinateRequest { action, ..Default::default() };
            assert_eq!(seat_request_from_wire(bad).unwrap_err().kind, Kind::Frame);
        }
    }

    #[test]
    fn requests_of_replicas_survive_both_ways() {
        for outcome in [Ok(1.5), Err((FailureKind::Outside, Arc::from("w")))] {
            let report = Some(PortionReport { batch: 1, portion: 2, outcome });
            let (space, name) = ("s".into(), "r".into());
            let request = ReplicaRequest { space, replica: 3, name, report, then: Then::Rest };
            let wire = replica_to_wire(&request, 6, Some(SpaceId(7)), Duration::from_millis(20));
            assert_eq!((wire.client, wire.known, wire.wait_ms), (6, 7, 20));
            assert_eq!(replica_from_wire(wire.clone()).unwrap(), request);
            let zero = pb::BatchPortionRequest { replica: 0, ..wire.clone() };
            assert_eq!(replica_from_wire(zero).unwrap_err().kind, Kind::Config);
            let report = Some(pb::PortionReport { failure: 99, ..Default::default() });
            let unknown = replica_from_wire(pb::BatchPortionRequest { report, ..wire }).unwrap_err();
            assert_eq!((unknown.kind, unknown.got.as_deref()), (Kind::Frame, Some("99")));
        }
        let (space, tensors) = (SpaceId(7), vec!["w".into()]);
        let given = GivenPortion { space, tensors, task: task(), portion: 2, likely_next: Some(0) };
        let wire = given_portion_to_wire(Some(given.clone()), 0);
        assert_eq!(given_portion_from_wire(wire).unwrap(), Some(given.clone()));
        let known = given_portion_from_wire(given_portion_to_wire(Some(given), 7)).unwrap().unwrap();
        assert!(known.tensors.is_empty());
        assert_eq!(given_portion_from_wire(given_portion_to_wire(None, 7)).unwrap(), None);
    }

    #[test]
    fn a_batch_of_any_size_comes_in_pages_that_fit() {
        let finished = |portion: usize| {
            let replica = format!("{portion:0>256}").into();
            (!portion.is_multiple_of(7)).then_some(Finished { loss: portion as f64, replica })
        };
        let kind = FailureKind::SumLost;
        let failure = PortionFailure { replica: "r".into(), portion: 3, kind, tensor: "w".into() };
        let report = BatchReport {
            batch: 4,
            over: true,
            replicas: 9,
            finished: (0..1 << 16).map(finished).collect(),
            backups_issued: 2,
            backups_won: 1,
            failures: vec![failure],
        };
        let (mut read, mut first, mut pages) = (BatchReport::default(), Some(0), 0);
        while let Some(at) = first {
            let page = report_to_wire(&report, at);
            assert!(page.encoded_len() < 1 << 20);
            first = report_from_wire(page, &mut read).unwrap();
            pages += 1;
        }
        assert_eq!(read, report);
        assert!(pages > 1);
        assert!(report_to_wire(&report, u64::MAX).by.is_empty());
        let bad = pb::BatchResponse { losses: vec![1.0], by: vec![2], ..Default::default() };
        assert_eq!(report_from_wire(bad, &mut read).unwrap_err().kind, Kind::Frame);
    }
}
