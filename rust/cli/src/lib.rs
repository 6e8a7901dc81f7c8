//! The command line of `fastps-server` and of `fastps serve`.

mod addresses;
mod bucket;
mod certs;
mod checkpoint;
mod command;
mod config;
mod credentials;
mod described;
mod export;
mod files;
mod fork;
mod history;
mod log;
mod new_cluster;
mod owner;
mod past_place;
mod signals;
mod status;
mod systemd;
mod tensors;
mod token;
mod top;

use clap::Parser;
use config::AtStart;
pub use described::{Described, described};
use fastps_core::error::{Error, Kind, Result};
use fastps_server::human::parse_bytes;
use fastps_server::server::HAND_OVER_TIMEOUT;
use fastps_server::{Role, Server, ServerConfig, TlsFiles, WebAddress};
use fastps_transport::open_files;
pub use history::{Recorded, Target, fetch_history, moment_of, recorded, rewind_to};
use log::{Format, Log, last_line, noted};
use signals::Signals;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;
use tracing::Level;
use tracing_subscriber::filter::{LevelFilter, Targets};

/// How long stopping may take: less than the 5 s that service managers usually allow.
const STOP_TIMEOUT: Duration = Duration::from_secs(4);

/// Help of `--copy-to`: rustdoc would take the URLs for links.
const COPY_TO: &str = "Copy each snapshot to this URL: s3://BUCKET/PREFIX (settings from the AWS_... environment variables) or file:///FOLDER";

/// Run shards of a fastps parameter server. In place of options, `checkpoint` works with snapshots and data
/// directories, `status` shows a running cluster, `top` watches it, `ls` and `rm` list and free its tensors,
/// `config` explains settings, `cluster` makes the files of a new one, and `certs` and `token` make
/// credentials: see `checkpoint --help` and so on.
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
#[derive(Debug, Parser)]
#[command(name = "fastps-server", version)]
struct ServeArgs {
    /// Settings that neither options nor variables give (TOML): the names of these options, without the
    /// dashes. `fastps config` explains them.
    #[arg(long, value_name = "FILE", env = "FASTPS_CONFIG")]
    config: Option<PathBuf>,
    /// Number of shards in this process, on consecutive ports.
    #[arg(long, default_value_t = 1, env = "FASTPS_SHARDS")]
    shards: u32,
    /// Addresses to listen on: one per shard, or only the first one's; port 0 takes any free port. A name
    /// means all its addresses.
    #[arg(long, value_delimiter = ',', default_value = "127.0.0.1:7070", env = "FASTPS_LISTEN")]
    listen: Vec<String>,
    /// Also listen on Unix sockets at these paths, one per shard.
    #[arg(long, value_delimiter = ',', value_name = "PATH", env = "FASTPS_LISTEN_UNIX")]
    listen_unix: Vec<PathBuf>,
    /// Addresses of all shards of the cluster, in order of index [default: the shards of this process].
    #[arg(long, value_delimiter = ',', env = "FASTPS_CLUSTER")]
    cluster: Vec<String>,
    /// Address at which others reach this process, if it differs from --listen: HOST or HOST:PORT.
    #[arg(long, env = "FASTPS_ADVERTISE")]
    advertise: Option<String>,
    /// Memory limit for tensors, readers and connections: 4GiB, 500MB or a number of bytes [default: 80 % of
    /// the machine's memory, or of the smallest limit of its control groups].
    #[arg(long, value_parser = parse_bytes, env = "FASTPS_MEMORY_LIMIT")]
    memory_limit: Option<u64>,
    /// Milliseconds a client may be silent before its session ends.
    #[arg(long, default_value_t = 10_000, value_name = "MS", env = "FASTPS_LEASE_MS")]
    lease_ms: u64,
    /// Refuse clients of this name; may be repeated. A client chooses its name itself: this keeps out a worker that
    /// spoils the run, and no attacker.
    #[arg(long, value_delimiter = ',', value_name = "NAME", env = "FASTPS_REFUSE_WORKER")]
    refuse_worker: Vec<String>,
    /// Microseconds a thread polls for the next frame before it sleeps, if polling paid off recently; 0 turns
    /// polling off.
    #[arg(long, default_value_t = 200, value_name = "US", env = "FASTPS_SPIN_US")]
    spin_us: u64,
    /// Use TLS with this server certificate, followed by its issuers (PEM).
    #[arg(long, value_name = "FILE", env = "FASTPS_TLS_CERT")]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert (PEM).
    #[arg(long, value_name = "FILE", env = "FASTPS_TLS_KEY")]
    tls_key: Option<PathBuf>,
    /// Require client certificates signed by one of these CAs (PEM).
    #[arg(long, value_name = "FILE", env = "FASTPS_TLS_CA")]
    tls_ca: Option<PathBuf>,
    /// With --tls-ca: refuse certificates that are on these lists of revoked ones (CRLs, PEM).
    #[arg(long, value_name = "FILE", env = "FASTPS_TLS_CRL")]
    tls_crl: Option<PathBuf>,
    /// With --tls-ca: still accept processes of this user on this machine without a certificate,
    /// through a Unix socket. With --tokens they show a token.
    #[arg(long)]
    local: bool,
    /// Let only callers in that show a token of this file, or a certificate with a role.
    #[arg(long, value_name = "FILE", env = "FASTPS_TOKENS")]
    tokens: Option<PathBuf>,
    /// With --tls-ca and without --tokens: role of client certificates that name none, one of reader, worker,
    /// admin and server.
    #[arg(long, value_name = "ROLE", default_value = "reader", env = "FASTPS_CERTIFICATE_ROLE")]
    certificate_role: Role,
    /// Show the token of role server in this file to the other servers of the cluster.
    #[arg(long, value_name = "FILE", env = "FASTPS_SERVER_TOKEN_FILE")]
    server_token_file: Option<PathBuf>,
    /// Append one JSON line to this file for each start, refused credential, registration, removal of a
    /// tensor, checkpoint, hold, reload, and space that changes its coordinator. While it cannot be written,
    /// calls of admins are refused.
    #[arg(long, value_name = "FILE", env = "FASTPS_AUDIT")]
    audit: Option<PathBuf>,
    /// Keep a log and snapshots here, in one folder per shard, and start from them. Without it, the
    /// parameters are lost when the process ends.
    #[arg(long, value_name = "DIR", env = "FASTPS_SERVER_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// Seconds between snapshots.
    #[arg(long, default_value = "300", value_name = "SECONDS", value_parser = seconds, env = "FASTPS_SNAPSHOT_EVERY")]
    snapshot_every: Duration,
    /// Also take a snapshot at once when the log after the last one exceeds this many times the size of the
    /// state, and 1 MiB. At twice that and 16 MiB, pushes are refused until the snapshot is complete. 0 turns
    /// this off.
    #[arg(long, default_value_t = 4, value_name = "TIMES", env = "FASTPS_SNAPSHOT_AFTER")]
    snapshot_after: u64,
    /// Number of snapshots to keep, with the log since the oldest of them.
    #[arg(long, default_value_t = 2, value_name = "COUNT", env = "FASTPS_KEEP")]
    keep: usize,
    /// Also keep every snapshot younger than this many seconds.
    #[arg(long, default_value = "0", value_name = "SECONDS", value_parser = seconds, env = "FASTPS_KEEP_FOR")]
    keep_for: Duration,
    /// Keep more snapshots and log, up to this size for each shard, so that the parameters can be rewound to any
    /// moment in them.
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", env = "FASTPS_KEEP_HISTORY")]
    keep_history: Option<u64>,
    /// Where each snapshot is copied to.
    #[arg(long, value_name = "URL", env = "FASTPS_COPY_TO", help = COPY_TO)]
    copy_to: Option<String>,
    /// Copy the history there, too: the snapshots and the log up to the newest one that --keep-history keeps, and as
    /// much of them there. `fastps rewind URL` and `bisect URL` read it. Needs --copy-to and --keep-history.
    #[arg(long)]
    copy_history: bool,
    /// Copy the log, too, a piece as soon as it is this many seconds old (without a number: 1) or 8 MiB long, so that a
    /// lost machine takes little. Costs a put to the bucket for each piece. Needs --copy-to and --owner-lease.
    #[arg(
        long,
        value_name = "SECONDS",
        value_parser = seconds,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1",
        env = "FASTPS_COPY_LOG"
    )]
    copy_log: Option<Duration>,
    /// Bytes of the log to copy in a second at most, for all shards of this process. What comes faster falls behind, which
    /// fastps status and the metrics show; pushes are not slowed. Needs --copy-log.
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", env = "FASTPS_COPY_BYTES_PER_SECOND")]
    copy_bytes_per_second: Option<u64>,
    /// Seconds after which another server may own a shard whose owner is silent. With it, exactly one of several
    /// servers of a shard answers, by a record beside its copies in an S3 bucket; at its start a server waits
    /// until the former owner has ended. Needs --copy-to.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, env = "FASTPS_OWNER_LEASE")]
    owner_lease: Option<Duration>,
    /// Take over a shard of the servers that copy to this URL: wait until its owner's lease has ended, then read its
    /// newest snapshot and its log into an empty --data-dir, and serve. Needs --shard, --data-dir and --owner-lease;
    /// copies go to this URL. A restart with a directory that has served goes on in that.
    #[arg(long, value_name = "URL", env = "FASTPS_TAKE_OVER")]
    take_over: Option<String>,
    /// The shard to take over, by its place in --cluster: 0 if there is only one.
    #[arg(long, value_name = "INDEX", env = "FASTPS_SHARD")]
    shard: Option<u32>,
    /// Start even if durable data in the data directory cannot be read, and drop what is lost.
    #[arg(long)]
    accept_loss: bool,
    /// Show metrics, health and the state of the shards over HTTP here: HOST:PORT, or off; with TLS at an
    /// address other than loopback, and with --tls-ca [default: 127.0.0.1:7069, if it is free].
    #[arg(long, value_name = "HOST:PORT", env = "FASTPS_WEB")]
    web: Option<String>,
    /// Another name by which --web is asked, such as that of a proxy or a service; may be repeated. The machine's
    /// name, those of --listen, --advertise, --cluster and the certificate, and addresses need none.
    #[arg(long, value_delimiter = ',', value_name = "NAME", env = "FASTPS_WEB_HOST")]
    web_host: Vec<String>,
    /// Format of the log on standard error: text, or json with one object a line.
    #[arg(
        long,
        value_enum,
        default_value_t,
        hide_possible_values = true,
        value_name = "FORMAT",
        env = "FASTPS_LOG_FORMAT"
    )]
    log_format: Format,
    /// Allow addresses other than loopback without TLS, or without --tokens and --tls-ca: every client may
    /// read and change everything.
    #[arg(long)]
    insecure: bool,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| format!("{text:?} is not a number of seconds"))
}

/// Filter of the log: a level, or levels of modules (`info,h2=debug`). Without the check, a misspelt level
/// would count as a module, and nothing would be logged.
fn log_filter(wanted: &str) -> Result<Targets> {
    if wanted.is_empty() {
        return Ok(Targets::new().with_default(LevelFilter::INFO));
    }
    let wrong = || {
        let error = Error::new(Kind::Config, "invalid FASTPS_LOG");
        error.expected("off, error, warn, info, debug or trace", format!("{wanted:?}"))
    };
    if !wanted.contains(['=', ',']) {
        return wanted
            .parse()
            .map(|level: LevelFilter| Targets::new().with_default(level))
            .map_err(|_| wrong());
    }
    wanted.parse().map_err(|_| wrong())
}

/// Serves until SIGTERM, SIGINT or the end of its terminal, and returns the exit status. The first argument is
/// the program's name. If the second is one of [`COMMANDS`], runs that command instead.
pub fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    let args: Vec<_> = args.into_iter().collect();
    if let Some(command) =
        args.get(1).and_then(|first| first.to_str()).filter(|first| COMMANDS.contains(first))
    {
        return run_command(command, args.iter().skip(1).cloned());
    }
    let is_json = config::wants_json(&args);
    let fail = |error: &str| {
        let _ = std::io::stderr().write_all(last_line(is_json, error).as_bytes());
    };
    let (args, at_start) = match config::arguments(args, is_json) {
        Ok(found) => found,
        Err(code) => return code,
    };
    let filter = match log_filter(&std::env::var("FASTPS_LOG").unwrap_or_default()) {
        Ok(filter) => filter,
        Err(error) => {
            fail(&error.to_string());
            return 2;
        }
    };
    let log = match Log::of_process() {
        Ok(log) => log,
        Err(error) => {
            fail(&format!("cannot start the log: {error}"));
            return 1;
        }
    };
    log.install(filter, args.log_format);
    open_files::raise();
    match serve(args, &at_start, log) {
        Ok(()) => {
            log.flush();
            0
        }
        Err(error) => {
            log.end(&error.to_string());
            1
        }
    }
}

/// Commands in place of options.
pub const COMMANDS: [&str; 13] = [
    "certs",
    "checkpoint",
    "cluster",
    "config",
    "fork",
    "history",
    "ls",
    "owner",
    "rewind",
    "rm",
    "status",
    "token",
    "top",
];

/// Runs one of [`COMMANDS`] and returns the exit status. The first argument is the program's name.
pub fn run_command(command: &str, args: impl IntoIterator<Item = OsString>) -> i32 {
    match command {
        "certs" => certs::run(args),
        "checkpoint" => checkpoint::run(args),
        "cluster" => new_cluster::run(args),
        "config" => config::run(args),
        "fork" => fork::run(args),
        "history" => history::history(args),
        "ls" => tensors::ls(args),
        "owner" => owner::run(args),
        "rewind" => history::rewind(args),
        "rm" => tensors::rm(args),
        "status" => status::run(args),
        "token" => token::run(args),
        "top" => top::run(args),
        _ => {
            command::note(format_args!("error: no command {command:?}: {}", COMMANDS.join(", ")));
            2
        }
    }
}

fn serve(args: ServeArgs, at_start: &AtStart, log: &Log) -> Result<()> {
    let io = |error: std::io::Error| Error::new(Kind::Internal, error.to_string());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
    runtime.block_on(async {
        // Before the server is reachable, so that no signal is missed.
        let mut signals = Signals::catch().map_err(io)?;
        let has_terminal = signals::has_terminal();
        let config = ServerConfig {
            listen: args.listen,
            listen_unix: args.listen_unix,
            shards: args.shards,
            cluster: args.cluster,
            advertise: args.advertise,
            lease: Duration::from_millis(args.lease_ms),
            refuse_workers: args.refuse_worker,
            memory_limit: args.memory_limit,
            tls: TlsFiles { cert: args.tls_cert, key: args.tls_key, ca: args.tls_ca },
            tls_crl: args.tls_crl,
            audit: args.audit,
            local: args.local,
            tokens: args.tokens,
            certificate_role: args.certificate_role,
            server_token: args.server_token_file,
            insecure: args.insecure,
            spin: Duration::from_micros(args.spin_us),
            data_dir: args.data_dir,
            snapshot_every: args.snapshot_every,
            snapshot_after: args.snapshot_after,
            keep: args.keep,
            keep_for: args.keep_for,
            keep_history: args.keep_history.unwrap_or(0),
            copy_to: args.copy_to,
            copy_history: args.copy_history,
            copy_log: args.copy_log,
            copy_bytes_per_second: args.copy_bytes_per_second,
            owner_lease: args.owner_lease,
            take_over: args.take_over,
            shard: args.shard,
            accept_loss: args.accept_loss,
            web: web_address(args.web),
            web_hosts: args.web_host,
            ..ServerConfig::default()
        };
        let Some(server) = start(config, &mut signals, has_terminal).await? else {
            tracing::info!("stopped while waiting for its shards");
            return Ok(());
        };
        log.flush(); // warnings of the start come first
        announce(&server, args.log_format == Format::Json);
        systemd::tell("READY=1");
        let outlives_hangup = server.reloads() || !has_terminal;
        let time = tokio::select! {
            () = signals.stop(outlives_hangup.then_some(|| reload(&server, at_start))) => STOP_TIMEOUT,
            () = systemd::keep_alive(&server) => STOP_TIMEOUT,
            () = server.asked_to_release() => {
                tracing::info!("the shard is asked for: stopping once everything is copied");
                HAND_OVER_TIMEOUT
            }
        };
        systemd::tell("STOPPING=1");
        tracing::info!("stopping");
        server.stop(time)
    })
}

/// Starts the server. `None`: a signal came while it waited for the former owner of a shard, which may last.
async fn start(config: ServerConfig, signals: &mut Signals, has_terminal: bool) -> Result<Option<Server>> {
    if config.owner_lease.is_none() {
        return Server::start(&config).map(Some);
    }
    let (done, started) = tokio::sync::oneshot::channel();
    let failed = |error: &dyn Display| Error::new(Kind::Internal, format!("cannot start: {error}"));
    let thread = std::thread::Builder::new().name("fastps-start".to_owned());
    thread.spawn(move || drop(done.send(Server::start(&config)))).map_err(|error| failed(&error))?;
    tokio::select! {
        started = started => started.map_err(|error| failed(&error))?.map(Some),
        () = signals.stop((!has_terminal).then_some(|| ())) => Ok(None),
    }
}

/// Reads all files again that a server may read while it runs.
fn reload(server: &Server, at_start: &AtStart) {
    if !server.reloads() && !at_start.has_file() {
        tracing::info!("SIGHUP: there are no certificates, tokens or configuration to read again");
        return;
    }
    tracing::info!("SIGHUP: certificates, tokens and configuration are read again");
    server.reload();
    at_start.compare();
}

fn web_address(wanted: Option<String>) -> WebAddress {
    match wanted {
        None => WebAddress::Default,
        Some(off) if off == "off" => WebAddress::Off,
        Some(address) => WebAddress::At(address),
    }
}

/// Prints where the server listens. A reader that has closed the pipe, as `head -1` does, does not end it.
fn announce(server: &Server, is_json: bool) {
    let shards = server.shards().map(|(index, address)| format!("shard {index} listening on {address}"));
    let sockets = server.sockets();
    let sockets =
        sockets.map(|(index, path)| format!("shard {index} listening on unix://{}", path.display()));
    let web = server.web().map(|url| format!("metrics and health at {url}"));
    let lines = shards.chain(sockets).chain(web).chain([server.summary().to_owned()]);
    let text: String = lines.map(|line| noted(is_json, Level::INFO, &line)).collect();
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        ServeArgs::command().debug_assert();
        let args = ServeArgs::try_parse_from(["x", "--shards", "2", "--cluster", "a:1,b:2"]).unwrap();
        assert_eq!((args.shards, args.cluster.len(), args.listen.len()), (2, 2, 1));
        assert_eq!(run(["x", "--no-such-option"].map(OsString::from)), 2);
    }

    #[test]
    fn levels_of_the_log_are_read() {
        for (wanted, level) in
            [("", LevelFilter::INFO), ("warn", LevelFilter::WARN), ("off", LevelFilter::OFF)]
        {
            assert_eq!(log_filter(wanted).unwrap().default_level(), Some(level), "{wanted}");
        }
        assert!(log_filter("error,h2=debug").unwrap().would_enable("h2", &tracing::Level::DEBUG));
        for wrong in ["warning", "verbose", "h2=loud"] {
            let error = log_filter(wrong).unwrap_err().to_string();
            assert!(error.contains("expected off, error, warn") && error.contains(wrong), "{error}");
        }
    }
}
