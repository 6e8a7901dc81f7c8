//! Waits of coordinators and replicas for each other, on shard 0 only: for the end of a batch, and for a
//! portion of it. A wait also ends after its timeout, or when the server stops.

use super::spaces::{check_within, claimant, is_within};
use crate::auth::caller::Caller;
use crate::cluster::node::{Node, Phase};
use fastps_core::batch::BatchTask;
use fastps_core::error::Result;
use fastps_core::spaces::{BatchReport, ReplicaAnswer, ReplicaRequest, SpaceWaiter};
use fastps_core::tensor::SpaceId;
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Longest wait for an answer.
const MAX_BATCH_WAIT: Duration = Duration::from_secs(5);

/// Wait of a limited caller's question about a space that is not open.
const UNLISTED_WAIT: Duration = Duration::from_millis(200);

/// A question: its answer, or the channel that brings it.
pub(super) struct Waiting<Q, A> {
    client: u64,
    question: Q,
    wait: Duration,
    answer: Result<A, oneshot::Receiver<A>>,
    /// Waiter of a question that gets no answer.
    unanswered: Option<SpaceWaiter<A>>,
}

/// A coordinator's question.
pub(super) struct BatchQuestion {
    space: SpaceId,
    term: u64,
    task: BatchTask,
    /// First portion that the answer lists.
    first: u64,
}

/// A replica's question.
pub(super) struct PortionQuestion {
    request: ReplicaRequest,
    /// The space whose tensors it knows.
    known: u64,
}

/// A waiter, and the channel to which it passes its answer.
fn passing<A: Send + 'static>() -> (SpaceWaiter<A>, oneshot::Receiver<A>) {
    let (to, answer) = oneshot::channel();
    // A caller that has left withdraws, or asks again.
    (Box::new(move |decided| drop(to.send(decided))), answer)
}

fn longest(ms: u32) -> Duration {
    Duration::from_millis(ms.into()).min(MAX_BATCH_WAIT)
}

pub(super) fn ask_batch(
    node: &Node,
    by: &Caller,
    request: pb::BatchRequest,
) -> Result<Waiting<BatchQuestion, BatchReport>> {
    let pb::BatchRequest { client, space, term, task, wait_ms, first } = request;
    let question =
        BatchQuestion { space: SpaceId(space), term, task: convert::batch_from_wire(task)?, first };
    node.sessions.touch(client, Instant::now())?;
    check_within(node, by, question.space)?;
    let (waiter, answer) = passing();
    let decided = node.spaces()?.batch(
        claimant(client, by.secret.as_ref()),
        (question.space, term),
        &question.task,
        || waiter,
    )?;
    Ok(Waiting { client, question, wait: longest(wait_ms), answer: decided.ok_or(answer), unanswered: None })
}

pub(super) async fn answer_batch(
    node: &Arc<Node>,
    asked: Waiting<BatchQuestion, BatchReport>,
) -> Result<pb::BatchResponse> {
    let Waiting { question, wait, answer, .. } = asked;
    let report = match answer {
        Ok(report) => Some(report),
        Err(answer) => wait_for(node, wait, answer).await,
    };
    let now = || node.spaces()?.withdraw_batch(question.space, question.term);
    let report = report.map_or_else(now, Ok)?;
    Ok(convert::report_to_wire(&report, question.first))
}

pub(super) fn ask_portion(
    node: &Node,
    by: &Caller,
    request: pb::BatchPortionRequest,
) -> Result<Waiting<PortionQuestion, ReplicaAnswer>> {
    let (client, known, wait) = (request.client, request.known, longest(request.wait_ms));
    let name = request.space.clone();
    let question = PortionQuestion { request: convert::replica_from_wire(request)?, known };
    node.sessions.touch(client, Instant::now())?;
    let (waiter, answer) = passing();
    if !may_ask(node, by, &name)? {
        let (wait, unanswered) = (wait.min(UNLISTED_WAIT), Some(waiter));
        return Ok(Waiting { client, question, wait, answer: Err(answer), unanswered });
    }
    let decided = node.spaces()?.portion(client, &question.request, || waiter)?;
    Ok(Waiting { client, question, wait, answer: decided.ok_or(answer), unanswered: None })
}

/// Returns whether the caller may ask for portions of a space of this name. A limited one asks again until
/// the space is open, and as long for one outside its scope.
fn may_ask(node: &Node, by: &Caller, name: &str) -> Result<bool> {
    if by.principal.scope.is_everything() {
        return Ok(true);
    }
    let spaces = node.spaces()?.list();
    Ok(spaces.iter().any(|(spec, _)| *spec.space.name == *name && is_within(node, by, spec)))
}

pub(super) async fn answer_portion(
    node: &Arc<Node>,
    asked: Waiting<PortionQuestion, ReplicaAnswer>,
) -> Result<pb::BatchPortionResponse> {
    let Waiting { client, question, wait, answer, unanswered: _unanswered } = asked;
    let given = match answer {
        Ok(given) => given,
        Err(mut answer) => {
            // Dropping this future withdraws the question, so that a departed replica gets no portion.
            let mut waits = WithdrawReplica { node, replica: Some((client, &question.request)) };
            let given = wait_for(node, wait, &mut answer).await;
            match given {
                Some(given) => {
                    waits.replica = None;
                    given
                }
                // Also if another request of the replica waits in its place: it asks again.
                None => match waits.now() {
                    Some(nothing) => nothing,
                    None => answer.try_recv().ok().flatten(),
                },
            }
        }
    };
    Ok(convert::given_portion_to_wire(given, question.known))
}

/// The answer, if it arrives in time.
async fn wait_for<A>(
    node: &Node,
    wait: Duration,
    answer: impl Future<Output = Result<A, oneshot::error::RecvError>>,
) -> Option<A> {
    let mut phase = node.phase.clone();
    tokio::select! {
        biased;
        answer = answer => answer.ok(),
        () = tokio::time::sleep(wait) => None,
        _ = phase.wait_for(|phase| *phase >= Phase::Draining) => None,
    }
}

/// Withdraws a replica's question when dropped.
struct WithdrawReplica<'a> {
    node: &'a Node,
    replica: Option<(u64, &'a ReplicaRequest)>,
}

impl WithdrawReplica<'_> {
    /// `None` if it has just got its answer, or does not wait here.
    fn now(&mut self) -> Option<ReplicaAnswer> {
        let (client, request) = self.replica.take()?;
        self.node.spaces().ok()?.withdraw_portion(client, request)
    }
}

impl Drop for WithdrawReplica<'_> {
    fn drop(&mut self) {
        self.now();
    }
}
