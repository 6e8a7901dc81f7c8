//! The steps of a server's start.

use super::{internal, thread};
use crate::auth::access::Access;
use crate::auth::audit::Audit;
use crate::auth::budget::Budgets;
use crate::auth::peer::unauthenticated::Unauthenticated;
use crate::auth::tls_watch::TlsWatch;
use crate::backup::Bucket;
use crate::backup::owners::{Claiming, Owners};
use crate::cluster::loss;
use crate::cluster::map::Map;
use crate::cluster::membership::{Membership, Standing};
use crate::cluster::node::coordinator::{Coordinator, OwnCoordinator};
use crate::cluster::node::owners::{KnownOwners, OwnerRecords};
use crate::cluster::node::{ConnectionCounters, Node, Phase, Security};
use crate::cluster::peers::Peers;
use crate::cluster::reservation::Reservations;
use crate::cluster::session::Sessions;
use crate::cluster::spaces::SpaceTable;
use crate::config::{Bound, ServerConfig};
use crate::persistence::Files;
use crate::persistence::snapshots::{Snapshots, When};
use crate::web::{Subject, Web};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::isa::Isa;
use fastps_core::portions::Portions;
use fastps_core::shard::{Exposed, Shard, ShardConfig};
use fastps_durable::copy::{Vacancy, vacancy};
use fastps_durable::owner::Record;
use fastps_durable::{Catalog, Member, shard_folder};
use fastps_proto::v1 as pb;
use fastps_transport::bearer::Bearer;
use fastps_transport::memory_budget::WorkerRoom;
use fastps_transport::tls::ServerTls;
use futures_util::future::BoxFuture;
use serde_json::json;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::{Semaphore, watch};

/// What the shards of a process know callers and peers by.
pub(super) struct Credentials {
    pub(super) tls: Option<ServerTls>,
    pub(super) access: Arc<Access>,
    pub(super) tls_watch: Arc<TlsWatch>,
    peers: Peers,
    insecure: bool,
}

impl Credentials {
    /// Reads the files.
    pub(super) fn load(config: &ServerConfig) -> Result<Self> {
        let tls = ServerTls::load(&config.tls, config.tls_crl.as_deref())?;
        let audit = Audit::open(config.audit.as_deref())?;
        let access = Access::open(config.tokens.as_deref(), config.certificate_role, audit.clone())?;
        let tls_watch = TlsWatch::new(tls.clone(), audit);
        let peers = Peers {
            tls: tls.as_ref().map(|tls| tls.others.clone()),
            bearer: Bearer::open(config.server_token.as_deref())?,
        };
        let insecure = config.insecure && config.danger().is_some();
        Ok(Self { tls, access, tls_watch, peers, insecure })
    }

    fn security(&self, memory_limit: u64) -> Security {
        Security {
            insecure: self.insecure,
            access: self.access.clone(),
            tls_watch: self.tls_watch.clone(),
            budgets: Budgets::default(),
            unauthenticated: Unauthenticated::new(memory_limit),
            peers: self.peers.clone(),
        }
    }
}

/// A shard's state from its files.
type Recovered = (Catalog, Shard);

/// What the steps share.
pub(super) struct Start<'a> {
    pub(super) config: &'a ServerConfig,
    pub(super) credentials: Credentials,
    pub(super) cluster: Arc<[String]>,
    /// Of each shard.
    pub(super) memory_limit: u64,
    pub(super) phase: watch::Receiver<Phase>,
    /// Set by who no longer waits for the start.
    pub(super) given_up: &'a AtomicBool,
}

impl Start<'_> {
    pub(super) fn open_files(&self, bound: &[Bound]) -> Result<Vec<Files>> {
        bound.iter().map(|shard| Files::open(self.config, shard.index, self.cluster.len())).collect()
    }

    pub(super) fn open_web(&self, bound: &[Bound], files: &[Files]) -> Result<(Arc<Subject>, Option<Web>)> {
        let shards = bound.iter().map(|b| b.index).zip(files.iter().cloned()).collect();
        let subject = Subject::new(shards, self.credentials.access.clone());
        let web = Web::open(self.config, self.credentials.tls.as_ref(), subject.clone())?;
        Ok((subject, web))
    }

    /// Reads the state of all shards from their files.
    pub(super) fn recover(&self, bound: &[Bound], files: &[Files]) -> Result<Vec<Recovered>> {
        let isa = Isa::get()?;
        let recover = |(shard, files): (&Bound, &Files)| {
            let mut settings = ShardConfig::new(shard.index, self.memory_limit, isa);
            settings.policy.clone_from(&self.config.policy);
            settings.sink.clone_from(&self.config.sink);
            if let Some(journal) = files.journal() {
                settings.sink = Some(journal.clone());
            }
            settings.exposed = exposed(shard.index, self.memory_limit);
            let core = Shard::new(settings);
            Ok((files.recover(&core)?, core))
        };
        bound.iter().zip(files).map(recover).collect()
    }

    /// Reads the state of all shards, and claims them: waits until this server owns them. A shard that is taken over
    /// has nothing to read before that.
    pub(super) fn begin(
        &self,
        bound: &[Bound],
        files: &[Files],
        bucket: Option<&Bucket>,
    ) -> Result<(Vec<Recovered>, Option<Owners>)> {
        if takes_over(self.config, bound)? {
            let none: Vec<_> = bound.iter().map(|_| 0).collect();
            let owners = self.claim(bound, files, &none, bucket, true)?;
            return Ok((self.recover(bound, files)?, owners));
        }
        let recovered = self.recover(bound, files)?;
        let clusters: Vec<_> = recovered.iter().map(|(catalog, _)| catalog.cluster_id).collect();
        let owners = self.claim(bound, files, &clusters, bucket, false)?;
        Ok((recovered, owners))
    }

    /// Claims the shards, if servers of this cluster do. `clusters`: the identities that their files name.
    fn claim(
        &self,
        bound: &[Bound],
        files: &[Files],
        clusters: &[u64],
        bucket: Option<&Bucket>,
        takes_over: bool,
    ) -> Result<Option<Owners>> {
        let (Some(bucket), Some(lease), Some(data_dir)) =
            (bucket, self.config.owner_lease, &self.config.data_dir)
        else {
            return Ok(None);
        };
        let claiming = |((shard, files), cluster): ((&Bound, &Files), &u64)| {
            let (owner, journal) = (files.owner()?.clone(), files.journal()?);
            let incarnation = journal.incarnation();
            let known = membership(shard.index, incarnation, *cluster, false).id();
            Some(Claiming {
                owner,
                shard: shard.index,
                directory: shard_folder(data_dir, shard.index),
                cluster: (known != 0).then_some(known),
                address: shard.address.clone(),
                incarnation,
                locked: journal.locked_file(),
                journal: Some(journal.clone()),
                copies_log: self.config.copy_log.is_some(),
                takes_over: takes_over.then_some(self.cluster.len() as u32),
            })
        };
        let shards = bound.iter().zip(files).zip(clusters).filter_map(claiming).collect();
        Owners::claim(bucket, lease, self.config.accept_loss, shards, self.given_up).map(Some)
    }

    /// The shards with their surroundings. Fails if one has lost slices.
    pub(super) fn nodes(
        &self,
        bound: &[Bound],
        files: Vec<Files>,
        recovered: Vec<(Catalog, Shard)>,
    ) -> Result<Vec<Arc<Node>>> {
        let mut nodes = Vec::new();
        for ((shard, files), (catalog, core)) in bound.iter().zip(files).zip(recovered) {
            let node = Arc::new(self.node(&nodes, shard.index, files, catalog, core)?);
            if let Some(loss) = loss::found_at_start(&node)?.filter(|_| !self.config.accept_loss) {
                return Err(node.lost(&loss));
            }
            nodes.push(node);
        }
        Ok(nodes)
    }

    /// One of them, after those with smaller indices: sessions come first, since the others ask which clients
    /// live.
    fn node(
        &self,
        nodes: &[Arc<Node>],
        index: u32,
        files: Files,
        catalog: Catalog,
        core: Shard,
    ) -> Result<Node> {
        let (config, meter) = (self.config, core.meter().clone());
        let sessions = Sessions::new(config.lease, meter.clone()).refusing(&config.refuse_workers);
        sessions.restore(&catalog, files.strongest_ack(), Instant::now())?;
        restore_memberships(&core, &catalog);
        let room = WorkerRoom(config.room_for_workers);
        meter.keep_for_outcomes(room.bytes_per_slice());
        let reservations = Reservations::new(config.reservation_lease, room, files.clone());
        reservations.restore(&core, &catalog.reservations, Instant::now());
        let server = files.journal().map_or_else(random, |journal| Ok(journal.incarnation()))?;
        let coordinator = if index == 0 {
            let map = Map::new(self.cluster.len(), meter.clone(), config.reservation_lease);
            let map = Mutex::new(map.restore(catalog.map, files.clone())?);
            let portions = Mutex::new(Portions::new(random()?, meter.clone()));
            let owners = self.owner_records()?.map(|records| KnownOwners::new(records, self.cluster.len()));
            Coordinator::Own(Box::new(OwnCoordinator { map, portions, owners }))
        } else {
            Coordinator::of_others(
                nodes,
                &self.cluster,
                self.credentials.peers.clone(),
                self.owner_records()?,
            )
        };
        let is_live = |client| sessions.is_live(client);
        let space_table = SpaceTable::restore(random()?, meter, catalog.spaces, is_live)?;
        Ok(Node {
            shard: Arc::new(core),
            server,
            cluster: self.cluster.clone(),
            coordinator,
            membership: membership(index, server, catalog.cluster_id, config.accept_loss),
            security: self.credentials.security(self.memory_limit),
            sessions,
            spin: config.spin,
            reservations,
            files,
            gate: Arc::default(),
            programs: Semaphore::new(1),
            space_table,
            phase: self.phase.clone(),
            pins: Arc::default(),
            counters: ConnectionCounters::default(),
            measures: Arc::default(),
            swept: AtomicBool::new(false),
        })
    }

    /// The records of the shards' owners, if their servers have some.
    fn owner_records(&self) -> Result<Option<OwnerRecords>> {
        // The connections of a bucket end with the runtime that has opened them.
        let url = self.config.copies_to().filter(|_| self.config.owner_lease.is_some());
        let bucket = url.map(Bucket::open).transpose()?;
        Ok(bucket.map(|bucket| {
            OwnerRecords(Box::new(move |shard| -> BoxFuture<'static, Option<pb::ShardOwner>> {
                let bucket = bucket.clone();
                Box::pin(async move {
                    let Record { address, term, .. } = bucket.open_owner(shard).await.ok().flatten()?;
                    Some(pb::ShardOwner { address, term })
                })
            }))
        }))
    }

    /// Starts the thread of each shard, which serves clients from then on.
    pub(super) fn threads(&self, bound: Vec<Bound>, nodes: &[Arc<Node>]) -> Result<Vec<JoinHandle<()>>> {
        let (socket, danger) = (self.config.local_socket(), self.config.danger());
        let start = |(shard, node): (Bound, &Arc<Node>)| {
            thread::spawn(shard, node.clone(), self.credentials.tls.clone(), socket, danger)
        };
        bound.into_iter().zip(nodes).map(start).collect()
    }

    pub(super) fn snapshots(&self, nodes: &[Arc<Node>]) -> Result<Snapshots> {
        let shards = nodes.iter().map(|node| (node.shard.clone(), node.files.clone()));
        Snapshots::start(
            shards,
            When { every: self.config.snapshot_every, after: self.config.snapshot_after },
        )
    }

    pub(super) fn list_in_audit(&self, addresses: &[String]) -> Result<()> {
        let version = env!("CARGO_PKG_VERSION");
        let fields =
            json!({"version": version, "addresses": addresses, "insecure": self.credentials.insecure});
        self.credentials.access.audit.record("start", fields)
    }
}

/// Returns whether a shard is taken over from the bucket: its directory is empty. If a server that owned the shard has
/// used it, this is a restart.
fn takes_over(config: &ServerConfig, bound: &[Bound]) -> Result<bool> {
    let (Some(_), Some(data_dir)) = (&config.take_over, &config.data_dir) else { return Ok(false) };
    let Some(shard) = bound.iter().find(|bound| Some(bound.index) == config.shard) else {
        let error =
            Error::new(Kind::Config, "the shard to take over is not this server's place in --cluster");
        let own = bound.iter().map(|bound| format!("--shard {}", bound.index)).collect::<Vec<_>>().join(", ");
        return Err(
            error.expected(own, config.shard.map_or_else(String::new, |shard| format!("--shard {shard}")))
        );
    };
    let directory = shard_folder(data_dir, shard.index);
    match vacancy(&directory)? {
        Vacancy::Empty => Ok(true),
        Vacancy::Served => Ok(false),
        Vacancy::Taken => {
            let message = format!("{} has files that no owner of the shard has used", directory.display());
            Err(Error::new(Kind::Config, message)
                .shard(shard.index)
                .expected("an empty directory, into which the shard is taken over", "another one"))
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
