//! Ends abandoned reservations: asks shard 0 about those that are sealed here, so that a client that dies
//! before its Commit leaves no memory taken, and nothing that was committed is freed.

use crate::cluster::node::Node;
use fastps_proto::v1 as pb;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reservations that one question names.
pub(crate) const MAX_ASKED_RESERVATIONS: usize = 10_000;

/// Runs until it is aborted.
pub(crate) async fn reap(node: Arc<Node>) {
    let period = (node.reservations.lease() / 4).max(Duration::from_millis(5));
    loop {
        tokio::time::sleep(period).await;
        let asked = node.reservations.unsettled(MAX_ASKED_RESERVATIONS, Instant::now());
        if asked.is_empty() {
            continue;
        }
        // Without an answer they stay, and the question comes again.
        let question = pb::SettleRequest { reservations: asked.clone(), ..Default::default() };
        match node.ask_first(question).await {
            Ok(told) => {
                if !told.ended.is_empty() {
                    tracing::info!(shard = node.index(), reservations = ?told.ended, "sealed and never committed");
                }
                node.reservations.settle(&node.shard, &asked, &told, Instant::now());
            }
            Err(error) => tracing::warn!(shard = node.index(), %error, "shard 0 does not answer"),
        }
    }
}
