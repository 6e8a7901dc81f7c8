//! `fastps checkpoint` and `fastps-server checkpoint`: data directories without a server, and snapshots of
//! running servers.

use crate::addresses::{ADDRESSES, with_addresses};
use crate::command::{self, in_json, note, say};
use crate::credentials::Credentials;
use clap::{Args, Parser, Subcommand, ValueEnum};
use fastps_client::{self as client, Client, ConnectOptions, TlsFiles};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::verbs::PullView;
use fastps_durable::Reading;
use fastps_durable::checkpoint::{self, Listed, Snapshot, Verified};
use fastps_server::human::{duration, now, size};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Save, inspect, convert and copy snapshots. DIR is the --data-dir of the servers.
#[derive(Debug, Parser)]
#[command(name = "fastps checkpoint")]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    command: Command,
}

/// What an export writes of a tensor.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum View {
    Values,
    Average,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make every shard of a running cluster write a snapshot now, and wait until all are durable.
    Save {
        /// Addresses of the shards.
        #[arg(value_delimiter = ',', help = ADDRESSES)]
        addresses: Vec<String>,
        /// Save the tensors of this group as of one moment on all shards. Pushes wait for some milliseconds
        /// when the snapshot begins. Until it is written, it takes memory for up to one more copy of the
        /// group's optimizer state.
        #[arg(long, value_name = "GROUP", num_args = 0..=1, require_equals = true, default_missing_value = "default")]
        consistent: Option<String>,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        reach: Reach,
    },
    /// List the snapshots of each shard. Servers may be running.
    List {
        /// The data directory, or the URL that snapshots are copied to.
        dir: PathBuf,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Read every byte and compare all checksums; the exit code is 1 if anything is damaged. Servers may be
    /// running.
    Verify {
        /// The data directory, or the URL that snapshots are copied to.
        dir: PathBuf,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Write a new data directory for another number of shards. No server may use the old one, which is not
    /// changed. Needs memory for all tensors and their optimizer state.
    Restore {
        /// The data directory to read.
        source: PathBuf,
        /// The data directory to write; it must not exist or must be empty.
        target: PathBuf,
        /// Number of shards of the new directory.
        #[arg(long)]
        shards: u32,
        /// Continue even if durable data cannot be read, and drop what is lost.
        #[arg(long)]
        accept_loss: bool,
        /// Use the newest consistent snapshot of all shards, without later changes. Servers may be running.
        #[arg(long, conflicts_with = "accept_loss")]
        consistent: bool,
    },
    /// Build a new data directory from the newest copy of each shard. It lacks all changes after these
    /// snapshots.
    Fetch {
        /// The URL that servers have as --copy-to.
        url: String,
        /// The directory to write; it must not exist or must be empty.
        dir: PathBuf,
        /// Fetch the newest consistent snapshot of all shards instead of each shard's newest copy.
        #[arg(long)]
        consistent: bool,
    },
    /// Copy the newest snapshot of each shard, as a server does with --copy-to. No server may use the
    /// directory.
    Upload {
        /// The data directory.
        dir: PathBuf,
        /// Where to copy them, as for --copy-to.
        url: String,
        /// Number of copies to keep there.
        #[arg(long, default_value_t = 2, value_name = "COUNT")]
        keep: usize,
    },
    /// Write one safetensors file with every tensor under its name, from a data directory that no server
    /// uses, or from running servers. Needs memory for all tensors and their optimizer state.
    #[command(allow_missing_positional = true)]
    Export {
        /// A data directory; or addresses of running servers: host:port,host:port. All tensors of servers are as of
        /// one moment; pushes wait meanwhile, at most 2 seconds at a time.
        source: String,
        /// The file to write; it must not exist.
        file: PathBuf,
        /// Also write optimizer state, as NAME.SLOT.
        #[arg(long)]
        state: bool,
        /// What to write under the names of the tensors: their values, or the averages that they keep. A
        /// tensor without average is written with its values, and named.
        #[arg(
            long,
            value_enum,
            default_value_t = View::Values,
            hide_possible_values = true,
            value_name = "VIEW"
        )]
        view: View,
        /// Continue even if durable data cannot be read, and drop what is lost.
        #[arg(long)]
        accept_loss: bool,
        /// Use the newest consistent snapshot of all shards, without later changes. Servers may be running.
        #[arg(long, conflicts_with = "accept_loss")]
        consistent: bool,
        /// Of servers: only the tensors of this namespace, under their names in it.
        #[arg(long, value_name = "NAME")]
        namespace: Option<String>,
        #[command(flatten)]
        reach: Reach,
    },
}

/// How to reach running servers.
#[derive(Debug, Args)]
struct Reach {
    /// Seconds to wait.
    #[arg(long, default_value = "600", value_name = "SECONDS", value_parser = crate::seconds)]
    timeout: Duration,
    #[command(flatten)]
    credentials: Credentials,
}

impl Reach {
    fn has_tls(&self) -> bool {
        self.credentials.tls() != TlsFiles::default()
    }

    fn options(self) -> ConnectOptions {
        let (timeout, tls) = (self.timeout, self.credentials.tls());
        ConnectOptions { timeout, tls, token_file: self.credentials.token_file, ..ConnectOptions::default() }
    }
}

fn reading(accept_loss: bool, consistent: bool) -> Reading {
    match (accept_loss, consistent) {
        (_, true) => Reading::Cut,
        (true, _) => Reading::WhatIsLeft,
        _ => Reading::All,
    }
}

/// Runs the command and returns the exit status.
pub(crate) fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    command::run(args, |args: CheckpointArgs| execute(args.command))
}

fn connect(addresses: Vec<String>, options: ConnectOptions) -> Result<Arc<Client>> {
    with_addresses(addresses, |addresses| Client::connect(addresses, options))
}

/// Returns false if a check found damage.
fn execute(command: Command) -> Result<bool> {
    match command {
        Command::Save { addresses, consistent, json, reach } => {
            let timeout = reach.timeout;
            let client = connect(addresses, reach.options())?;
            let snapshots = match consistent {
                None => client.checkpoint(timeout)?,
                Some(group) => client.checkpoint_of_cut(&group, timeout)?,
            };
            if json {
                let shards: Vec<_> = snapshots.iter().enumerate().map(saved_in_json).collect();
                say(&[in_json(&serde_json::json!({ "shards": shards }))?])?;
            } else {
                say(&snapshots.iter().enumerate().map(saved).collect::<Vec<_>>())?;
            }
            Ok(true)
        }
        Command::List { dir, json } if crate::bucket::is_url(&dir) => crate::bucket::list(&dir, json),
        Command::Verify { dir, json } if crate::bucket::is_url(&dir) => crate::bucket::verify(&dir, json),
        Command::Fetch { url, dir, consistent } => crate::bucket::fetch(&url, &dir, consistent),
        Command::Upload { dir, url, keep } => crate::bucket::upload(&dir, &url, keep),
        Command::List { dir, json } => {
            let shards = checkpoint::list(&dir)?;
            if json {
                say(&[in_json(&serde_json::json!({ "shards": shards }))?])?;
            } else {
                say(&shards.iter().flat_map(listed).collect::<Vec<_>>())?;
            }
            Ok(true)
        }
        Command::Verify { dir, json } => {
            let shards = checkpoint::verify(&dir)?;
            let ok = shards.iter().all(|shard| shard.damages.is_empty());
            if json {
                say(&[in_json(&serde_json::json!({ "ok": ok, "shards": shards }))?])?;
            } else {
                let lines = shards.iter().flat_map(|v: &Verified| verified(v.shard, &v.whole, &v.damages));
                say(&lines.collect::<Vec<_>>())?;
            }
            Ok(ok)
        }
        Command::Restore { source, target, shards, accept_loss, consistent } => {
            let done = fastps_durable::restore(&source, &target, shards, reading(accept_loss, consistent))?;
            done.notes.iter().for_each(note);
            let (tensors, slices, bytes) = (done.tensors, done.slices, size(done.bytes));
            let target = target.display();
            say(&[format!("{target}: {tensors} tensors, {slices} slices, {bytes}, for {shards} shards")])?;
            Ok(true)
        }
        Command::Export { source, file, state, view, accept_loss, consistent, namespace, reach } => {
            let view = match view {
                View::Values => PullView::Values,
                View::Average => PullView::Average,
            };
            let wrong = |why: &str, expected: &str| {
                Err(Error::new(Kind::Config, why).expected(expected, format!("{source:?}")))
            };
            let done = match (servers(&source), namespace.is_some() || reach.has_tls()) {
                (None, true) => {
                    let why = "--namespace, --tls-ca, --tls-cert and --tls-key are for servers";
                    return wrong(why, "addresses of servers, such as host-a:7070");
                }
                (Some(_), _) if accept_loss || consistent => {
                    return wrong("--accept-loss and --consistent are for files", "a data directory");
                }
                (None, false) => {
                    let reading = reading(accept_loss, consistent);
                    fastps_durable::export(Path::new(&source), &file, state, view, reading)?
                }
                (Some(servers), _) => {
                    let timeout = reach.timeout;
                    let options = ConnectOptions { run: namespace, ..reach.options() };
                    crate::export::of_servers(&*connect(servers, options)?, &file, state, view, timeout)?
                }
            };
            done.notes.iter().for_each(note);
            say(&[format!("{}: {} tensors, {}", file.display(), done.tensors, size(done.bytes))])?;
            Ok(true)
        }
    }
}

/// The addresses that a source of tensors names, unless it is a folder.
fn servers(source: &str) -> Option<Vec<String>> {
    let named = source.contains(':') && !Path::new(source).exists();
    named.then(|| source.split(',').map(str::to_owned).collect())
}

fn saved((shard, snapshot): (usize, &client::Snapshot)) -> String {
    let client::Snapshot { address, number, path, bytes, slices } = snapshot;
    let bytes = size(*bytes);
    format!("shard {shard} ({address}): snapshot {number}, {slices} slices, {bytes}: {path}")
}

fn saved_in_json((shard, snapshot): (usize, &client::Snapshot)) -> serde_json::Value {
    let client::Snapshot { address, number, path, bytes, slices } = snapshot;
    serde_json::json!({
        "shard": shard, "address": address, "number": number, "path": path, "bytes": bytes, "slices": slices,
    })
}

fn listed(shard: &Listed) -> Vec<String> {
    let of = shard.shards.map_or(String::new(), |shards| format!(" of {shards}"));
    let mut lines = vec![format!("shard {}{of}: {}", shard.shard, shard.path.display())];
    lines.extend(shard.snapshots.iter().map(snapshot));
    lines.push(format!("  log: {} files, {}", shard.log_segments, size(shard.log_bytes)));
    lines.extend(shard.put_aside.iter().map(|name| format!("  put aside: {name}")));
    lines
}

fn snapshot(snapshot: &Snapshot) -> String {
    let Snapshot { number, problem, written, bytes, slices, versions, steps, cut, not_finite } = snapshot;
    if let Some(problem) = problem {
        return format!("  snapshot {number}: {problem}");
    }
    let (age, bytes) = (duration(now().saturating_sub(*written)), size(*bytes));
    let cut = cut.as_ref().map_or(String::new(), |cut| format!(", a cut over group {:?}", cut.group));
    let broken = match &not_finite[..] {
        [] => String::new(),
        tensors => format!(", NaN or infinity in {}", tensors.join(", ")),
    };
    let counts = format!("{slices} slices, {versions} versions, {steps} steps, {bytes}");
    format!("  snapshot {number}: {age} ago, {counts}{cut}{broken}")
}

/// Result of verifying a shard's snapshots, in a directory or a bucket.
pub(crate) fn verified(shard: u32, whole: &[u64], damages: &[String]) -> Vec<String> {
    let whole: Vec<_> = whole.iter().map(u64::to_string).collect();
    let whole = if whole.is_empty() { "none".to_owned() } else { whole.join(", ") };
    let state = if damages.is_empty() { "whole" } else { "DAMAGED" };
    let mut lines = vec![format!("shard {shard}: {state}; whole snapshots: {whole}")];
    lines.extend(damages.iter().map(|damage| format!("  {damage}")));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        CheckpointArgs::command().debug_assert();
        assert_eq!(run(["x", "restore", "a", "b"].map(OsString::from)), 2);
        assert_eq!(run(["x", "list", "/no/such/directory"].map(OsString::from)), 1);
    }

    #[test]
    fn sizes_and_ages_are_for_people() {
        assert_eq!([size(17), size(1536), size(5 << 40)], ["17 B", "1.5 KiB", "5.0 TiB"]);
        assert_eq!([5, 600, 7200, 864_000].map(duration), ["5 s", "10 min", "2 h", "10 days"]);
    }
}
