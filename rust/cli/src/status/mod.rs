//! `fastps status`: the state of a running cluster, for people and as JSON.

mod json;
mod lines;
mod warnings;

pub(crate) use lines::{number, sentence, shard_row, shortened, table, worker_row};
pub(crate) use warnings::{of as warnings, slowness, workers};

use crate::addresses::{ADDRESSES, with_addresses};
use crate::command::{in_json, show};
use crate::credentials::Credentials;
use clap::Parser;
use fastps_client::{ClusterView, ShardView, inspect};
use fastps_core::error::Result;
use std::ffi::OsString;
use std::time::{Duration, Instant};

/// Time between the two looks that rates are computed from.
const INTERVAL: Duration = Duration::from_millis(500);

/// Show the state of a running cluster: its shards, its workers, and what is wrong. The exit code is 1 if a
/// shard does not answer or does not serve.
#[derive(Debug, Parser)]
#[command(name = "fastps status")]
pub(crate) struct StatusArgs {
    /// Addresses of the shards.
    #[arg(value_delimiter = ',', help = ADDRESSES)]
    addresses: Vec<String>,
    /// Seconds to wait for an answer.
    #[arg(long, default_value = "5", value_name = "SECONDS", value_parser = crate::seconds)]
    timeout: Duration,
    /// Show all counters, all workers and the open spaces of vectors.
    #[arg(long)]
    all: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    credentials: Credentials,
}

/// Two looks at a cluster.
#[derive(Debug)]
pub(crate) struct Looks {
    pub(crate) now: ClusterView,
    pub(crate) before: ClusterView,
    /// Seconds between them.
    pub(crate) apart: f64,
}

impl Looks {
    /// Increase of a shard's counter per second.
    pub(crate) fn rate(&self, shard: Option<u32>, counter: &str) -> Option<f64> {
        let of = |view: &ClusterView| {
            let view = view.shards.iter().find(|view| view.shard == shard)?;
            view.answer.as_ref().ok()?.counters.get(counter).copied()
        };
        let (now, before) = (of(&self.now)?, of(&self.before)?);
        Some(now.saturating_sub(before) as f64 / self.apart)
    }

    /// Returns whether every shard answers and serves.
    pub(crate) fn serve(&self) -> bool {
        let serves = |view: &ShardView| view.answer.as_ref().is_ok_and(|stats| stats.trouble.is_none());
        self.now.shards.iter().all(serves)
    }
}

/// Runs the command and returns the exit status. The first argument is the program's name.
pub(crate) fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    show(args, look)
}

/// The lines to print, and whether every shard serves.
fn look(args: StatusArgs) -> Result<(Vec<String>, bool)> {
    let (tls, token) = (args.credentials.tls(), args.credentials.token_file.as_deref());
    let looks = with_addresses(args.addresses, |addresses| {
        let (start, before) = (Instant::now(), inspect(addresses, &tls, token, args.timeout, &[])?);
        std::thread::sleep(INTERVAL.saturating_sub(start.elapsed()));
        let apart = start.elapsed().as_secs_f64();
        let now = inspect(addresses, &tls, token, args.timeout, &before.silent())?;
        Ok(Looks { now, before, apart })
    })?;
    let warnings = warnings::of(&looks.now);
    let lines = if args.json {
        vec![in_json(&json::of(&looks, &warnings))?]
    } else {
        lines::of(&looks, &warnings, args.all)
    };
    Ok((lines, looks.serve()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        StatusArgs::command().debug_assert();
        assert_eq!(run(["x", "--no-such-option"].map(OsString::from)), 2);
        assert_eq!(run(["x", "not an address"].map(OsString::from)), 1);
    }
}
