//! Snapshots that are asked for: each shard writes one to its data directory, all at once.

use super::control::{call, request};
use super::link::Link;
use super::{Client, after};
use fastps_core::error::Result;
use fastps_proto::v1 as pb;
use futures_util::future::try_join_all;
use std::time::{Duration, Instant};

/// A snapshot of one shard, which is durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The shard's address.
    pub address: String,
    /// Its number; those of a shard count up.
    pub number: u64,
    /// The folder that holds it, as the server names it.
    pub path: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// Slices in it.
    pub slices: u64,
}

impl Client {
    /// Has every shard write a snapshot now; returns when all are durable, in the order of the shards. Every slice is at one
    /// version of its own: pushes go on. If a connection breaks meanwhile, its shard is asked again and may write two.
    ///
    /// # Errors
    /// If a server has no data directory, a snapshot cannot be written, or the timeout passes; others may be written then.
    pub fn checkpoint(&self, timeout: Duration) -> Result<Vec<Snapshot>> {
        self.alive()?;
        let deadline = after(timeout);
        self.block(try_join_all(self.links.iter().map(|link| of_shard(link, deadline))))
    }
}

async fn of_shard(link: &Link, deadline: Instant) -> Result<Snapshot> {
    let ask = |mut client: pb::control_client::ControlClient<_>, left| async move {
        client.checkpoint(request(pb::CheckpointRequest {}, left)).await
    };
    let pb::CheckpointResponse { snapshot, path, bytes, slices } = call(link, deadline, ask).await?;
    Ok(Snapshot { address: link.address.clone(), number: snapshot, path, bytes, slices })
}
