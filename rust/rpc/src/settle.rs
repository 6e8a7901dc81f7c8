//! What became of the reservations that are sealed here: shard 0 is asked, so that a client that dies before its
//! Commit leaves no memory taken, and nothing that was committed is ever freed.

use crate::client::channel;
use crate::convert;
use crate::node::Node;
use crate::tls::ClientTls;
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reservations that one question names.
const MOST_ASKED: usize = 10_000;
/// How long shard 0 may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs until it is aborted.
pub(crate) async fn settle(node: Arc<Node>, tls: Option<ClientTls>) {
    let period = (node.reservations.lease() / 4).max(Duration::from_millis(5));
    loop {
        tokio::time::sleep(period).await;
        let asked = node.reservations.unsettled(MOST_ASKED, Instant::now());
        if asked.is_empty() {
            continue;
        }
        // Without an answer they stay, and the question comes again.
        match ask(&node, tls.as_ref(), &asked).await {
            Ok(told) => {
                if !told.ended.is_empty() {
                    tracing::info!(shard = node.index(), reservations = ?told.ended, "sealed and never committed");
                }
                node.reservations.settle(&node.shard, &asked, &told, Instant::now());
            }
            Err(error) => tracing::warn!(shard = node.index(), %error, "shard 0 was asked in vain"),
        }
    }
}

async fn ask(node: &Node, tls: Option<&ClientTls>, reservations: &[u64]) -> Result<pb::SettleResponse> {
    if node.map.is_some() {
        return Ok(node.map()?.settle(reservations, Instant::now()));
    }
    let first =
        node.cluster.first().ok_or_else(|| Error::new(Kind::Internal, "a cluster without shard 0"))?;
    let mut control =
        ControlClient::new(channel(first, tls)?).max_decoding_message_size(fastps_proto::MAX_MESSAGE_BYTES);
    let mut question = tonic::Request::new(pb::SettleRequest { reservations: reservations.to_vec() });
    question.set_timeout(PATIENCE);
    let late = |_| Error::new(Kind::Deadline, format!("{first} did not answer in time"));
    let answer = tokio::time::timeout(PATIENCE, control.settle(question)).await.map_err(late)?;
    answer.map(tonic::Response::into_inner).map_err(|status| convert::error_from_status(&status))
}
