//! A server: each shard runs on a separate thread with a single-threaded runtime.

mod thread;

use crate::auth::access::Access;
use crate::auth::audit::Audit;
use crate::auth::budget::Budgets;
use crate::auth::peer::unauthenticated::Unauthenticated;
use crate::auth::reload::Reload;
use crate::auth::tls_watch::TlsWatch;
use crate::backup::copies::Copies;
use crate::cluster::loss;
use crate::cluster::map::Map;
use crate::cluster::membership::{Membership, Standing};
use crate::cluster::node::coordinator::Coordinator;
use crate::cluster::node::{Node, Phase};
use crate::cluster::peers::Peers;
use crate::cluster::reservation::Reservations;
use crate::cluster::session::Sessions;
use crate::cluster::spaces::SpaceTable;
use crate::config::{Bound, ServerConfig};
use crate::connection::recovering::RecoveryListener;
use crate::persistence::Files;
use crate::persistence::snapshots::{self, Snapshots, When};
use crate::web::{Subject, Web};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::isa::Isa;
use fastps_core::portions::Portions;
use fastps_core::shard::{Exposed, Shard, ShardConfig};
use fastps_durable::{Catalog, Member};
use fastps_transport::bearer::Bearer;
use fastps_transport::memory_budget::WorkerRoom;
use fastps_transport::tls::ServerTls;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

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
        let tls = ServerTls::load(&config.tls, config.tls_crl.as_deref())?;
        let audit = Audit::open(config.audit.as_deref())?;
        let access = Access::open(config.tokens.as_deref(), config.certificate_role, audit.clone())?;
        let tls_watch = TlsWatch::new(tls.clone(), audit.clone());
        let peers = Peers {
            tls: tls.as_ref().map(|tls| tls.others.clone()),
            bearer: Bearer::open(config.server_token.as_deref())?,
        };
        let bucket = Copies::check(config)?;
        let (bound, cluster) = config.bind()?;
        let isa = Isa::get()?;
        let (memory, source) = config.memory();
        let memory_limit = memory / bound.len().max(1) as u64;
        let (phase, watching) = watch::channel(Phase::Serving);
        let addresses: Vec<_> = bound.iter().map(|b| b.address.clone()).collect();
        let summary = config.summary(&addresses, (memory, &source));
        let socket = |b: &Bound| b.socket.as_ref().map(|socket| (b.index, socket.path().to_owned()));
        let sockets = bound.iter().filter_map(socket).collect();
        let cluster: Arc<[String]> = cluster.into();
        let (mut nodes, mut threads) = (Vec::new(), Vec::new());
        let files = bound.iter().map(|shard| Files::open(config, shard.index, cluster.len()));
        let files = files.collect::<Result<Vec<_>>>()?;
        let waiting = RecoveryListener::open(&bound, &files, tls.as_ref())?;
        let subject =
            Subject::new(bound.iter().map(|b| b.index).zip(files.iter().cloned()).collect(), access.clone());
        let web = Web::open(config, tls.as_ref(), subject.clone())?;
        let mut cores = Vec::new();
        for (shard, files) in bound.iter().zip(&files) {
            let mut shard_config = ShardConfig::new(shard.index, memory_limit, isa);
            shard_config.policy.clone_from(&config.policy);
            shard_config.sink.clone_from(&config.sink);
            if let Some(journal) = files.journal() {
                shard_config.sink = Some(journal.clone());
            }
            shard_config.exposed = exposed(shard.index, memory_limit);
            let core = Shard::new(shard_config);
            cores.push((files.recover(&core)?, core));
        }
        drop(waiting);
        let mut ready = Vec::new();
        for ((shard, files), (catalog, core)) in bound.into_iter().zip(files).zip(cores) {
            let sessions = Sessions::new(config.lease, core.meter().clone());
            sessions.restore(&catalog, Instant::now())?;
            restore_memberships(&core, &catalog);
            let reservations = Reservations::new(
                config.reservation_lease,
                WorkerRoom(config.room_for_workers),
                files.clone(),
            );
            reservations.restore(&core, &catalog.reservations, Instant::now());
            let server = files.journal().map_or_else(random, |journal| Ok(journal.incarnation()))?;
            let membership = membership(shard.index, server, catalog.cluster_id, config.accept_loss);
            let map = if shard.index == 0 {
                let map = Map::new(cluster.len(), core.meter().clone(), config.reservation_lease);
                Some(Mutex::new(map.restore(catalog.map, files.clone())?))
            } else {
                None
            };
            let portions = Mutex::new(Portions::new(random()?, core.meter().clone()));
            let is_live = |client| sessions.is_live(client);
            let space_table = SpaceTable::restore(random()?, core.meter().clone(), catalog.spaces, is_live)?;
            let node = Arc::new(Node {
                shard: Arc::new(core),
                server,
                cluster: cluster.clone(),
                coordinator: Coordinator::new(&nodes, &cluster, peers.clone()),
                membership,
                access: access.clone(),
                tls_watch: tls_watch.clone(),
                budgets: Budgets::default(),
                unauthenticated: Unauthenticated::new(memory_limit),
                insecure: config.insecure && config.danger().is_some(),
                peers: peers.clone(),
                sessions,
                spin: config.spin,
                reservations,
                files,
                gate: Arc::default(),
                programs: Semaphore::new(1),
                map,
                portions,
                space_table,
                phase: watching.clone(),
                pins: Arc::default(),
                connections: AtomicU64::new(0),
                connections_refused: AtomicU64::new(0),
                handshakes_failed: AtomicU64::new(0),
                floods_cut: AtomicU64::new(0),
                streams_reset: AtomicU64::new(0),
                values_lent: AtomicU64::new(0),
                frames: AtomicU64::new(0),
                measures: Arc::default(),
                frames_swept: AtomicU64::new(0),
                swept: AtomicBool::new(false),
            });
            if let Some(loss) = loss::found_at_start(&node)?.filter(|_| !config.accept_loss) {
                return Err(node.lost(&loss));
            }
            nodes.push(node.clone());
            ready.push((shard, node));
        }
        for (shard, node) in ready {
            threads.push(thread::spawn(shard, node, tls.clone(), config.local_socket(), config.danger())?);
        }
        let copies = bucket.map(|bucket| Copies::start(bucket, config, &nodes)).transpose()?.flatten();
        let copies = Mutex::new(copies);
        let shards = nodes.iter().map(|node| (node.shard.clone(), node.files.clone()));
        let when = When { every: config.snapshot_every, after: config.snapshot_after };
        let snapshots = Mutex::new(Some(Snapshots::start(shards, when)?));
        let threads = Mutex::new(threads);
        subject.show(&nodes);
        let reload = Reload::start(&access, &tls_watch)?;
        let version = env!("CARGO_PKG_VERSION");
        audit.record(
            "start",
            json!({"version": version, "addresses": addresses, "insecure": config.insecure && config.danger().is_some()}),
        )?;
        Ok(Self { addresses, summary, sockets, nodes, phase, threads, snapshots, copies, web, reload })
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
        if self.nodes.iter().any(|node| node.connections.load(Ordering::Relaxed) > 0) {
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
            node.access.audit.summarize(true);
            node.shard.end_waiting();
            let Some(journal) = node.files.journal() else { continue };
            let taken = snapshots::take(&node.shard, &node.files);
            journal.close();
            if let (false, Err(error)) = (taken, journal.check()) {
                let lost = format!("this server's state is not on its disk: {}", error.message);
                kept = Err(Error::new(error.kind, lost).shard(node.index()));
            }
        }
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(copies) = copies {
            copies.stop(deadline);
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

/// Memory in which clients on this machine read values, if the system has it.
fn exposed(shard: u32, limit: u64) -> Option<Arc<Exposed>> {
    Exposed::new(limit).inspect_err(|error| tracing::info!(shard, %error, "values are sent, not lent")).ok()
}

fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| internal("no random numbers", error))?;
    Ok(u64::from_ne_bytes(bytes) | 1)
}

/// Membership of a shard before it has heard from shard 0.
fn membership(shard: u32, server: u64, cluster_id: u64, accept_loss: bool) -> Membership {
    if shard > 0 {
        return Membership::new(cluster_id, Standing::Waits(None), accept_loss);
    }
    let cluster_id = if cluster_id == 0 { server } else { cluster_id };
    Membership::new(cluster_id, Standing::Serves, accept_loss)
}

/// Restores the memberships of workers of the former process. Each has a lease to show that it lives.
fn restore_memberships(shard: &Shard, catalog: &Catalog) {
    for Member { client, group, seat } in &catalog.members {
        if !catalog.sessions.contains(client) {
            continue;
        }
        if let Err(error) = shard.join(*group, *client, seat) {
            tracing::warn!(shard = shard.index(), %error, "a worker's place could not be restored");
        }
    }
    catalog.complete.iter().for_each(|group| shard.groups().note_complete(*group));
}

#[cfg(test)]
mod tests;
