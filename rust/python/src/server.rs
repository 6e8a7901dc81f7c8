//! The network from Python: connecting, serving, and the command line.

use crate::call::{self, Here, Seconds};
use crate::client::Client;
use crate::errors::{self, OrRaise};
use crate::resolver;
use fastps_client::{Ack, ConnectOptions, TlsFiles, Transport};
use fastps_core::text;
use fastps_server::{Role, ServerConfig};
use pyo3::prelude::*;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Connects to a cluster; see `fastps.connect`.
#[pyfunction]
#[pyo3(signature = (addresses, timeout=30.0, check_finite=true, transport=None, spin_us=200, tls_ca=None, tls_cert=None,
                    tls_key=None, tls_server_name=None, ack="applied", namespace=None, wait=None, name=None, resolver=None,
                    token_file=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn connect(
    py: Python<'_>,
    addresses: &str,
    timeout: f64,
    check_finite: bool,
    transport: Option<&str>,
    spin_us: i64,
    tls_ca: Option<PathBuf>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_server_name: Option<String>,
    ack: &str,
    namespace: Option<String>,
    wait: Option<Seconds>,
    name: Option<String>,
    resolver: Option<Py<PyAny>>,
    token_file: Option<PathBuf>,
) -> PyResult<Client> {
    let ack = match ack {
        "applied" => Ack::Applied,
        "logged" => Ack::Logged,
        "copied" => Ack::Copied,
        other => {
            return Err(errors::config(py, "unknown ack", "\"applied\", \"logged\" or \"copied\"", other));
        }
    };
    let transport = match transport {
        None => Transport::Auto,
        Some("tcp") => Transport::Tcp,
        Some("unix") => Transport::Unix,
        Some("shm") => Transport::Shm,
        Some(other) => {
            return Err(errors::config(py, "unknown transport", "\"tcp\", \"unix\", \"shm\" or None", other));
        }
    };
    let timeout = call::duration(py, timeout)?;
    let addresses: Vec<String> =
        addresses.split(',').map(|a| a.trim().to_owned()).filter(|a| !a.is_empty()).collect();
    let tls = TlsFiles { cert: tls_cert, key: tls_key, ca: tls_ca };
    let spin = spin(py, spin_us)?;
    let defaults = ConnectOptions::default();
    let options = ConnectOptions {
        timeout: wait.map_or(Ok(timeout), |seconds| call::duration(py, seconds))?,
        name: name.map_or(defaults.name, |name| text::printable(&name)),
        transport,
        spin,
        tls,
        tls_server_name,
        token_file,
        ack,
        run: namespace,
        resolver: resolver.map(|resolver| resolver::of(&addresses.join(", "), resolver)),
        checksums: defaults.checksums,
    };
    let title = addresses.join(", ");
    let connected = call::run(py, true, move || fastps_client::Client::connect(&addresses, options))?;
    Ok(Client::remote(connected.or_raise(py)?, &title, check_finite, timeout))
}

fn spin(py: Python<'_>, us: i64) -> PyResult<Duration> {
    let refused = |_| errors::config(py, "invalid spin_us", "0 to 1000000", us);
    u64::try_from(us).map(Duration::from_micros).map_err(refused)
}

/// Shard servers in this process; see `fastps.serve`.
#[pyclass(frozen, module = "fastps._fastps", name = "Server")]
#[derive(Debug)]
pub(crate) struct Server(Here<Arc<fastps_server::Server>>);

#[pymethods]
impl Server {
    #[new]
    #[allow(clippy::too_many_arguments)]
    #[allow(clippy::fn_params_excessive_bools)]
    fn new(
        py: Python<'_>,
        shards: u32,
        listen: Vec<String>,
        listen_unix: Vec<PathBuf>,
        cluster: Vec<String>,
        advertise: Option<String>,
        memory_limit: Option<u64>,
        lease: f64,
        refuse_workers: Vec<String>,
        local: bool,
        insecure: bool,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        tls_ca: Option<PathBuf>,
        spin_us: i64,
        data_dir: Option<PathBuf>,
        snapshot_every: f64,
        snapshot_after: u64,
        keep: usize,
        keep_for: f64,
        keep_history: u64,
        copy_to: Option<String>,
        copy_history: bool,
        copy_log: Option<f64>,
        copy_bytes_per_second: Option<u64>,
        owner_lease: Option<f64>,
        take_over: Option<String>,
        shard: Option<u32>,
        accept_loss: bool,
        tokens: Option<PathBuf>,
        server_token: Option<PathBuf>,
        tls_crl: Option<PathBuf>,
        audit: Option<PathBuf>,
        certificate_role: &str,
    ) -> PyResult<Self> {
        let config = ServerConfig {
            listen,
            listen_unix,
            shards,
            cluster,
            advertise,
            lease: call::duration(py, lease)?,
            refuse_workers,
            memory_limit,
            local,
            insecure,
            spin: spin(py, spin_us)?,
            data_dir,
            snapshot_every: call::duration(py, snapshot_every)?,
            snapshot_after,
            keep,
            keep_for: call::duration(py, keep_for)?,
            keep_history,
            copy_to,
            copy_history,
            copy_log: copy_log.map(|seconds| call::duration(py, seconds)).transpose()?,
            copy_bytes_per_second,
            owner_lease: owner_lease.map(|seconds| call::duration(py, seconds)).transpose()?,
            take_over,
            shard,
            accept_loss,
            tokens,
            server_token,
            tls_crl,
            certificate_role: certificate_role.parse::<Role>().or_raise(py)?,
            audit,
            tls: TlsFiles { cert: tls_cert, key: tls_key, ca: tls_ca },
            ..ServerConfig::default()
        };
        let has_lease = config.owner_lease.is_some();
        let given_up = Arc::new(AtomicBool::new(false));
        let is_given_up = given_up.clone();
        let start = move || fastps_server::Server::start_unless(&config, &is_given_up);
        // The start waits for the former owner of a shard, which may last.
        let started =
            call::run(py, has_lease, start).inspect_err(|_| given_up.store(true, Ordering::Relaxed));
        let server = Arc::new(started?.or_raise(py)?);
        if has_lease {
            fastps_server::server::stop_when_asked(&server).or_raise(py)?;
        }
        Ok(Self(Here::new("server", server)))
    }

    /// ``host:port`` of each shard, in the order of their indices.
    fn addresses(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.0.get(py)?.addresses().to_vec())
    }

    fn stop(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let (server, timeout) = (self.0.get(py)?.clone(), call::duration(py, timeout)?);
        call::run(py, true, move || server.stop(timeout))?.or_raise(py)
    }
}

/// Runs ``fastps serve`` or ``fastps fork`` with these arguments until SIGTERM, SIGINT or the end of its terminal;
/// returns the exit status.
#[pyfunction]
pub(crate) fn serve_cli(py: Python<'_>, command: &str, args: Vec<OsString>) -> i32 {
    let args = std::iter::once(OsString::from(format!("fastps {command}"))).chain(args);
    py.detach(|| match command {
        "serve" => fastps_cli::run(args),
        _ => fastps_cli::run_command(command, args),
    })
}

/// ``serve`` or a command of the command line in Rust, and its subcommands: name, what it does, arguments,
/// options and subcommands of each.
#[pyfunction]
pub(crate) fn described(name: &str) -> Vec<fastps_cli::Described> {
    fastps_cli::described(name)
}

/// A line of text for a terminal, with hidden characters escaped.
#[pyfunction]
pub(crate) fn printable(text: &str) -> String {
    text::printable(text)
}

/// The name that a misspelt one most likely means.
#[pyfunction]
pub(crate) fn nearest(name: &str, names: Vec<String>) -> Option<String> {
    text::nearest(name, names.iter().map(String::as_str)).map(str::to_owned)
}

/// Runs a command of the command line in Rust, such as ``status``; returns the exit status.
#[pyfunction]
pub(crate) fn command_cli(py: Python<'_>, command: &str, args: Vec<OsString>) -> PyResult<i32> {
    let program = OsString::from(format!("fastps {command}"));
    let command = command.to_owned();
    call::run(py, true, move || fastps_cli::run_command(&command, std::iter::once(program).chain(args)))
}
