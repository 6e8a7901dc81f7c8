//! `fastps top`: the state of a running cluster, live.

mod keys;
mod lines;
mod screen;
mod state;
mod tables;
mod terminal;
mod watch;

use crate::addresses::ADDRESSES;
use crate::command::{note, put, run_to_status};
use crate::credentials::Credentials;
use clap::Parser;
use fastps_core::error::{Error, Kind, Result};
use state::State;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::time::Duration;
use watch::{Event, Watch};

/// Watch a running cluster: rates, staleness and waiting of its workers, and what is wrong. Where standard
/// output is not a terminal, prints one line per interval.
#[derive(Debug, Parser)]
#[command(name = "fastps top")]
pub(crate) struct TopArgs {
    /// Addresses of the shards.
    #[arg(value_delimiter = ',', help = ADDRESSES)]
    addresses: Vec<String>,
    /// Seconds between two looks at the cluster.
    #[arg(long, default_value = "1", value_name = "SECONDS", value_parser = crate::seconds)]
    interval: Duration,
    /// Seconds to wait for an answer.
    #[arg(long, default_value = "5", value_name = "SECONDS", value_parser = crate::seconds)]
    timeout: Duration,
    /// Print the screen once, and exit with 1 if a shard does not serve.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    credentials: Credentials,
}

/// Runs the command and returns the exit status. The first argument is the program's name.
pub(crate) fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    run_to_status(args, |args| {
        watch(args).unwrap_or_else(|error| {
            note(&error);
            1
        })
    })
}

fn watch(args: TopArgs) -> Result<i32> {
    let failed = |error: io::Error| Error::new(Kind::Internal, format!("cannot watch: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(async {
        let is_live = !args.once && io::stdout().is_terminal() && io::stdin().is_terminal();
        let mut watch =
            Watch::start(args.addresses, args.credentials, (args.interval, args.timeout)).map_err(failed)?;
        if args.once {
            return once(&mut watch).await;
        }
        if is_live { terminal::run(&mut watch).await.map_err(failed) } else { print(&mut watch).await }
    })
}

/// Prints the screen after two looks, between which rates are counted.
async fn once(watch: &mut Watch) -> Result<i32> {
    let mut state = State::default();
    for _ in 0..2 {
        match watch.next().await {
            Event::Looked(found, at) => state.looked(found, at),
            Event::Stop | Event::Key(_) | Event::Resized => return Ok(1),
        }
        if let Some(error) = state.error.take() {
            return Err(error);
        }
    }
    let screen = screen::text(&state).map_err(|error| Error::new(Kind::Internal, error.to_string()))?;
    Ok(put(&screen).unwrap_or(i32::from(!state.serves())))
}

/// Prints a line per look until it is stopped.
async fn print(watch: &mut Watch) -> Result<i32> {
    let mut state = State::default();
    loop {
        match watch.next().await {
            Event::Looked(found, at) => state.looked(found, at),
            Event::Stop => return Ok(0),
            Event::Key(_) | Event::Resized => continue,
        }
        if let Some(code) = put(&[lines::summary(&state)]) {
            return Ok(code);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        TopArgs::command().debug_assert();
        assert_eq!(run(["x", "--no-such-option"].map(OsString::from)), 2);
        assert_eq!(run(["x", "--once", "not an address"].map(OsString::from)), 1);
    }
}
