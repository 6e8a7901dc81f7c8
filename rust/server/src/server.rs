//! A server: each shard runs on a separate thread with a single-threaded runtime.

mod hand_over;
mod start;
mod thread;

use crate::auth::reload::Reload;
use crate::backup::copies::Copies;
use crate::backup::owners::{Owners, check_take_over};
use crate::backup::pieces::LogCopies;
use crate::cluster::node::{Node, Phase};
use crate::config::{Bound, ServerConfig};
use crate::connection::recovering::RecoveryListener;
use crate::persistence::snapshots::{self, Snapshots};
use crate::web::Web;
use fastps_core::error::{Error, Kind, Result};
use futures_util::stream::{FuturesUnordered, StreamExt};
pub use hand_over::{HAND_OVER_TIMEOUT, stop_when_asked};
use start::{Credentials, Start};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long a draining server keeps answering frames that it has read.
const DRAIN_TIME: Duration = Duration::from_millis(200);
/// How long clients may take to close their connections before these are cut.
const CLOSE_GRACE: Duration = Duration::from_secs(2);
/// Time for a shard's thread to exit after its deadline.
const THREAD_EXIT_TIME: Duration = Duration::from_millis(200);

/// A running server; dropping it stops it.
#[derive(Debug)]
pub struct Server {
    addresses: Vec<String>,
    summary: String,
    sockets: Vec<(u32, PathBuf)>,
    nodes: Vec<Arc<Node>>,
    phase: watch::Sender<Phase>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    snapshots: Mutex<Option<Snapshots>>,
    copies: Mutex<Option<Copies>>,
    log_copies: Mutex<Option<LogCopies>>,
    owners: Mutex<Option<Owners>>,
    web: Option<Web>,
    reload: Option<Reload>,
}

fn internal(what: &str, error: impl std::fmt::Display) -> Error {
    Error::new(Kind::Internal, format!("{what}: {error}"))
}

impl Server {
    /// Takes the ports and starts the shards. Clients that connect during the start learn its progress; once
    /// this returns they are served.
    pub fn start(config: &ServerConfig) -> Result<Self> {
        Self::start_unless(config, &AtomicBool::new(false))
    }

    /// Starts as [`Server::start`] does, and fails if `given_up` is set while it waits for the former owner of a shard.
    pub fn start_unless(config: &ServerConfig, given_up: &AtomicBool) -> Result<Self> {
        // What the settings alone can show to be wrong is refused before a port is taken or a file opened.
        let credentials = Credentials::load(config)?;
        check_take_over(config)?;
        let bucket = Copies::check(config)?;
        Owners::check(config, bucket.as_ref())?;
        LogCopies::check(config)?;
        let (bound, cluster) = config.bind()?;
        let (memory, source) = config.memory();
        let addresses: Vec<_> = bound.iter().map(|shard| shard.address.clone()).collect();
        let summary = config.summary(&addresses, (memory, &source));
        let socket = |b: &Bound| b.socket.as_ref().map(|socket| (b.index, socket.path().to_owned()));
        let sockets = bound.iter().filter_map(socket).collect();
        let (phase, watching) = watch::channel(Phase::Serving);
        let memory_limit = memory / bound.len().max(1) as u64;
        let cluster = cluster.into();
        let start = Start { config, credentials, cluster, memory_limit, phase: watching, given_up };

        let files = start.open_files(&bound)?;
        // Both answer while the shards recover, however long that takes.
        let recovering = RecoveryListener::open(&bound, &files, start.credentials.tls.as_ref())?;
        let (subject, web) = start.open_web(&bound, &files)?;
        let (recovered, owners) = start.begin(&bound, &files, bucket.as_ref())?;
        drop(recovering);

        // No shard serves before all have their state and none has lost any: a client would act on half of it.
        let nodes = start.nodes(&bound, files, recovered)?;
        let threads = start.threads(bound, &nodes)?;
        let log_copies = bucket.as_ref().map(|bucket| LogCopies::start(bucket, config, &nodes));
        let log_copies = Mutex::new(log_copies.transpose()?.flatten());
        let copies = bucket.map(|bucket| Copies::start(bucket, config, &nodes)).transpose()?.flatten();
        let snapshots = start.snapshots(&nodes)?;
        subject.show(&nodes);
        let reload = Reload::start(&start.credentials.access, &start.credentials.tls_watch)?;
        start.list_in_audit(&addresses)?;
        let (threads, snapshots, copies, owners) =
            (Mutex::new(threads), Mutex::new(Some(snapshots)), Mutex::new(copies), Mutex::new(owners));
        Ok(Self {
            addresses,
            summary,
            sockets,
            nodes,
            phase,
            threads,
            snapshots,
            copies,
            log_copies,
            owners,
            web,
            reload,
        })
    }

    /// The addresses of this process's shards, with their actual ports.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Version, data directory, encryption, memory limit and addresses, in one line for people.
    pub fn summary(&self) -> &str {
        &self.summary
    }

    /// URL of the web listener, if there is one.
    pub fn web(&self) -> Option<&str> {
        self.web.as_ref().map(Web::url)
    }

    /// Index in the cluster and address of each shard of this process.
    pub fn shards(&self) -> impl Iterator<Item = (u32, &str)> {
        self.nodes.iter().map(|n| n.index()).zip(self.addresses.iter().map(String::as_str))
    }

    /// Index in the cluster of each shard of this process that has a Unix socket with a path, and the path.
    pub fn sockets(&self) -> impl Iterator<Item = (u32, &Path)> {
        self.sockets.iter().map(|(index, path)| (*index, path.as_path()))
    }

    /// Counters of this process's shards, without a connection.
    pub fn counters(&self) -> Vec<Vec<(&'static str, u64)>> {
        self.nodes.iter().map(|node| node.counters()).collect()
    }

    /// Returns whether the thread of each shard has looked after its sessions since the last call, which it
    /// does at least every second.
    pub fn swept(&self) -> bool {
        self.nodes.iter().filter(|node| node.swept.swap(false, Ordering::Relaxed)).count() == self.nodes.len()
    }

    /// Reads the token file and the TLS files again, as it also happens every 5 s.
    pub fn reload(&self) {
        if let Some(reload) = &self.reload {
            reload.now();
        }
    }

    /// Returns whether there are files that [`Server::reload`] reads again.
    pub fn reloads(&self) -> bool {
        self.reload.is_some()
    }

    /// Waits until somebody has asked for one of this process's shards (`fastps owner --release`): then it should be
    /// stopped, with time to copy what it has.
    pub async fn asked_to_release(&self) {
        let owners = self.nodes.iter().filter_map(|node| node.files.owner());
        let mut asked: FuturesUnordered<_> = owners.map(|owner| owner.asked_to_release()).collect();
        if asked.next().await.is_none() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns whether somebody has asked for one of this process's shards.
    pub fn is_asked_to_release(&self) -> bool {
        self.nodes.iter().filter_map(|node| node.files.owner()).any(|owner| owner.is_asked_to_release())
    }

    /// Refuses new calls, finishes those under way, then ends, whatever clients do, within `timeout`. Fails
    /// if a thread did not exit in time, or if a shard's state is not on its disk. Stopping again does
    /// nothing.
    pub fn stop(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if threads.is_empty() {
            return Ok(());
        }
        self.phase.send_replace(Phase::Draining);
        if self.nodes.iter().any(|node| node.counters.open.load(Ordering::Relaxed) > 0) {
            std::thread::sleep(DRAIN_TIME.min(timeout / 4));
        }
        // hyper's graceful shutdown can wait for ever for an idle client (hyper#4170), so its time is
        // limited.
        self.phase.send_replace(Phase::Stopping);
        let cut =
            (Instant::now() + CLOSE_GRACE).min(deadline.checked_sub(THREAD_EXIT_TIME).unwrap_or(deadline));
        if !all_finished(&threads, cut) {
            self.phase.send_replace(Phase::Cutting);
            if !all_finished(&threads, deadline.max(cut + THREAD_EXIT_TIME)) {
                threads.clear();
                self.keep(deadline)?;
                return Err(Error::new(Kind::Deadline, "a shard's thread did not exit in time"));
            }
        }
        for thread in threads.drain(..) {
            let _ = thread.join();
        }
        self.keep(deadline)
    }

    /// Takes and copies a last snapshot of each shard, which changes no more, if there is time. Otherwise the
    /// log has all state except `hogwild` tensors. Fails if neither has it.
    fn keep(&self, deadline: Instant) -> Result<()> {
        let snapshots = self.snapshots.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(snapshots) = snapshots {
            snapshots.stop();
        }
        let mut kept = Ok(());
        for node in &self.nodes {
            node.security.access.audit.summarize(true);
            node.shard.end_waiting();
            let Some(journal) = node.files.journal() else { continue };
            let taken = snapshots::take(&node.shard, &node.files);
            journal.close();
            if let (false, Err(error)) = (taken, journal.check()) {
                let lost = format!("this server's state is not on its disk: {}", error.message);
                kept = Err(Error::new(error.kind, lost).shard(node.index()));
            }
        }
        let log_copies = self.log_copies.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(log_copies) = log_copies {
            log_copies.stop(deadline);
        }
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(copies) = copies {
            copies.stop(deadline);
        }
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(owners) = owners {
            owners.release(deadline);
        }
        kept
    }
}

fn all_finished(threads: &[JoinHandle<()>], until: Instant) -> bool {
    while !threads.iter().all(JoinHandle::is_finished) {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.stop(Duration::from_secs(5)) {
            tracing::error!(%error, "stopping the server failed");
        }
    }
}

#[cfg(test)]
mod tests;
