//! Takes periodic snapshots, on a thread beside the shards.

use crate::cluster::node::Node;
use crate::persistence::Files;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::Shard;
use fastps_durable::Summary;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How soon a snapshot is tried again after it failed, or to close a hole in the log.
const SNAPSHOT_RETRY: Duration = Duration::from_secs(1);
/// The least time between two snapshots that only the length of the log asks for.
const MIN_SHORTEN_INTERVAL: Duration = Duration::from_secs(30);

/// When snapshots are taken without being asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct When {
    /// So much later than the last one.
    pub(crate) every: Duration,
    /// When the log behind it is longer than so many times the state; 0: never for that.
    pub(crate) after: u64,
}

/// Takes snapshots from time to time.
#[derive(Debug)]
pub(crate) struct Snapshots {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Snapshots {
    /// Begins, if there is anything to keep.
    pub(crate) fn start(nodes: Vec<Arc<Node>>, when: When) -> Result<Option<Self>> {
        if nodes.iter().all(|node| node.files.journal().is_none()) {
            return Ok(None);
        }
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("fastps-snapshots".to_owned())
            .spawn(move || run(&nodes, when, &stopped))
            .map_err(|error| Error::new(Kind::Internal, format!("cannot start a thread: {error}")))?;
        Ok(Some(Self { stop, thread }))
    }

    /// Ends; one that is under way is completed.
    pub(crate) fn stop(self) {
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}

fn run(nodes: &[Arc<Node>], when: When, stopped: &Receiver<()>) {
    let every = when.every;
    let mut due: Vec<_> = nodes.iter().map(|_| (Instant::now() + every, Instant::now())).collect();
    // What a start had to repeat is looked at right behind it: a server that lives for moments gets on, too.
    let mut pause = Duration::ZERO;
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(pause) {
        pause = SNAPSHOT_RETRY.min(every);
        for (node, (due, may_shorten)) in nodes.iter().zip(&mut due) {
            let Some(journal) = node.files.journal() else { continue };
            let broken = journal.check();
            if let Err(error) = &broken {
                tracing::error!(shard = node.index(), %error, "nothing is durable");
            }
            let now = Instant::now();
            if broken.is_err() || now >= *due {
                let taken = take(node, Files::snapshot_now);
                *due = Instant::now() + if taken { every } else { SNAPSHOT_RETRY };
            } else if now >= *may_shorten && journal.is_overgrown(when.after) {
                take(node, Files::shorten);
                *may_shorten = Instant::now() + MIN_SHORTEN_INTERVAL;
            }
        }
    }
}

/// Takes a snapshot; tells whether there is one.
pub(crate) fn take(node: &Node, how: impl FnOnce(&Files, &Shard) -> Result<Summary>) -> bool {
    let taken = how(&node.files, &node.shard);
    if let Err(error) = &taken {
        tracing::error!(shard = node.index(), %error, "no snapshot");
    }
    taken.is_ok()
}
