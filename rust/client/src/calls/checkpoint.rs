//! Requested snapshots: each shard writes one to its data directory, all at the same time.

use crate::client::Client;
use crate::link::state::Link;
use crate::link::unary::{call, request};
use crate::state::runtime::random;
use crate::state::time::after;
use fastps_core::error::{Kind, Result};
use fastps_proto::v1 as pb;
use futures_util::future::{join_all, try_join_all};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long writes are held at most: all shards begin meanwhile.
const MAX_WRITE_HOLD: Duration = Duration::from_secs(5);
/// When a cut that could not begin is tried again.
const CUT_RETRY: Duration = Duration::from_millis(200);

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

/// A cut over all shards.
#[derive(Clone)]
struct Cut {
    id: u64,
    group: String,
}

impl Client {
    /// Has every shard write a snapshot now; returns when all are durable, in the order of the shards. Every
    /// slice is at one version of its own: pushes go on. If a connection breaks meanwhile, its shard is asked
    /// again and may write two.
    ///
    /// # Errors
    /// If a server has no data directory, a snapshot cannot be written, or the timeout passes; others may be
    /// written then.
    pub fn checkpoint(&self, timeout: Duration) -> Result<Vec<Snapshot>> {
        self.alive()?;
        self.shared.lost.raise()?;
        let deadline = after(timeout);
        self.block(snapshots(&self.links, None, deadline))
    }

    /// The same, with the `exact` tensors of a group as they are at one moment, over all shards: whatever is
    /// in it was sent on the strength of nothing that is not. Writes wait until all shards have begun, some
    /// milliseconds, and take up to one more copy of the group's optimizer state until all is written.
    ///
    /// # Errors
    /// As [`Client::checkpoint`]; and where there is no memory for it, or no tensor of the group.
    pub fn checkpoint_of_cut(&self, group: &str, timeout: Duration) -> Result<Vec<Snapshot>> {
        self.alive()?;
        self.shared.lost.raise()?;
        let deadline = after(timeout);
        self.group(group, deadline)?;
        self.block(async {
            loop {
                let cut = Cut { id: random()?.max(1), group: group.to_owned() };
                let written = self.begin_and_write(cut, deadline).await;
                match written {
                    // Another snapshot was being written, for longer than writes may be held.
                    Err(error) if error.kind == Kind::Deadline && Instant::now() + CUT_RETRY < deadline => {
                        tokio::time::sleep(CUT_RETRY).await;
                    }
                    written => return written,
                }
            }
        })
    }

    async fn begin_and_write(&self, cut: Cut, deadline: Instant) -> Result<Vec<Snapshot>> {
        for link in &self.links {
            // In the same order by everybody, so that two never wait for each other.
            if let Err(error) = hold(link, &cut, MAX_WRITE_HOLD, deadline).await {
                // Else they go on when the time is over.
                let release = |link: &Arc<Link>| {
                    let (link, cut) = (link.clone(), cut.clone());
                    async move { hold(&link, &cut, Duration::ZERO, after(CUT_RETRY)).await }
                };
                join_all(self.links.iter().map(release)).await;
                return Err(error);
            }
        }
        snapshots(&self.links, Some(cut), deadline).await
    }
}

async fn hold(link: &Link, cut: &Cut, time: Duration, deadline: Instant) -> Result<()> {
    let ask = |mut client: pb::control_client::ControlClient<_>, left| {
        let hold = pb::HoldRequest { cut: cut.id, hold_ms: time.as_millis() as u32 };
        async move { client.hold(request(hold, left)).await }
    };
    call(link, deadline, ask).await.map(|pb::HoldResponse {}| ())
}

async fn snapshots(links: &[Arc<Link>], cut: Option<Cut>, deadline: Instant) -> Result<Vec<Snapshot>> {
    try_join_all(links.iter().map(|link| of_shard(link, cut.clone(), deadline))).await
}

async fn of_shard(link: &Link, cut: Option<Cut>, deadline: Instant) -> Result<Snapshot> {
    let ask = |mut client: pb::control_client::ControlClient<_>, left| {
        let cut = cut.clone().unwrap_or(Cut { id: 0, group: String::new() });
        let asked = pb::CheckpointRequest { group: cut.group, cut: cut.id };
        async move { client.checkpoint(request(asked, left)).await }
    };
    let pb::CheckpointResponse { snapshot, path, bytes, slices } = call(link, deadline, ask).await?;
    Ok(Snapshot { address: link.address.clone(), number: snapshot, path, bytes, slices })
}
