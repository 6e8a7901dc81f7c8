//! A look at a cluster without a session: the statistics of each shard, or why it does not answer.

use crate::address::{check_local, is_same};
use crate::connect::{MAX_SHARDS, unreachable};
use crate::link::unary::request;
use crate::options::Transport;
use crate::signed::Signed;
use crate::state::time::after;
use crate::stranger::stranger;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::verbs::{GroupState, SpaceInfo, WorkerState};
use fastps_proto::MAX_MESSAGE_BYTES;
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use fastps_transport::bearer::Bearer;
use fastps_transport::tls::{ClientTls, TlsFiles};
use fastps_transport::{channel, convert, unix};
use futures_util::future::join_all;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// How long the others may take once a shard has answered.
const PATIENCE: Duration = Duration::from_secs(2);
/// The same, for a shard that was silent when it was asked before.
const NEXT_PATIENCE: Duration = Duration::from_millis(250);

/// Statistics of a shard.
#[derive(Clone, Debug)]
pub struct ShardStats {
    /// Index in the cluster.
    pub shard: u32,
    /// Addresses of all shards; empty if the server is of an earlier version.
    pub cluster: Vec<String>,
    /// Addresses of the servers that own the shards at present, where the servers have leases; shard 0 only. Empty text:
    /// it knows of none.
    pub owners: Vec<String>,
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

impl ClusterView {
    /// The addresses of the shards that do not answer.
    pub fn silent(&self) -> Vec<String> {
        let silent = self.shards.iter().filter(|view| view.answer.is_err());
        silent.map(|view| view.address.clone()).collect()
    }
}

/// Asks all shards of a cluster for their statistics at the same time, by the addresses of some or all of
/// them. Waits `timeout` for the first answer; then the others have two seconds, and less if they were
/// `silent` before. Fails only if no shard answers, or if the addresses or the TLS files cannot be used.
pub fn inspect(
    addresses: &[String],
    tls: &TlsFiles,
    token_file: Option<&Path>,
    timeout: Duration,
    silent: &[String],
) -> Result<ClusterView> {
    let asker = Asker::new(tls, token_file, timeout, silent)?;
    run(asker.look(addresses))
}

/// Does the work on this thread.
pub(crate) fn run<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let failed = |error| Error::new(Kind::Internal, format!("cannot make a runtime: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(work)
}

/// Asks the shards, with the credentials of this end.
pub(crate) struct Asker<'a> {
    tls: Option<ClientTls>,
    bearer: Bearer,
    deadline: Instant,
    silent: &'a [String],
    /// Set once a shard has answered.
    answered: watch::Sender<bool>,
}

/// Calls with the token.
type Control = ControlClient<InterceptedService<Channel, Signed>>;

impl<'a> Asker<'a> {
    pub(crate) fn new(
        tls: &TlsFiles,
        token_file: Option<&Path>,
        timeout: Duration,
        silent: &'a [String],
    ) -> Result<Self> {
        let (tls, bearer) = (ClientTls::load(tls, None)?, Bearer::open(token_file)?);
        Ok(Self { tls, bearer, deadline: after(timeout), silent, answered: watch::Sender::new(false) })
    }

    pub(crate) async fn look(&self, addresses: &[String]) -> Result<ClusterView> {
        addresses.iter().try_for_each(|address| check_local(address, Transport::Auto))?;
        let mut asked = addresses.to_vec();
        asked.dedup();
        let mut shards = self.ask_all(&asked).await;
        if shards.iter().all(|view| view.answer.is_err()) {
            let failed = |view: ShardView| Some((view.address, view.answer.err()?));
            return Err(unreachable(&shards.into_iter().filter_map(failed).collect::<Vec<_>>()));
        }
        self.ask_listed(&listed(&shards, |stats| stats.cluster.clone())?, &mut shards).await;
        self.ask_listed(&listed(&shards, |stats| stats.owners.clone())?, &mut shards).await;
        shards.sort_by_key(|view| (view.shard.unwrap_or(u32::MAX), view.answer.is_err()));
        shards.dedup_by(|a, b| a.shard.is_some() && a.shard == b.shard);
        let spaces = match shards.iter().find(|view| view.shard == Some(0) && view.answer.is_ok()) {
            Some(first) => self.list_spaces(&first.address).await.unwrap_or_default(),
            None => Vec::new(),
        };
        Ok(ClusterView { shards, spaces })
    }

    /// Asks the shards that have not answered, except at an address that was silent. Empty addresses are unknown.
    async fn ask_listed(&self, listed: &[String], shards: &mut Vec<ShardView>) {
        let mut others = Vec::new();
        for (index, address) in (0..).zip(listed) {
            let answered = shards.iter().any(|view| view.shard == Some(index) && view.answer.is_ok());
            if answered || address.is_empty() {
                continue;
            }
            match shards.iter_mut().find(|view| view.answer.is_err() && is_same(&view.address, address)) {
                Some(silent) => silent.shard = Some(index),
                None => others.push((index, address.clone())),
            }
        }
        let addresses: Vec<_> = others.iter().map(|(_, address)| address.clone()).collect();
        for ((index, _), mut view) in others.into_iter().zip(self.ask_all(&addresses).await) {
            view.shard = view.shard.or(Some(index));
            shards.push(view);
        }
    }

    async fn ask_all(&self, addresses: &[String]) -> Vec<ShardView> {
        join_all(addresses.iter().map(|address| self.ask(address))).await
    }

    pub(crate) fn control(&self, address: &str) -> Result<Control> {
        let tls = self.tls.as_ref().filter(|_| unix::path(address).is_none());
        self.bearer.check_address(address, tls.is_some())?;
        let control = ControlClient::with_interceptor(channel(address, tls)?, Signed(self.bearer.clone()));
        Ok(control.max_decoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// The time that is left.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// A request whose call ends later than [`Self::answer`], which has a better message.
    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        request(message, self.left() + Duration::from_secs(1))
    }

    /// The answer of a call within the time that is left.
    pub(crate) async fn answer<T>(
        &self,
        address: &str,
        call: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        let silent = format!("cannot connect to {address}: no answer within the timeout");
        let answer = tokio::time::timeout(self.left(), call).await;
        let answer = answer.map_err(|_| Error::new(Kind::Connection, silent))?;
        answer.map(Response::into_inner).map_err(|status| convert::error_from_status(&status))
    }

    pub(crate) async fn stats(&self, address: &str, changed: Vec<String>) -> Result<pb::StatsResponse> {
        let stats = self.control(address)?.stats(self.request(pb::StatsRequest { changed })).await;
        stats.map(Response::into_inner).map_err(|status| convert::error_from_status(&status))
    }

    async fn ask(&self, address: &str) -> ShardView {
        let answer = async {
            let answer = self.stats(address, Vec::new()).await.map(read);
            let strange = answer.as_ref().is_err_and(|e| matches!(e.kind, Kind::Internal | Kind::Connection));
            if !strange || unix::path(address).is_some() {
                return answer;
            }
            stranger(address, self.tls.is_some()).await.map_or(answer, Err)
        };
        let was_silent = self.silent.iter().any(|silent| is_same(silent, address));
        let late = async {
            let _ = self.answered.subscribe().wait_for(|answered| *answered).await;
            tokio::time::sleep(if was_silent { NEXT_PATIENCE } else { PATIENCE }).await;
        };
        let error = |kind, message: &str| Err(Error::new(kind, message));
        let answer = tokio::select! {
            answer = answer => answer,
            () = late => error(Kind::Deadline, "no answer within 2 seconds after another shard's"),
            () = tokio::time::sleep(self.left()) => error(Kind::Connection, "no answer within the timeout"),
        };
        if answer.is_ok() {
            self.answered.send_replace(true);
        }
        let shard = answer.as_ref().ok().map(|stats| stats.shard);
        ShardView { address: address.to_owned(), shard, answer }
    }

    async fn list_spaces(&self, address: &str) -> Result<Vec<SpaceInfo>> {
        let (mut control, mut all, mut after) = (self.control(address)?, Vec::new(), String::new());
        loop {
            let ask = pb::ListSpacesRequest { after: after.clone() };
            let page = self.answer(address, control.list_spaces(self.request(ask))).await?;
            all.extend(page.spaces.into_iter().map(convert::space_from_wire));
            if page.next.is_empty() || page.next <= after {
                return Ok(all);
            }
            after = page.next;
        }
    }
}

/// Addresses of shards, according to shard 0, or to another one where that has not answered.
fn listed(shards: &[ShardView], list: impl Fn(&ShardStats) -> Vec<String>) -> Result<Vec<String>> {
    let answers = || shards.iter().filter_map(|view| view.answer.as_ref().ok());
    let says = answers().find(|stats| stats.shard == 0).or_else(|| answers().next());
    let listed = says.map(list).unwrap_or_default();
    if listed.len() > MAX_SHARDS {
        let error = Error::new(Kind::Config, "the servers list too many shards");
        return Err(error.expected(format!("at most {MAX_SHARDS}"), listed.len()));
    }
    Ok(listed)
}

fn read(answer: pb::StatsResponse) -> ShardStats {
    ShardStats {
        shard: answer.shard,
        cluster: answer.cluster,
        owners: answer.owners.into_iter().map(|owner| owner.address).collect(),
        version: answer.version,
        trouble: Some(answer.trouble).filter(|trouble| !trouble.is_empty()),
        insecure: answer.insecure,
        counters: answer.counters.into_iter().collect(),
        workers: answer.sessions.into_iter().map(convert::worker_state_from_wire).collect(),
        groups: answer.groups.into_iter().map(convert::group_state_from_wire).collect(),
    }
}
