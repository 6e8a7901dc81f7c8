//! Ends abandoned reservations and spaces. Asks shard 0 about reservations that are sealed here, so that a
//! client that dies before its Commit leaves no memory taken and nothing committed is freed; and about open
//! spaces, so that one closed there takes no memory here.

use crate::cluster::node::Node;
use crate::cluster::reservation::MAX_ASKED_RESERVATIONS;
use fastps_core::tensor::SpaceId;
use fastps_proto::v1 as pb;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs until it is aborted.
pub(crate) async fn reap(node: Arc<Node>) {
    let period = (node.reservations.lease() / 4).max(Duration::from_millis(5));
    loop {
        tokio::time::sleep(period).await;
        let asked = node.reservations.unsettled(MAX_ASKED_RESERVATIONS, Instant::now());
        let spaces = node.spaces_to_ask_about();
        if asked.is_empty() && spaces.is_empty() {
            continue;
        }
        // Without an answer they stay until the next question.
        let question = pb::SettleRequest { reservations: asked.clone(), spaces, ..Default::default() };
        match node.ask_coordinator(question).await {
            Ok(answer) => {
                if !answer.ended.is_empty() {
                    tracing::info!(shard = node.index(), reservations = ?answer.ended, "sealed and never committed");
                }
                for space in &answer.closed_spaces {
                    tracing::info!(
                        shard = node.index(),
                        space,
                        "the space was closed: its vectors are freed"
                    );
                    node.close_space(SpaceId(*space));
                }
                node.reservations.settle(&node.shard, &asked, &answer, Instant::now());
            }
            Err(error) => tracing::warn!(shard = node.index(), %error, "shard 0 does not answer"),
        }
    }
}
