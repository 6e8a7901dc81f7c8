//! Connects: says hello to every address, puts the shards in order, and fetches the map.

use crate::address::{check_local, is_same};
use crate::client::Client;
use crate::link::deadlines::Deadlines;
use crate::link::refresh::refresh;
use crate::link::route::ServerRoute;
use crate::link::session::drive;
use crate::link::state::Link;
use crate::link::unary;
use crate::link::unary::Who;
use crate::link::wait::Links;
use crate::options::{Ack, ConnectOptions};
use crate::signed::Signed;
use crate::state::fence::{Fence, another_cluster};
use crate::state::lost::Losses;
use crate::state::map::Map;
use crate::state::memberships::Memberships;
use crate::state::owners::Owners;
use crate::state::report::Reports;
use crate::state::resolution::Resolution;
use crate::state::run::RunNames;
use crate::state::runtime::{Driver, Process, random};
use crate::state::shared::Shared;
use crate::state::stats::Counters;
use crate::state::time::after;
use crate::state::time::jitter;
use crate::state::waiting::{self, Wait};
use crate::stranger::stranger;
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use fastps_transport::bearer::Bearer;
use fastps_transport::convert;
use fastps_transport::loopback::is_loopback_tcp;
use fastps_transport::secret::Secret;
use fastps_transport::tls::ClientTls;
use fastps_transport::{channel, open_files, unix};
use futures_util::future::try_join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// Most shards of a cluster.
pub(crate) const MAX_SHARDS: usize = 4096;
/// How long a client that has met all shards waits for the other addresses that it was given.
const OTHERS_WAIT: Duration = Duration::from_secs(1);

/// Time between two questions who owns the shards, and limit of one.
const OWNERS_EVERY: Duration = Duration::from_millis(500);
const OWNERS_TIMEOUT: Duration = Duration::from_secs(5);

/// Identity, settings and deadline of a hello.
#[derive(Clone)]
struct Caller {
    name: String,
    secret: Secret,
    bearer: Bearer,
    tls: Option<ClientTls>,
    ack: Ack,
    deadline: Instant,
}

/// A server that answered hello.
struct Met {
    address: String,
    channel: Channel,
    client: u64,
    hello: pb::HelloResponse,
}

impl Client {
    /// Connects to a cluster by the addresses (`host:port` or `unix:///path`) of some or all of its shards,
    /// in any order.
    ///
    /// With a resolver, that names the addresses, and `addresses` is not used.
    pub fn connect(addresses: &[String], options: ConnectOptions) -> Result<Arc<Self>> {
        let deadline = after(options.timeout);
        let resolution =
            options.resolver.clone().map(|resolver| Resolution::new(resolver, options.transport));
        let addresses = if resolution.is_none() { addresses } else { &[] };
        if addresses.is_empty() && resolution.is_none() {
            return Err(Error::new(Kind::Config, "no address to connect to")
                .expected("host:port or unix:///path", "nothing"));
        }
        addresses.iter().try_for_each(|address| check_local(address, options.transport))?;
        let tls = ClientTls::load(&options.tls, options.tls_server_name.as_deref())?;
        let bearer = Bearer::open(options.token_file.as_deref())?;
        addresses.iter().try_for_each(|address| bearer.check_address(address, tls.is_some()))?;
        open_files::raise();
        let driver = Driver::start(options.spin)?;
        let (secret, name) = (Secret::draw()?, options.name.clone());
        let caller = Caller {
            name,
            secret: secret.clone(),
            bearer: bearer.clone(),
            tls: tls.clone(),
            ack: options.ack,
            deadline,
        };
        let given = addresses.to_vec();
        let met = driver.drive(async |_| match &resolution {
            Some(resolution) => meet_resolved(resolution, caller).await,
            None => meet_cluster(given, caller).await,
        });
        let met = met.inspect_err(|_| driver.end())?;
        let shared = Arc::new(Shared {
            process: Process::current(),
            client: random()?,
            secret,
            bearer,
            name: options.name.clone(),
            map: Arc::new(Map::of(RunNames::new(options.run.as_deref())?)),
            ack: options.ack,
            resolution,
            owners: Owners::default(),
            checksums: options.checksums,
            counters: Counters::default(),
            incarnations: AtomicU64::new(0),
            map_is_stale: AtomicBool::new(false),
            fence: Fence::default(),
            lost: Losses::default(),
            memberships: Memberships::default(),
            report: Reports::default(),
            doubts: Mutex::default(),
        });
        let link = |met: Met| {
            let route = ServerRoute::new(met.address, options.transport, tls.clone(), options.spin);
            Link::new(shared.clone(), met.channel, met.client, &met.hello, &driver, route)
        };
        let links: Links = met.into_iter().map(link).collect();
        let client = Self {
            addresses: addresses.to_vec(),
            options,
            driver: driver.clone(),
            map: shared.map.clone(),
            shared,
            links: links.clone(),
            deadlines: Arc::default(),
            sequence: Mutex::new(0),
            registering: Arc::default(),
            spaces: Mutex::default(),
            has_portions: AtomicBool::new(false),
            closed: watch::Sender::new(false),
        };
        for link in links.iter() {
            driver.spawn(drive(link.clone(), links[0].clone()));
        }
        driver.spawn(Deadlines::run(client.deadlines.clone(), links, client.closed.subscribe()));
        let (map, link, shards) = (client.map.clone(), client.links[0].clone(), client.links.len());
        client.block(refresh(&map, &link, shards, &[], deadline))?;
        client.block(async { try_join_all(client.links.iter().map(|link| link.begun(deadline))).await })?;
        Ok(Arc::new(client))
    }

    /// Connects another client to the same cluster, within `timeout`.
    pub(crate) fn again(&self, name: Option<&str>, timeout: Duration) -> Result<Arc<Self>> {
        self.alive()?;
        let name = name.unwrap_or(&self.options.name).to_owned();
        let options = ConnectOptions { timeout, name, ..self.options.clone() };
        let other = Self::connect(&self.addresses, options)?;
        for (own, link) in self.links.iter().zip(other.links.iter()) {
            let (known, reported) = (own.addressee().cluster_id, link.addressee().cluster_id);
            if known != reported && known != 0 && reported != 0 {
                return Err(own.fenced(another_cluster(&own.address(), known, reported)));
            }
        }
        Ok(other)
    }
}

/// Says hello to the servers that the resolver names. Asks it again while they do not answer.
async fn meet_resolved(resolution: &Arc<Resolution>, caller: Caller) -> Result<Vec<Met>> {
    let mut addresses = resolution.first(caller.deadline).await?;
    loop {
        let meeting = meet_cluster(addresses.clone(), caller.clone());
        let others = tokio::select! {
            met = meeting => {
                resolution.found();
                return met;
            }
            others = resolution.other_than(&addresses) => others,
        };
        addresses = others;
    }
}

/// Says hello to all addresses, then to the shards that they list; sorted by shard. Servers that wait for a shard do not
/// hold up a client that has met all shards, and those that are gone neither.
async fn meet_cluster(mut addresses: Vec<String>, caller: Caller) -> Result<Vec<Met>> {
    addresses.sort();
    addresses.dedup();
    let given = addresses.len();
    let mut detours = BTreeMap::new();
    let mut waiting = Vec::new();
    let mut cluster = MetCluster::default();
    for met in meet_all(addresses, &caller, None, is_complete).await? {
        match unlisted(&met, given)? {
            Some(own) => {
                waiting.push(own.clone());
                detours.insert(own, met);
            }
            None => cluster.add(met)?,
        }
    }
    let listed = meet_all(std::mem::take(&mut waiting), &caller, None, |_| false)
        .await
        .map_err(|error| detour(error, &detours))?;
    for met in listed {
        if let Some(asked) = detours.get(&met.address).filter(|asked| asked.hello.shard != met.hello.shard) {
            return Err(detour(another_shard(&asked.hello, &met), &detours));
        }
        cluster.add(met)?;
    }
    let missing = cluster.missing()?;
    let count = missing.len();
    let others = meet_all(missing, &caller, cluster.0.get(&0), |met| shards_of(met) >= count).await?;
    others.into_iter().try_for_each(|met| cluster.add(met))?;
    cluster.complete()
}

/// The address that a shard reports, if it was reached at another one that may lead to several shards. A
/// caller that gives an address for every shard names each of them.
fn unlisted(met: &Met, given: usize) -> Result<Option<String>> {
    let shards = met.hello.cluster.len();
    if shards > MAX_SHARDS {
        let error = Error::new(Kind::Config, format!("{} lists too many shards", met.address));
        return Err(error.expected(format!("at most {MAX_SHARDS}"), shards));
    }
    let own = met.hello.cluster.get(met.hello.shard as usize).filter(|_| given < shards);
    let own = own.filter(|own| unix::path(&met.address).is_none() && !is_same(own, &met.address));
    Ok(own.cloned())
}

/// Error of a shard that is not reached at the address that it reports.
fn detour(mut error: Error, asked: &BTreeMap<String, Met>) -> Error {
    let each: Vec<_> = asked
        .iter()
        .map(|(own, met)| {
            format!("{} answers as shard {}, which reports {own}", met.address, met.hello.shard)
        })
        .collect();
    error.message = format!(
        "{}. {}. A client reaches each shard at the address that it reports (--advertise, --cluster), or is given an \
         address for every shard",
        error.message,
        each.join("; ")
    );
    error
}

fn another_shard(expected: &pb::HelloResponse, met: &Met) -> Error {
    let shard = |hello: &pb::HelloResponse| format!("shard {} of {}", hello.shard, hello.cluster.len());
    Error::new(Kind::Config, format!("{} answers as another shard than it should", met.address))
        .expected(shard(expected), shard(&met.hello))
}

/// The shards that answered hello.
#[derive(Default)]
struct MetCluster(BTreeMap<u32, Met>);

impl MetCluster {
    /// Fails if the shard does not belong to the same cluster as the others.
    fn add(&mut self, met: Met) -> Result<()> {
        if let Some(other) = self.0.get(&met.hello.shard) {
            let is_same_cluster =
                other.hello.cluster_id != 0 && other.hello.cluster_id == met.hello.cluster_id;
            if is_same_cluster && other.hello.term != met.hello.term {
                // A former owner that does not know it yet.
                if other.hello.term < met.hello.term {
                    self.0.insert(met.hello.shard, met);
                }
                return Ok(());
            }
            if other.hello.server != met.hello.server {
                let message = "two addresses serve the same shard of different clusters";
                let error = Error::new(Kind::Config, message).shard(met.hello.shard);
                return Err(error.expected(&other.address, &met.address));
            }
            return Ok(());
        }
        if let Some(other) = self.0.values().next() {
            check_same(other, &met)?;
        }
        self.0.insert(met.hello.shard, met);
        Ok(())
    }

    /// The addresses of the shards that have not answered hello.
    fn missing(&self) -> Result<Vec<String>> {
        let listed = self.0.values().next().map_or(&[][..], |met| &met.hello.cluster);
        if listed.len() > MAX_SHARDS {
            let error = Error::new(Kind::Config, "the servers list too many shards");
            return Err(error.expected(format!("at most {MAX_SHARDS}"), listed.len()));
        }
        let unknown = (0..).zip(listed).filter(|(shard, _)| !self.0.contains_key(shard));
        Ok(unknown.map(|(_, address)| address.clone()).collect())
    }

    /// All shards, if each has answered hello.
    fn complete(self) -> Result<Vec<Met>> {
        let listed = self.0.values().next().map_or(&[][..], |met| &met.hello.cluster);
        if self.0.len() < listed.len() {
            let message = "an address of the cluster answers as another shard than it should";
            return Err(Error::new(Kind::Config, message).expected(
                format!("{} shards", listed.len()),
                format!("{} behind {}", self.0.len(), listed.join(", ")),
            ));
        }
        Ok(self.0.into_values().collect())
    }
}

/// Fails unless two shards are of one cluster.
fn check_same(known: &Met, met: &Met) -> Result<()> {
    let size = |met: &Met| met.hello.cluster.len().max(1);
    if met.hello.shard as usize >= size(met) || size(known) != size(met) {
        let message = format!("{} does not belong to the same cluster", met.address);
        return Err(Error::new(Kind::Config, message).expected(
            format!("one of {} shards", size(known)),
            format!("shard {} of {}", met.hello.shard, met.hello.cluster.len()),
        ));
    }
    let (a, b) = (known.hello.cluster_id, met.hello.cluster_id);
    if a != b && a != 0 && b != 0 {
        let message = format!(
            "{} and {} are of different clusters: an address is wrong, or one of them was started without its data",
            known.address, met.address
        );
        let error = Error::new(Kind::Config, message);
        return Err(error.expected(format!("cluster {a:016x}"), format!("cluster {b:016x}")));
    }
    Ok(())
}

/// Returns whether these are all shards of a cluster.
fn is_complete(met: &[Met]) -> bool {
    met.first().is_some_and(|first| shards_of(met) >= first.hello.cluster.len().max(1))
}

fn shards_of(met: &[Met]) -> usize {
    met.iter().map(|met| met.hello.shard).collect::<BTreeSet<_>>().len()
}

/// Says hello to all addresses, and where shard 0, met before or here, says that the owners of shards are. Once it has
/// met enough, it gives the others a moment.
async fn meet_all(
    addresses: Vec<String>,
    caller: &Caller,
    first: Option<&Met>,
    is_enough: impl Fn(&[Met]) -> bool,
) -> Result<Vec<Met>> {
    let (mut tries, mut looks) = (JoinSet::new(), JoinSet::new());
    let mut asked = BTreeSet::new();
    let ask = |tries: &mut JoinSet<_>, address: String| {
        let caller = caller.clone();
        tries.spawn(async move { meet(&address, caller).await.map_err(|error| (address, error)) });
    };
    for address in addresses {
        asked.insert(address.clone());
        ask(&mut tries, address);
    }
    if let Some(first) = first.filter(|first| has_owners(first)) {
        looks.spawn(moved(first, caller, asked.clone()));
    }
    let (mut met, mut failed) = (Vec::<Met>::new(), Vec::new());
    loop {
        // Each try ends by itself.
        let wait = if is_enough(&met) { OTHERS_WAIT } else { Duration::MAX };
        let next = tokio::select! {
            next = tokio::time::timeout(wait, tries.join_next()) => next.unwrap_or(None),
            Some(Ok(owners)) = looks.join_next() => {
                for address in owners {
                    ask(&mut tries, address);
                }
                continue;
            }
        };
        let Some(result) = next else { break };
        match result {
            Ok(Ok(one)) => {
                if has_owners(&one) {
                    looks.spawn(moved(&one, caller, asked.clone()));
                }
                met.push(one);
            }
            Ok(Err((_, error))) if is_enough(&met) && convert::passes(&error) => {}
            Ok(Err(error)) => failed.push(error),
            Err(e) => return Err(Error::new(Kind::Internal, format!("connecting failed: {e}"))),
        }
    }
    failed.sort_by(|a, b| a.0.cmp(&b.0));
    if failed.is_empty() { Ok(met) } else { Err(unreachable(&failed)) }
}

/// Returns whether this is shard 0, and knows of the shards' owners.
fn has_owners(met: &Met) -> bool {
    met.hello.shard == 0 && met.hello.term > 0
}

/// The addresses of the owners of shards, once shard 0 names some that are neither listed nor asked.
fn moved(
    first: &Met,
    caller: &Caller,
    mut asked: BTreeSet<String>,
) -> impl Future<Output = Vec<String>> + Send + 'static {
    asked.extend(first.hello.cluster.iter().cloned());
    let mut control = ControlClient::with_interceptor(first.channel.clone(), Signed(caller.bearer.clone()));
    async move {
        loop {
            let ask = unary::request(pb::StatsRequest::default(), OWNERS_TIMEOUT);
            let owners =
                control.stats(ask).await.map(|answer| answer.into_inner().owners).unwrap_or_default();
            let addresses = owners.into_iter().map(|owner| owner.address);
            let others: Vec<_> = addresses.filter(|one| !one.is_empty() && !asked.contains(one)).collect();
            if !others.is_empty() {
                return others;
            }
            tokio::time::sleep(OWNERS_EVERY).await;
        }
    }
}

/// Error for servers that did not answer: their addresses and why.
pub(crate) fn unreachable(failed: &[(String, Error)]) -> Error {
    let mut error = match failed {
        [] => Error::new(Kind::Config, "no address to connect to"),
        [(address, only)] => {
            let mut error = only.clone();
            error.message = format!("cannot connect to {address}: {}", only.message);
            error
        }
        [(_, first), ..] => {
            let reasons = failed.iter().map(|(address, error)| format!("{address} ({error})"));
            let reasons = reasons.collect::<Vec<_>>().join(", ");
            Error::new(first.kind, format!("cannot connect to {reasons}"))
        }
    };
    if error.kind == Kind::Connection {
        error.message.push_str("; is a server running there (fastps serve), and are host and port right?");
        if let Some((address, _)) = failed.iter().find(|(address, _)| is_loopback_tcp(address)) {
            let host = address.rsplit_once(':').map_or(&address[..], |(host, _)| host);
            let hint = format!(" {host} is this machine only; a server elsewhere needs --listen HOST:PORT");
            error.message.push_str(&hint);
        }
    }
    error
}

/// Says hello to one address, and retries until the deadline while the server is away.
async fn meet(address: &str, caller: Caller) -> Result<Met> {
    let Caller { name, secret, bearer, tls, ack, deadline } = caller;
    let mut pause = Duration::from_millis(20);
    let mut last: Option<Error> = None;
    let mut wait = Wait::begin();
    let tls = tls.as_ref().filter(|_| unix::path(address).is_none());
    bearer.check_address(address, tls.is_some())?;
    let channel = channel(address, tls)?;
    loop {
        let client = random()?;
        // This end times out first, with a better message.
        let within = deadline.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
        let who = Who {
            client,
            secret: &secret,
            bearer: &bearer,
            name: &name,
            ack,
            within,
            to: None,
            report: None,
            listed: 0,
        };
        let hello = unary::hello(channel.clone(), who, false);
        let attempt = tokio::time::timeout_at(deadline.into(), hello);
        let what = || waiting::server(address, last.as_ref().map(|error| &*error.message));
        match wait.on(attempt, what).await {
            Ok(Ok(hello)) => {
                return Ok(Met { address: address.to_owned(), channel, client, hello });
            }
            Ok(Err(error)) => {
                let strange = matches!(error.kind, Kind::Internal | Kind::Connection);
                if last.is_none()
                    && strange
                    && unix::path(address).is_none()
                    && let Some(error) = stranger(address, tls.is_some()).await
                {
                    return Err(error);
                }
                if !convert::passes(&error) {
                    return Err(error);
                }
                last = Some(error);
            }
            Err(_) => {
                let silent = || Error::new(Kind::Connection, "no answer within the timeout");
                return Err(last.unwrap_or_else(silent));
            }
        }
        let retry_after = last.as_ref().and_then(|error| error.retry_after_ms).unwrap_or(0);
        let pause_now = jitter(pause).max(Duration::from_millis(retry_after));
        if Instant::now() + pause_now >= deadline {
            return Err(last.unwrap_or_else(|| Error::new(Kind::Connection, "no answer within the timeout")));
        }
        tokio::time::sleep(pause_now).await;
        pause = (2 * pause).min(Duration::from_millis(500));
    }
}
