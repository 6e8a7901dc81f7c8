//! Requested snapshots: each shard writes one to its data directory, all at the same time.

use crate::client::Client;
use crate::link::state::Link;
use crate::link::unary::{call, request};
use crate::state::runtime::random;
use crate::state::time::{after, jitter};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::Versions;
use fastps_core::verbs::PullTensors;
use fastps_proto::v1 as pb;
use fastps_transport::convert::{check_mark_name, passes};
use futures_util::future::try_join_all;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Longest hold of writes: all shards begin meanwhile.
const MAX_WRITE_HOLD: Duration = Duration::from_secs(2);
/// Retry delay of a cut that could not begin.
const CUT_RETRY: Duration = Duration::from_millis(200);

/// A durable snapshot of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The shard's address.
    pub address: String,
    /// Number of the snapshot; a shard's numbers count up.
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
    /// Has every shard write a snapshot now; returns when all are durable, in the order of the shards. Each
    /// slice has its current version, since pushes continue. If a connection breaks meanwhile, its shard is
    /// asked again and may write two.
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

    /// Like [`Client::checkpoint`], with the `exact` tensors of a group at one moment over all shards: the
    /// snapshots contain the cause of every change that they contain. Writes wait until all shards have
    /// begun, some milliseconds, and take up to another copy of the group's optimizer state until all are
    /// written.
    ///
    /// # Errors
    /// As [`Client::checkpoint`]; and if there is no memory for it, or no tensor of the group.
    pub fn checkpoint_of_cut(&self, group: &str, timeout: Duration) -> Result<Vec<Snapshot>> {
        self.alive()?;
        self.shared.lost.raise()?;
        let deadline = after(timeout);
        self.group(group, deadline)?;
        self.block(self.cut_until(group, deadline, async |cut| {
            snapshots(&self.links, Some(cut.clone()), deadline).await
        }))
    }

    /// Names the present moment of all shards in their logs: what is in them before it contains the cause of
    /// every change that it contains. Writes wait meanwhile, some milliseconds.
    ///
    /// # Errors
    /// If a server keeps no history, the name is invalid, or the timeout passes.
    pub(crate) fn mark_moment(&self, name: &str, timeout: Duration) -> Result<()> {
        check_mark_name(name)?;
        self.alive()?;
        self.shared.lost.raise()?;
        let deadline = after(timeout);
        if let Some(link) = self.links.iter().find(|link| !link.history.load(Ordering::Relaxed)) {
            let error = Error::new(Kind::Precondition, "the server keeps no history, which marks belong to");
            let error = error.expected("servers with --keep-history, of this version", link.address());
            return Err(error.shard(link.shard()));
        }
        self.block(self.cut_until("", deadline, async |cut| {
            try_join_all(self.links.iter().map(|link| mark(link, name, cut.id, deadline))).await.map(|_| ())
        }))
    }

    /// Begins a cut of all shards with `begin` while writes are held for it, until that succeeds.
    async fn cut_until<T>(
        &self,
        group: &str,
        deadline: Instant,
        begin: impl AsyncFn(&Cut) -> Result<T>,
    ) -> Result<T> {
        let mut cause = None;
        loop {
            let cut = Cut { id: random()?.max(1), group: group.to_owned() };
            let held = self.hold_all(&cut, deadline).await;
            let begun = match held {
                Ok(()) => begin(&cut).await,
                Err(error) => Err(error),
            };
            let error = match begun {
                Err(error) => error,
                begun => return begun,
            };
            self.release(&cut).await;
            // Writes were held a moment ago, or a snapshot took longer to write than they may be held.
            let pause = Duration::from_millis(error.retry_after_ms.unwrap_or(0)).max(CUT_RETRY);
            let again = error.kind == Kind::Deadline || passes(&error);
            // A pause that servers ask for follows from an attempt that failed for another reason.
            cause = if error.retry_after_ms.is_some() { cause.or(Some(error)) } else { Some(error) };
            if !again || Instant::now() + pause >= deadline {
                return cause.map_or_else(|| Err(Error::new(Kind::Deadline, "no attempt was made")), Err);
            }
            tokio::time::sleep(pause + jitter(CUT_RETRY)).await;
        }
    }

    /// Reads these tensors as of one moment: holds all writes meanwhile, and reads again if a slice has
    /// changed, since a server holds writes for at most 2 seconds. `read` gets the time that is left, and
    /// returns the versions of the values that it has pulled first.
    ///
    /// # Errors
    /// As `read`; and if the timeout passes before a read is quick enough.
    pub fn read_at_one_moment<T>(
        &self,
        names: &[Arc<str>],
        timeout: Duration,
        mut read: impl FnMut(Duration) -> Result<(T, Versions)>,
    ) -> Result<T> {
        let deadline = after(timeout);
        let left = || deadline.saturating_duration_since(Instant::now());
        loop {
            let cut = Cut { id: random()?.max(1), group: String::new() };
            let attempt = self.block(self.hold_all(&cut, deadline)).and_then(|()| {
                let (found, versions) = read(left())?;
                let is_same = self.versions(names, left())?.tensors() == versions.tensors();
                Ok(is_same.then_some(found))
            });
            self.block(async {
                self.release(&cut).await;
                Ok(())
            })?;
            let error = match attempt {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => changed(),
                Err(error) if passes(&error) || error.kind == Kind::Deadline => error,
                Err(error) => return Err(error),
            };
            let pause = Duration::from_millis(error.retry_after_ms.unwrap_or(0)).max(CUT_RETRY);
            if Instant::now() + pause >= deadline {
                return Err(error);
            }
            std::thread::sleep(pause + jitter(CUT_RETRY));
        }
    }

    async fn hold_all(&self, cut: &Cut, deadline: Instant) -> Result<()> {
        // A shard that refuses for longer would hold up the writes of the others without need.
        let by = deadline.min(after(MAX_WRITE_HOLD / 2));
        for link in self.links.iter() {
            // Every client uses this order, so that two never wait for each other.
            hold(link, cut, MAX_WRITE_HOLD, by).await?;
        }
        Ok(())
    }

    /// Releases writes before their hold expires.
    async fn release(&self, cut: &Cut) {
        for link in self.links.iter() {
            let _ = hold(link, cut, Duration::ZERO, after(CUT_RETRY)).await;
        }
    }
}

/// Error of a read that took longer than writes are held.
fn changed() -> Error {
    let why = "tensors changed while they were read: writes are held for at most 2 seconds";
    Error::new(Kind::Deadline, why).expected(
        "a faster connection, or a snapshot of the servers: fastps checkpoint save --consistent",
        "a longer read",
    )
}

async fn hold(link: &Link, cut: &Cut, time: Duration, deadline: Instant) -> Result<()> {
    let ask = |mut client: pb::control_client::ControlClient<_>, left| {
        let hold = pb::HoldRequest { cut: cut.id, hold_ms: time.as_millis() as u32 };
        async move { client.hold(request(hold, left)).await }
    };
    call(link, deadline, ask).await.map(|pb::HoldResponse {}| ())
}

async fn mark(link: &Link, name: &str, cut: u64, deadline: Instant) -> Result<()> {
    let ask = |mut client: pb::control_client::ControlClient<_>, left| {
        let mark = pb::MarkRequest { name: name.to_owned(), cut };
        async move { client.mark(request(mark, left)).await }
    };
    call(link, deadline, ask).await.map(|pb::MarkResponse {}| ())
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
    Ok(Snapshot { address: link.address(), number: snapshot, path, bytes, slices })
}
