//! The start, renewal and end of a client's session.

use crate::auth::caller::{Caller, Proof};
use crate::auth::secret;
use crate::cluster::node::{EPOCH, Node};
use crate::cluster::session::{Greeting, SessionOver};
use fastps_core::error::Result;
use fastps_durable::{Event, SecretHash};
use fastps_proto::v1 as pb;
use fastps_proto::{MAX_MESSAGE_BYTES, PROTOCOL_MINOR, role_of};
use fastps_transport::convert::{self, Ack};
use std::time::Instant;

/// Answers a client's `Hello`, and logs the start or end of its session. `ack`: what its receipts promise.
pub(super) fn greet(
    node: &Node,
    by: &Caller,
    m: &pb::HelloRequest,
    ack: Result<Ack>,
) -> Result<pb::HelloResponse> {
    let session = answer(node, by, m, ack);
    let session = session.inspect_err(|error| {
        tracing::warn!(shard = node.index(), client = m.name, %error, "a client is refused");
    })?;
    let cluster_digest = convert::cluster_digest(&node.cluster);
    let cluster = if m.cluster_digest == cluster_digest { Vec::new() } else { node.cluster.to_vec() };
    Ok(pb::HelloResponse {
        protocol_minor: m.protocol_minor.min(PROTOCOL_MINOR),
        capabilities: capabilities(node),
        server: node.server,
        shard: node.index(),
        cluster,
        cluster_digest,
        lease_ms: node.sessions.lease().as_millis() as u32,
        epoch: EPOCH,
        role: by.principal.shown_role().to_wire().into(),
        max_message_bytes: MAX_MESSAGE_BYTES as u32,
        session,
        cluster_id: node.membership.id(),
        insecure: node.security.insecure,
        term: node.files.owner().map_or(0, |owner| owner.term()),
    })
}

fn capabilities(node: &Node) -> Vec<String> {
    let log = node.files.journal().map(|_| convert::CAN_LOG);
    let history = node.files.keeps_history().then_some(convert::HISTORY);
    let copied = node.files.log_copy().map(|_| convert::COPIED);
    [
        convert::MATCHES_STALENESS,
        convert::ROUNDS,
        convert::DTYPES,
        convert::PULL_CODEC,
        convert::VERSIONS,
        convert::PARTS,
        convert::INITIAL_PARTS,
        convert::REGISTRATIONS,
    ]
    .into_iter()
    .chain(log)
    .chain(history)
    .chain(copied)
    .map(str::to_owned)
    .collect()
}

/// Answers with the number of the session.
fn answer(node: &Node, by: &Caller, m: &pb::HelloRequest, ack: Result<Ack>) -> Result<u64> {
    let ack = ack?;
    if ack > node.files.strongest_ack() {
        node.files.check(ack)?;
    }
    let secret = secret::of_hello(&m.secret)?;
    if m.close {
        return close(node, by, m.client, &secret);
    }
    let is_live = node.sessions.is_live(m.client);
    if !m.renew && !is_live {
        by.peer.check_hello()?;
        node.evict_idle_session(m.client);
    }
    let principal = by.principal.name.as_ref();
    let (budget, name) = (by.budget.as_ref(), m.name.as_str());
    let greeting = Greeting { client: m.client, secret, principal, budget, name, renew: m.renew, ack };
    let session = node.sessions.hello(&greeting, Instant::now())?;
    if session.changed {
        let position = node.files.note(|| Event::SessionOpened(m.client, secret));
        node.sessions.note_beginning(m.client, position);
        if let Some(journal) = node.files.journal() {
            journal.name(m.client, &m.name);
        }
    }
    keep_report(node, by, m);
    if !is_live {
        tracing::info!(shard = node.index(), session = session.number, client = m.name, "a client joined");
    }
    Ok(session.number)
}

/// Keeps the report, if there is one, of a caller that may push. A bad one never ends a session.
fn keep_report(node: &Node, by: &Caller, m: &pb::HelloRequest) {
    let may_push = by.principal.authorize(role_of(pb::Kind::Gradient)).is_ok();
    let Some(report) = m.report.as_ref().filter(|_| may_push) else { return };
    match convert::worker_report_from_wire(report) {
        Ok(report) => node.sessions.keep_report(m.client, report),
        Err(error) => {
            tracing::warn!(shard = node.index(), worker = m.name, %error, "a worker's report is not shown");
        }
    }
}

fn close(node: &Node, by: &Caller, client: u64, secret: &SecretHash) -> Result<u64> {
    let proof = Proof { secret: Some(secret), ..by.proof() };
    let over = node.sessions.close(client, proof)?;
    let SessionOver { number, name, .. } = &over;
    let number = *number;
    tracing::info!(shard = node.index(), session = number, client = name, "the client closed its session");
    node.end_client(over);
    Ok(number)
}
