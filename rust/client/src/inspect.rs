//! A look at a cluster without a session: the statistics of each shard, or why it does not answer.

use crate::address::{check_local, is_same};
use crate::connect::{MAX_SHARDS, unreachable};
use crate::link::unary::request;
use crate::options::Transport;
use crate::state::time::after;
use crate::stranger::stranger;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::verbs::{GroupState, SpaceInfo, WorkerState};
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use fastps_transport::bearer::Bearer;
use fastps_transport::tls::{ClientTls, TlsFiles};
use fastps_transport::{channel, convert, unix};
use futures_util::future::join_all;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};

/// Statistics of a shard.
#[derive(Clone, Debug)]
pub struct ShardStats {
    /// Index in the cluster.
    pub shard: u32,
    /// Addresses of all shards; empty if the server is of an earlier version.
    pub cluster: Vec<String>,
    /// Version of the server.
    pub version: String,
    /// Why it refuses calls at present; `None`: it serves.
    pub trouble: Option<String>,
    /// It was started with `--insecure`.
    pub insecure: bool,
    /// Counters by name.
    pub counters: BTreeMap<String, u64>,
    /// Sessions of clients.
    pub workers: Vec<WorkerState>,
    /// Groups that have workers; shard 0 only.
    pub groups: Vec<GroupState>,
}

/// A shard as it answers.
#[derive(Debug)]
pub struct ShardView {
    /// Address at which it was asked.
    pub address: String,
    /// Index in the cluster, if it is known.
    pub shard: Option<u32>,
    /// Its statistics, or why there are none.
    pub answer: Result<ShardStats>,
}

/// A cluster as its shards answer.
#[derive(Debug)]
pub struct ClusterView {
    /// The shards, in the order of their indices.
    pub shards: Vec<ShardView>,
    /// The open spaces of vectors, if shard 0 answers.
    pub spaces: Vec<SpaceInfo>,
}

/// Asks every shard of a cluster for its statistics, by the addresses of some or all of them. Fails only if
/// no shard answers, or if the addresses or the TLS files cannot be used.
pub fn inspect(
    addresses: &[String],
    tls: &TlsFiles,
    token_file: Option<&Path>,
    timeout: Duration,
) -> Result<ClusterView> {
    addresses.iter().try_for_each(|address| check_local(address, Transport::Auto))?;
    let shown = Shown { tls: ClientTls::load(tls, None)?, bearer: Bearer::open(token_file)? };
    let failed = |error| Error::new(Kind::Internal, format!("cannot make a runtime: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(look(addresses, &shown, after(timeout)))
}

/// Credentials of this end.
struct Shown {
    tls: Option<ClientTls>,
    bearer: Bearer,
}

/// Puts the token into each call.
#[derive(Clone)]
struct Signed(Bearer);

impl Interceptor for Signed {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        self.0.sign(request.metadata_mut().as_mut());
        Ok(request)
    }
}

async fn look(addresses: &[String], shown: &Shown, deadline: Instant) -> Result<ClusterView> {
    let mut asked = addresses.to_vec();
    asked.dedup();
    let mut shards = ask_all(&asked, shown, deadline).await;
    if shards.iter().all(|view| view.answer.is_err()) {
        let failed = |view: ShardView| Some((view.address, view.answer.err()?));
        return Err(unreachable(&shards.into_iter().filter_map(failed).collect::<Vec<_>>()));
    }
    let listed = shards.iter().find_map(|view| Some(view.answer.as_ref().ok()?.cluster.clone()));
    let listed = listed.unwrap_or_default();
    if listed.len() > MAX_SHARDS {
        let error = Error::new(Kind::Config, "the servers list too many shards");
        return Err(error.expected(format!("at most {MAX_SHARDS}"), listed.len()));
    }
    let mut others = Vec::new();
    for (index, address) in (0..).zip(&listed) {
        if shards.iter().any(|view| view.shard == Some(index)) {
            continue;
        }
        match shards.iter_mut().find(|view| view.shard.is_none() && is_same(&view.address, address)) {
            Some(silent) => silent.shard = Some(index),
            None => others.push((index, address.clone())),
        }
    }
    let addresses: Vec<_> = others.iter().map(|(_, address)| address.clone()).collect();
    for ((index, _), mut view) in others.into_iter().zip(ask_all(&addresses, shown, deadline).await) {
        view.shard = view.shard.or(Some(index));
        shards.push(view);
    }
    shards.sort_by_key(|view| view.shard.unwrap_or(u32::MAX));
    shards.dedup_by(|a, b| a.shard.is_some() && a.shard == b.shard);
    let spaces = match shards.iter().find(|view| view.shard == Some(0) && view.answer.is_ok()) {
        Some(first) => list_spaces(&first.address, shown, deadline).await.unwrap_or_default(),
        None => Vec::new(),
    };
    Ok(ClusterView { shards, spaces })
}

async fn ask_all(addresses: &[String], shown: &Shown, deadline: Instant) -> Vec<ShardView> {
    join_all(addresses.iter().map(|address| ask(address, shown, deadline))).await
}

fn control(address: &str, shown: &Shown) -> Result<ControlClient<InterceptedService<Channel, Signed>>> {
    let tls = shown.tls.as_ref().filter(|_| unix::path(address).is_none());
    shown.bearer.check_address(address, tls.is_some())?;
    Ok(ControlClient::with_interceptor(channel(address, tls)?, Signed(shown.bearer.clone())))
}

async fn ask(address: &str, shown: &Shown, deadline: Instant) -> ShardView {
    let answer = async {
        let left = deadline.saturating_duration_since(Instant::now());
        let stats = control(address, shown)?.stats(request(pb::StatsRequest::default(), left)).await;
        stats.map(|answer| read(answer.into_inner())).map_err(|status| convert::error_from_status(&status))
    };
    let silent = || Error::new(Kind::Connection, "no answer within the timeout");
    let mut answer = tokio::time::timeout_at(deadline.into(), answer).await.unwrap_or_else(|_| Err(silent()));
    let strange = answer.as_ref().is_err_and(|e| matches!(e.kind, Kind::Internal | Kind::Connection));
    if strange
        && unix::path(address).is_none()
        && let Some(error) = stranger(address, shown.tls.is_some()).await
    {
        answer = Err(error);
    }
    let shard = answer.as_ref().ok().map(|stats| stats.shard);
    ShardView { address: address.to_owned(), shard, answer }
}

fn read(answer: pb::StatsResponse) -> ShardStats {
    ShardStats {
        shard: answer.shard,
        cluster: answer.cluster,
        version: answer.version,
        trouble: Some(answer.trouble).filter(|trouble| !trouble.is_empty()),
        insecure: answer.insecure,
        counters: answer.counters.into_iter().collect(),
        workers: answer.sessions.into_iter().map(convert::worker_state_from_wire).collect(),
        groups: answer.groups.into_iter().map(convert::group_state_from_wire).collect(),
    }
}

async fn list_spaces(address: &str, shown: &Shown, deadline: Instant) -> Result<Vec<SpaceInfo>> {
    let (mut control, mut all, mut after) = (control(address, shown)?, Vec::new(), String::new());
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let ask = pb::ListSpacesRequest { after: after.clone() };
        let page = control.list_spaces(request(ask, left)).await;
        let page = page.map_err(|status| convert::error_from_status(&status))?.into_inner();
        all.extend(page.spaces.into_iter().map(convert::space_from_wire));
        if page.next.is_empty() || page.next <= after {
            return Ok(all);
        }
        after = page.next;
    }
}
