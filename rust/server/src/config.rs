//! The settings of a server: where it listens, which cluster it belongs to, and its limits.

use crate::auth::role::Role;
use crate::human;
use crate::listeners::Listeners;
use crate::machine_memory::MachineMemory;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::policy::Policy;
use fastps_core::record::Sink;
use fastps_transport::tls::TlsFiles;
use fastps_transport::unix::SOCKET_PREFIX;
use fastps_transport::unix::SocketFile;
use fastps_transport::wire::{DEFAULT_SPIN, Spin};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Most shards of one process.
const MAX_SHARDS: u32 = 256;
/// Memory for slices; the rest is for other processes, and for the allocator.
const DEFAULT_PERCENT_OF_MEMORY: u64 = 80;

/// Address of the web listener if none is asked for.
pub const DEFAULT_WEB: &str = "127.0.0.1:7069";

/// Where the web listener is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WebAddress {
    /// Nowhere.
    #[default]
    Off,
    /// At [`DEFAULT_WEB`], unless another process has taken it.
    Default,
    /// At this `host:port`.
    At(String),
}

/// Settings of one server process.
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Addresses to listen on, `host:port`: one per shard, or only the first (the others get the next ports).
    /// Port 0 is any free port.
    pub listen: Vec<String>,
    /// Paths of Unix sockets, for clients that say `unix:///path`: one per shard of this process, or none.
    pub listen_unix: Vec<PathBuf>,
    /// Shards of this process; more than one only where `listen` has one address.
    pub shards: u32,
    /// The addresses of all shards, in the order of their indices; empty: this process is the whole cluster.
    pub cluster: Vec<String>,
    /// Address by which others reach this process, `host` or `host:port`, if not the one it listens on.
    pub advertise: Option<String>,
    /// How long a client may be silent.
    pub lease: Duration,
    /// Names of clients that get no session. A client chooses its name itself: this keeps out a worker that is
    /// known to spoil the run, and no attacker.
    pub refuse_workers: Vec<String>,
    /// How long a registration may be silent.
    pub reservation_lease: Duration,
    /// Limit on the bytes of this process, for tensors, readers and connections; `None`: 80 % of the memory
    /// of the machine, or of the smallest limit of the control groups around this process.
    pub memory_limit: Option<u64>,
    /// Workers for which tensors must leave room in the memory of each shard.
    pub room_for_workers: u64,
    /// TLS, if there are files; with `ca`, clients must show a certificate.
    pub tls: TlsFiles,
    /// The file where events are listed that change who may do what, or what the servers hold; `None`:
    /// nowhere.
    pub audit: Option<PathBuf>,
    /// The certificates of clients that are revoked (CRLs, PEM), where the CAs of `tls` ask for them.
    pub tls_crl: Option<PathBuf>,
    /// With `tls.ca`: still offer clients on this machine the abstract Unix socket, without a certificate. A
    /// server without always offers it.
    pub local: bool,
    /// The file of tokens: callers must show one, or a certificate with a role. `None`: certificates decide
    /// where `tls.ca` asks for them; elsewhere who reaches the server may do everything.
    pub tokens: Option<PathBuf>,
    /// The role of client certificates that name none, without `tokens`.
    pub certificate_role: Role,
    /// The file of the token that this server shows to the others of its cluster.
    pub server_token: Option<PathBuf>,
    /// Allow addresses other than loopback without TLS, or without tokens and client certificates.
    pub insecure: bool,
    /// How long a thread polls for the next frame before it sleeps, if polling paid off recently; zero: not
    /// at all.
    pub spin: Duration,
    /// Start of the name of each shard's Unix socket. Clients look for the default name only, so another name
    /// lets a test put a proxy between.
    pub socket: &'static str,
    /// When pushes are applied; `None`: at once.
    pub policy: Option<Arc<dyn Policy>>,
    /// Destination of records of changes; `None`: only the data directory, if there is one.
    pub sink: Option<Arc<dyn Sink>>,
    /// The folder for the log and the snapshots, with one subfolder per shard; `None`: nothing survives the
    /// process.
    pub data_dir: Option<PathBuf>,
    /// How often a snapshot is taken.
    pub snapshot_every: Duration,
    /// A snapshot is also taken at once when the log after the last one exceeds this many times the size of
    /// the state; 0 turns this off.
    pub snapshot_after: u64,
    /// How many snapshots are kept, at least 1.
    pub keep: usize,
    /// Snapshots younger than this are kept, too.
    pub keep_for: Duration,
    /// Bytes of snapshots and log that each shard keeps to be rewound; 0: only what a start may need.
    pub keep_history: u64,
    /// Destination of copies of each snapshot, `s3://bucket/prefix` or `file:///folder`; `None`: no copies.
    pub copy_to: Option<String>,
    /// Copy the history that `keep_history` keeps there, too.
    pub copy_history: bool,
    /// Age at which a piece of the log is copied there, too; `None`: only snapshots are copied.
    pub copy_log: Option<Duration>,
    /// Bytes of the log that are copied in a second, over all shards of the process; `None`: as many as there are.
    pub copy_bytes_per_second: Option<u64>,
    /// The lease of each shard's owner, whose record lies with the copies: this server answers only while no other
    /// one owns its shard. `None`: any server with a copy of the data answers.
    pub owner_lease: Option<Duration>,
    /// The bucket from which `shard` is taken over as soon as its owner's lease has ended, into an empty `data_dir`;
    /// copies go there, too. `None`: this server begins with what `data_dir` has.
    pub take_over: Option<String>,
    /// Index of the shard that is taken over.
    pub shard: Option<u32>,
    /// Start even if durable data cannot be read, and drop what is lost.
    pub accept_loss: bool,
    /// Where the web listener is, which shows metrics, health and the state of the shards.
    pub web: WebAddress,
    /// More names by which the web listener is asked, with any port.
    pub web_hosts: Vec<String>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: vec!["127.0.0.1:7070".to_owned()],
            listen_unix: Vec::new(),
            shards: 1,
            cluster: Vec::new(),
            advertise: None,
            lease: Duration::from_secs(10),
            refuse_workers: Vec::new(),
            reservation_lease: Duration::from_secs(30),
            memory_limit: None,
            room_for_workers: 16,
            tls: TlsFiles::default(),
            tls_crl: None,
            audit: None,
            local: false,
            tokens: None,
            certificate_role: Role::Reader,
            server_token: None,
            insecure: false,
            spin: DEFAULT_SPIN,
            socket: SOCKET_PREFIX,
            policy: None,
            sink: None,
            data_dir: None,
            snapshot_every: Duration::from_mins(5),
            snapshot_after: 4,
            keep: 2,
            keep_for: Duration::ZERO,
            keep_history: 0,
            copy_to: None,
            copy_history: false,
            copy_log: None,
            copy_bytes_per_second: None,
            owner_lease: None,
            take_over: None,
            shard: None,
            accept_loss: false,
            web: WebAddress::Off,
            web_hosts: Vec::new(),
        }
    }
}

/// A risk of exposing a server to other machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Danger {
    /// Connections are not encrypted.
    Plain,
    /// Every caller may do everything.
    Anybody,
}

/// A shard with its port.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) index: u32,
    pub(crate) listeners: Listeners,
    pub(crate) socket: Option<SocketFile>,
    /// Address by which others reach it.
    pub(crate) address: String,
}

fn config(message: impl Into<String>) -> Error {
    Error::new(Kind::Config, message)
}

impl ServerConfig {
    /// Checks the settings and takes the ports. Returns the shards of this process and the addresses of the
    /// cluster.
    pub(crate) fn bind(&self) -> Result<(Vec<Bound>, Vec<String>)> {
        let wanted = self.addresses()?;
        if self.lease < Duration::from_millis(10) || self.reservation_lease < Duration::from_millis(10) {
            return Err(
                config("a lease is too short").expected("at least 10 ms", format!("{:?}", self.lease))
            );
        }
        Spin::check(self.spin)?;
        self.check_needs()?;
        if let Some((_, twice)) =
            self.cluster.iter().enumerate().find(|(k, one)| self.cluster[..*k].contains(one))
        {
            let error = config("the cluster lists an address twice: every shard has its own");
            return Err(error.expected("different addresses", twice));
        }
        if let Some(open) = wanted.iter().flatten().find(|address| !address.ip().is_loopback()) {
            self.check_closed(open)?;
        }
        if !self.listen_unix.is_empty() && self.listen_unix.len() != wanted.len() {
            return Err(config("wrong number of Unix socket paths")
                .expected(format!("{} paths", wanted.len()), self.listen_unix.len()));
        }
        let mut listeners = Vec::new();
        for (k, addresses) in wanted.iter().enumerate() {
            let bound = Listeners::bind(addresses)?;
            let failed = |error: std::io::Error| config(format!("cannot use the port: {error}"));
            let reached = self.reached_at(k, &bound.addresses().map_err(failed)?)?;
            let socket = self.listen_unix.get(k).map(|path| SocketFile::bind(path)).transpose()?;
            listeners.push((bound, reached, socket));
        }
        if self.cluster.is_empty() {
            let cluster = listeners.iter().map(|(_, address, _)| address.clone()).collect();
            let bound = listeners.into_iter().enumerate();
            let shard = |(index, (listeners, address, socket))| Bound {
                index: index as u32,
                listeners,
                socket,
                address,
            };
            return Ok((bound.map(shard).collect(), cluster));
        }
        let place = |(listeners, address, socket): (Listeners, String, Option<SocketFile>)| {
            let index = self.cluster.iter().position(|a| *a == address).ok_or_else(|| {
                config("this shard's address is not in the cluster: its position there is its index")
                    .expected(format!("one of {}", self.cluster.join(",")), &address)
            })?;
            Ok(Bound { index: index as u32, listeners, socket, address })
        };
        let bound: Vec<_> = listeners.into_iter().map(place).collect::<Result<_>>()?;
        Ok((bound, self.cluster.clone()))
    }

    /// Fails if an option has no effect because another one is missing.
    fn check_needs(&self) -> Result<()> {
        let usual = Self::default();
        let (kept, whole) = (self.data_dir.is_some(), self.cluster.is_empty());
        let of_certificates = self.tls.ca.is_some() && self.tokens.is_none();
        let needs = [
            ("--snapshot-every", self.snapshot_every != usual.snapshot_every, kept, "--data-dir"),
            ("--snapshot-after", self.snapshot_after != usual.snapshot_after, kept, "--data-dir"),
            ("--keep", self.keep != usual.keep, kept, "--data-dir"),
            ("--keep-for", self.keep_for != usual.keep_for, kept, "--data-dir"),
            ("--keep-history", self.keep_history != usual.keep_history, kept, "--data-dir"),
            ("--copy-history", self.copy_history, self.copies_to().is_some(), "--copy-to"),
            ("--copy-history", self.copy_history, self.keep_history > 0, "--keep-history"),
            ("--accept-loss", self.accept_loss, kept || !whole, "--data-dir or --cluster"),
            ("--server-token-file", self.server_token.is_some(), !whole, "--cluster"),
            (
                "--certificate-role",
                self.certificate_role != usual.certificate_role,
                of_certificates,
                "--tls-ca, and without --tokens",
            ),
            ("--web-host", !self.web_hosts.is_empty(), self.web != WebAddress::Off, "--web"),
        ];
        match needs.into_iter().find(|(_, given, has_effect, _)| *given && !has_effect) {
            None => Ok(()),
            Some((option, _, _, needed)) => Err(config(format!("{option} would have no effect"))
                .expected(format!("{option} with {needed}"), format!("only {option}"))),
        }
    }

    /// The URL that snapshots are copied to.
    pub(crate) fn copies_to(&self) -> Option<&str> {
        self.copy_to.as_deref().or(self.take_over.as_deref())
    }

    /// The addresses that each shard of this process listens on; those of one shard differ only in their
    /// host.
    fn addresses(&self) -> Result<Vec<Vec<SocketAddr>>> {
        if self.shards == 0 || self.shards > MAX_SHARDS {
            return Err(
                config("invalid number of shards").expected(format!("1 to {MAX_SHARDS}"), self.shards)
            );
        }
        if self.listen.is_empty()
            || (self.listen.len() > 1 && self.shards > 1 && self.listen.len() != self.shards as usize)
        {
            return Err(config("wrong number of addresses to listen on")
                .expected(format!("1 or {} addresses", self.shards), self.listen.len()));
        }
        let first: Vec<_> = self.listen.iter().map(|a| resolve(a)).collect::<Result<_>>()?;
        if first.len() > 1 || self.shards == 1 {
            return Ok(first);
        }
        let next = |k: u32| {
            let of = |address: &SocketAddr| {
                let port = match address.port() {
                    0 => 0,
                    port => u16::try_from(u32::from(port) + k).map_err(|_| {
                        config("the ports of the shards pass 65535").expected("a smaller first port", port)
                    })?,
                };
                Ok(SocketAddr::new(address.ip(), port))
            };
            first[0].iter().map(of).collect()
        };
        (0..self.shards).map(next).collect()
    }

    /// Fails if the server would be open to everyone who reaches this address.
    pub(crate) fn check_closed(&self, address: &SocketAddr) -> Result<()> {
        let Some(danger) = self.danger().filter(|_| !self.insecure) else { return Ok(()) };
        let (why, ways) = match danger {
            Danger::Plain => (
                "without TLS, an address other than loopback is open to everyone",
                "a loopback address; --tls-cert, --tls-key and --tokens (or --tls-ca); or --insecure",
            ),
            Danger::Anybody => (
                "with TLS alone, everybody may read and change everything: fastps certs and fastps token make what is missing",
                "a loopback address, --tokens FILE or --tls-ca FILE, or --insecure",
            ),
        };
        Err(config(why).expected(ways, address))
    }

    /// Protection that the server lacks for addresses other than loopback.
    pub(crate) fn danger(&self) -> Option<Danger> {
        if self.tls.are_none() {
            return Some(Danger::Plain);
        }
        (self.tokens.is_none() && self.tls.ca.is_none()).then_some(Danger::Anybody)
    }

    /// Address by which others reach the `k`-th shard of this process.
    fn reached_at(&self, k: usize, listening: &[SocketAddr]) -> Result<String> {
        let nowhere = || config("the address to listen on cannot be resolved");
        let actual = listening.first().copied().ok_or_else(nowhere)?;
        if let Some(advertise) = &self.advertise {
            return match advertise.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>())) {
                Some((host, Ok(port))) => Ok(format!("{host}:{}", port as usize + k)),
                _ => Ok(format!("{advertise}:{}", actual.port())),
            };
        }
        // Keeps a host name as configured, so that the cluster contains it.
        if let Some(asked) = self.listen.get(k).filter(|a| !a.ends_with(":0"))
            && !actual.ip().is_unspecified()
        {
            return Ok(asked.clone());
        }
        if actual.ip().is_unspecified() {
            return Err(config(
                "listening on all interfaces: under which address do others reach this shard?",
            )
            .expected("--advertise HOST", actual));
        }
        Ok(actual.to_string())
    }

    /// Start of the name of each shard's abstract Unix socket; `None` if there is none. Any process of this
    /// user in the same network namespace can connect to it, and show a token there but no certificate.
    pub(crate) fn local_socket(&self) -> Option<&'static str> {
        (self.local || self.tls.ca.is_none()).then_some(self.socket)
    }

    /// Memory limit of this process in bytes, and its source.
    pub(crate) fn memory(&self) -> (u64, String) {
        if let Some(limit) = self.memory_limit {
            return (limit, "as configured".to_owned());
        }
        let MachineMemory { bytes, source } = MachineMemory::read(Path::new("/"));
        let (all, source) = (human::size(bytes), source.display());
        let source = format!("{DEFAULT_PERCENT_OF_MEMORY} % of {all}, according to {source}");
        (bytes / 100 * DEFAULT_PERCENT_OF_MEMORY, source)
    }

    /// What the server at these addresses keeps, encrypts and may use, in one line.
    pub(crate) fn summary(&self, addresses: &[String], memory: (u64, &str)) -> String {
        let version = env!("CARGO_PKG_VERSION");
        let kept = match &self.data_dir {
            Some(folder) => format!("data in {}", folder.display()),
            None => "in memory: a restart loses everything".to_owned(),
        };
        let tls = match (self.tls.are_none(), &self.tls.ca) {
            (true, _) => "no TLS",
            (false, None) => "TLS",
            (false, Some(_)) => "TLS with client certificates",
        };
        let tokens = if self.tokens.is_some() { ", tokens" } else { "" };
        let (limit, source) = (human::size(memory.0), memory.1);
        let addresses = addresses.join(", ");
        format!("version {version}; {kept}; {tls}{tokens}; memory limit {limit} ({source}); at {addresses}")
    }
}

/// All addresses of a name.
pub(crate) fn resolve(address: &str) -> Result<Vec<SocketAddr>> {
    let found = address.to_socket_addrs().map_err(|error| {
        config(format!("invalid address to listen on: {error}")).expected("host:port", format!("{address:?}"))
    })?;
    let found: Vec<_> = found.collect();
    if found.is_empty() {
        return Err(config("the address to listen on cannot be resolved").expected("host:port", address));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn on(listen: &str) -> ServerConfig {
        ServerConfig { listen: vec![listen.to_owned()], ..ServerConfig::default() }
    }

    fn refusal(config: &ServerConfig) -> Error {
        let error = config.bind().unwrap_err();
        assert_eq!(error.kind, Kind::Config);
        error
    }

    #[test]
    fn off_loopback_only_with_tls_and_known_callers() {
        let file = || Some(PathBuf::from("some.pem"));
        let tls = |ca: Option<PathBuf>| TlsFiles { cert: file(), key: file(), ca };
        for listen in ["0.0.0.0:0", "[::]:0"] {
            for (config, ways) in [
                (on(listen), ["--insecure", "--tls-cert", "--tokens"]),
                (ServerConfig { tokens: file(), ..on(listen) }, ["--insecure", "--tls-cert", "--tokens"]),
                (ServerConfig { tls: tls(None), ..on(listen) }, ["--insecure", "--tls-ca", "--tokens"]),
            ] {
                let error = refusal(&config).to_string();
                assert!(ways.iter().all(|way| error.contains(way)), "{error}");
                // The next question is how others reach it.
                let insecure = ServerConfig { insecure: true, ..config };
                assert!(refusal(&insecure).to_string().contains("--advertise"));
            }
            for config in [
                ServerConfig { tls: tls(file()), ..on(listen) },
                ServerConfig { tls: tls(None), tokens: file(), ..on(listen) },
            ] {
                assert!(refusal(&config).to_string().contains("--advertise"));
            }
        }
        let config = ServerConfig { insecure: true, advertise: Some("host-a".into()), ..on("0.0.0.0:0") };
        assert!(config.bind().unwrap().1[0].starts_with("host-a:"));
    }

    #[test]
    fn several_shards_get_ports_of_their_own() {
        let (bound, cluster) = ServerConfig { shards: 3, ..on("127.0.0.1:0") }.bind().unwrap();
        assert_eq!(bound.iter().map(|b| b.index).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(bound.iter().map(|b| b.address.clone()).collect::<Vec<_>>(), cluster);
        assert_eq!(cluster.iter().collect::<std::collections::HashSet<_>>().len(), 3);
    }

    #[test]
    fn a_port_in_use_is_named() {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = held.local_addr().unwrap().to_string();
        assert!(refusal(&on(&address)).to_string().contains(&address));
    }

    #[test]
    fn the_index_is_the_position_in_the_cluster() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let cluster = vec!["host-a:1".to_owned(), free.clone()];
        let (bound, all) = ServerConfig { cluster: cluster.clone(), ..on(&free) }.bind().unwrap();
        assert_eq!((bound[0].index, all), (1, cluster.clone()));
        drop(bound);
        let other = ServerConfig { cluster: vec!["host-a:1".to_owned()], ..on(&free) };
        assert!(refusal(&other).to_string().contains("host-a:1"));
    }

    #[test]
    fn bad_settings_are_refused() {
        refusal(&ServerConfig { shards: 2, listen_unix: vec!["/tmp/one".into()], ..on("127.0.0.1:0") });
        refusal(&ServerConfig { shards: 0, ..on("127.0.0.1:0") });
        refusal(&ServerConfig { shards: 2, ..on("127.0.0.1:65535") });
        refusal(&ServerConfig { spin: Duration::from_secs(2), ..on("127.0.0.1:0") });
        refusal(&on("nonsense"));
        let name = || Some(PathBuf::from("name"));
        let tls = TlsFiles { cert: name(), key: name(), ca: name() };
        for (option, config) in [
            (
                "--snapshot-every",
                ServerConfig { snapshot_every: Duration::from_secs(9), ..on("127.0.0.1:0") },
            ),
            ("--snapshot-after", ServerConfig { snapshot_after: 0, ..on("127.0.0.1:0") }),
            ("--keep", ServerConfig { keep: 3, ..on("127.0.0.1:0") }),
            ("--keep-for", ServerConfig { keep_for: Duration::from_secs(9), ..on("127.0.0.1:0") }),
            ("--keep-history", ServerConfig { keep_history: 1, ..on("127.0.0.1:0") }),
            ("--copy-history", ServerConfig { copy_history: true, ..on("127.0.0.1:0") }),
            (
                "--copy-history",
                ServerConfig {
                    copy_history: true,
                    copy_to: Some("file:///x".to_owned()),
                    ..on("127.0.0.1:0")
                },
            ),
            ("--accept-loss", ServerConfig { accept_loss: true, ..on("127.0.0.1:0") }),
            ("--server-token-file", ServerConfig { server_token: name(), ..on("127.0.0.1:0") }),
            ("--certificate-role", ServerConfig { certificate_role: Role::Worker, ..on("127.0.0.1:0") }),
            (
                "--certificate-role",
                ServerConfig { certificate_role: Role::Worker, tls, tokens: name(), ..on("127.0.0.1:0") },
            ),
            ("--web-host", ServerConfig { web_hosts: vec!["a".to_owned()], ..on("127.0.0.1:0") }),
        ] {
            let error = refusal(&config).to_string();
            assert!(error.contains(&format!("expected {option} with ")), "{error}");
        }
        refusal(&ServerConfig { listen: Vec::new(), ..ServerConfig::default() });
        assert!(on("x").memory().0 > 0);
    }
}
