//! Leases portions of samples, on shard 0 only. A question waits until a portion is free, its time is up,
//! or the server stops.

use crate::auth::caller::Caller;
use crate::cluster::node::{Node, Phase};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::portions::{Ask, Given, PortionAnswer};
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Longest wait for an answer.
const MAX_PORTION_WAIT: Duration = Duration::from_secs(5);

/// Outcome of a question.
pub(crate) enum Asked {
    Answered(PortionAnswer),
    Waits(Waits),
}

/// A question that waits for its answer.
pub(crate) struct Waits {
    client: u64,
    ask: Ask,
    wait: Duration,
    answer: oneshot::Receiver<PortionAnswer>,
}

/// Asks; a question that waits is continued by [`answer`].
pub(crate) fn ask(node: &Node, by: &Caller, request: pb::PortionRequest) -> Result<Asked> {
    let mut portions = node.portions()?;
    let client = request.client;
    if request.name.is_empty() && request.then() == pb::PortionThen::Leave {
        portions.forget_client(client);
        node.leave_spaces(client)?;
        return Ok(Asked::Answered(PortionAnswer { run: 0, epoch: 0, unfinished: 0, given: Given::Nothing }));
    }
    if !by.principal.scope.allows_portions(&request.name) {
        return Err(by.outside(&request.name));
    }
    let wait = Duration::from_millis(request.wait_ms.into()).min(MAX_PORTION_WAIT);
    let ask = convert::ask_from_wire(request)?;
    node.sessions.touch(client, Instant::now())?;
    let (later, answer) = oneshot::channel();
    let later = || -> fastps_core::portions::PortionWaiter {
        Box::new(move |answer| {
            // A caller that left asks again, or its session ends.
            let _ = later.send(answer);
        })
    };
    Ok(match portions.ask(client, &ask, later)? {
        Some(answer) => Asked::Answered(answer),
        None => Asked::Waits(Waits { client, ask, wait, answer }),
    })
}

/// Waits for the answer.
pub(crate) async fn answer(node: &Arc<Node>, asked: Asked) -> Result<PortionAnswer> {
    let mut waits = match asked {
        Asked::Answered(answer) => return Ok(answer),
        Asked::Waits(waits) => waits,
    };
    let gone = |_| Error::new(Kind::Lease, "the client's session ended, or its worker asked again");
    // Dropping this future withdraws the question, so that a departed caller gets no portion.
    let mut withdrawn = Withdraw { node, waits: Some((waits.client, &waits.ask)) };
    let mut phase = node.phase.clone();
    tokio::select! {
        biased;
        answer = &mut waits.answer => {
            withdrawn.waits = None;
            return answer.map_err(gone);
        }
        () = tokio::time::sleep(waits.wait) => {}
        _ = phase.wait_for(|phase| *phase >= Phase::Draining) => {}
    }
    match withdrawn.now() {
        Some(nothing) => Ok(nothing),
        None => waits.answer.await.map_err(gone),
    }
}

/// Withdraws a question when dropped.
struct Withdraw<'a> {
    node: &'a Node,
    waits: Option<(u64, &'a Ask)>,
}

impl Withdraw<'_> {
    fn now(&mut self) -> Option<PortionAnswer> {
        let (client, ask) = self.waits.take()?;
        self.node.portions().ok()?.withdraw(client, ask)
    }
}

impl Drop for Withdraw<'_> {
    fn drop(&mut self) {
        self.now();
    }
}
