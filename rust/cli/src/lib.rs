//! The command line of `fastps-server` and of `fastps serve`.

mod bucket;
mod checkpoint;
mod signals;

use clap::Parser;
use fastps_core::error::{Error, Kind, Result};
use fastps_server::{Server, ServerConfig, TlsFiles};
use fastps_transport::open_files;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// How long a stopping server takes at most: less than the 5 s that service managers commonly give.
const STOP_TIMEOUT: Duration = Duration::from_secs(4);

/// What `--copy-to` is for: rustdoc would take the URLs for links.
const COPY_TO: &str = "Copy each snapshot there, too: s3://BUCKET/PREFIX, with the AWS_... settings of the environment, or file:///FOLDER";

/// Serves shards of a fastps parameter server. `checkpoint` in place of options looks at data directories:
/// see `checkpoint --help`.
#[derive(Debug, Parser)]
#[command(name = "fastps-server", version)]
struct ServeArgs {
    /// Number of shards in this process, on consecutive ports.
    #[arg(long, default_value_t = 1, env = "FASTPS_SHARDS")]
    shards: u32,
    /// Where to listen (port 0: any free port); one per shard, or the first one's.
    #[arg(long, value_delimiter = ',', default_value = "127.0.0.1:7070", env = "FASTPS_LISTEN")]
    listen: Vec<String>,
    /// Listen on a Unix socket, too: where it lies, one path per shard.
    #[arg(long, value_delimiter = ',', value_name = "PATH", env = "FASTPS_LISTEN_UNIX")]
    listen_unix: Vec<PathBuf>,
    /// Addresses of all shards of the cluster, in the order of their indices; left out, this process is the
    /// cluster.
    #[arg(long, value_delimiter = ',', env = "FASTPS_CLUSTER")]
    cluster: Vec<String>,
    /// How others reach this process, where that is not the address it listens on: HOST or HOST:PORT.
    #[arg(long, env = "FASTPS_ADVERTISE")]
    advertise: Option<String>,
    /// Most memory for tensors, readers and connections, as 4GiB, 500MB or bytes [default: 80 % of the
    /// machine's].
    #[arg(long, value_parser = parse_bytes, env = "FASTPS_MEMORY_LIMIT")]
    memory_limit: Option<u64>,
    /// How long a client may be silent before its session ends.
    #[arg(long, default_value_t = 10_000, value_name = "MS", env = "FASTPS_LEASE_MS")]
    lease_ms: u64,
    /// How long a thread looks for the next frame before it sleeps, where that paid of late; 0: never.
    #[arg(long, default_value_t = 200, value_name = "US", env = "FASTPS_SPIN_US")]
    spin_us: u64,
    /// Speak TLS: the server's certificate, its issuers behind it (PEM).
    #[arg(long, value_name = "FILE", env = "FASTPS_TLS_CERT")]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE", env = "FASTPS_TLS_KEY")]
    tls_key: Option<PathBuf>,
    /// Ask clients for a certificate that one of these CAs has signed (PEM).
    #[arg(long, value_name = "FILE", env = "FASTPS_TLS_CA")]
    tls_ca: Option<PathBuf>,
    /// Let processes of this user on this machine in without a certificate, by a Unix socket, although
    /// --tls-ca is given.
    #[arg(long)]
    local: bool,
    /// Keep snapshots and a log here, a folder for each shard, and start from them; left out, nothing
    /// outlives the process.
    #[arg(long, value_name = "DIR", env = "FASTPS_SERVER_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// How often a snapshot is taken.
    #[arg(long, default_value = "300", value_name = "SECONDS", value_parser = seconds, env = "FASTPS_SNAPSHOT_EVERY")]
    snapshot_every: Duration,
    /// A snapshot is taken, too, when the log behind the last one is longer than so many times the state; 0:
    /// never for that.
    #[arg(long, default_value_t = 4, value_name = "TIMES", env = "FASTPS_SNAPSHOT_AFTER")]
    snapshot_after: u64,
    /// How many snapshots are kept, and the log from the oldest of them on.
    #[arg(long, default_value_t = 2, value_name = "COUNT", env = "FASTPS_KEEP")]
    keep: usize,
    /// Besides, every snapshot that is younger than this is kept.
    #[arg(long, default_value = "0", value_name = "SECONDS", value_parser = seconds, env = "FASTPS_KEEP_FOR")]
    keep_for: Duration,
    /// Where each snapshot is copied to.
    #[arg(long, value_name = "URL", env = "FASTPS_COPY_TO", help = COPY_TO)]
    copy_to: Option<String>,
    /// Start with what can be read of the data directory, although something that was durable cannot.
    #[arg(long)]
    accept_loss: bool,
    /// Listen off loopback although nothing is encrypted and everybody may do everything.
    #[arg(long)]
    insecure: bool,
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1 << 40,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => {
            return Err(format!("{unit:?} is no unit; use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"));
        }
    };
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is no size; write for example 4GiB"))?;
    let bytes = number * factor as f64;
    if bytes < 1.0 || bytes > 2_f64.powi(60) {
        Err("the size must be from 1 byte to 1 EiB".into())
    } else {
        Ok(bytes as u64)
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| format!("{text:?} is no number of seconds"))
}

/// What is logged: a level, or levels of modules (`info,h2=debug`). A level that is misspelt would be taken
/// for a module, and nothing be logged at all.
fn log_filter(wanted: &str) -> Result<Targets> {
    if wanted.is_empty() {
        return Ok(Targets::new().with_default(LevelFilter::INFO));
    }
    let wrong = || {
        let error = Error::new(Kind::Config, "FASTPS_LOG cannot be read");
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

/// Serves until SIGTERM, SIGINT or SIGHUP. Takes the arguments with the program's name first; gives the exit
/// status. With `checkpoint` as the first of them it looks at data directories instead.
pub fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    let args: Vec<_> = args.into_iter().collect();
    if args.get(1).is_some_and(|first| first == "checkpoint") {
        return run_checkpoint(args.into_iter().skip(1));
    }
    let args = match ServeArgs::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return error.exit_code();
        }
    };
    let filter = match log_filter(&std::env::var("FASTPS_LOG").unwrap_or_default()) {
        Ok(filter) => filter,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "fastps: error: {error}");
            return 2;
        }
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    // A second call in one process keeps the first one's subscriber.
    let _ = tracing_subscriber::registry().with(lines).with(filter).try_init();
    open_files::raise();
    match serve(args) {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "fastps: error: {error}");
            1
        }
    }
}

/// Lists, verifies, restores or exports data directories; takes the arguments with the program's name first.
pub fn run_checkpoint(args: impl IntoIterator<Item = OsString>) -> i32 {
    checkpoint::run(args)
}

fn serve(args: ServeArgs) -> Result<()> {
    let io = |error: std::io::Error| Error::new(Kind::Internal, error.to_string());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
    runtime.block_on(async {
        // Before anybody learns that the server is there, so that no signal falls through.
        let stop = signals::stop().map_err(io)?;
        let server = Server::start(&ServerConfig {
            listen: args.listen,
            listen_unix: args.listen_unix,
            shards: args.shards,
            cluster: args.cluster,
            advertise: args.advertise,
            lease: Duration::from_millis(args.lease_ms),
            memory_limit: args.memory_limit,
            tls: TlsFiles { cert: args.tls_cert, key: args.tls_key, ca: args.tls_ca },
            local: args.local,
            insecure: args.insecure,
            spin: Duration::from_micros(args.spin_us),
            data_dir: args.data_dir,
            snapshot_every: args.snapshot_every,
            snapshot_after: args.snapshot_after,
            keep: args.keep,
            keep_for: args.keep_for,
            copy_to: args.copy_to,
            accept_loss: args.accept_loss,
            ..ServerConfig::default()
        })?;
        let mut out = std::io::stdout();
        for (index, address) in server.shards() {
            writeln!(out, "fastps: shard {index} listening on {address}").map_err(io)?;
        }
        for (index, path) in server.sockets() {
            writeln!(out, "fastps: shard {index} listening on unix://{}", path.display()).map_err(io)?;
        }
        out.flush().map_err(io)?;
        stop.await;
        tracing::info!("stopping");
        server.stop(STOP_TIMEOUT)
    })
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

    #[test]
    fn sizes_are_read() {
        assert_eq!(parse_bytes("4GiB"), Ok(4 << 30));
        assert_eq!(parse_bytes("1.5 KiB"), Ok(1536));
        assert_eq!(parse_bytes("500MB"), Ok(500_000_000));
        assert_eq!(parse_bytes("17"), Ok(17));
        for bad in ["", "GiB", "4 apples", "0", "-1", "1e99"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }
}
