//! `fastps owner`: which server owns each shard, according to the bucket of the copies.

use crate::command::{self, in_json, say};
use clap::Parser;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::owner::{Record, Stage};
use fastps_server::backup::{Bucket, Owned, owners, release};
use fastps_server::human::{duration, now};
use serde_json::{Value, json};
use std::ffi::OsString;

/// Show which server owns each shard, since when, in which term, and how old the newest copy is. No server is
/// asked: it is what the bucket says. Or ask an owner, through the bucket, to hand its shard over.
#[derive(Debug, Parser)]
#[command(name = "fastps owner")]
pub(crate) struct OwnerArgs {
    /// The URL that servers have as --copy-to.
    url: String,
    /// Show only this shard.
    #[arg(long, value_name = "INDEX")]
    shard: Option<u32>,
    /// Ask the owner of --shard to give it up, and wait until it has: it stops, with all shards of its process, once
    /// everything is copied. The next owner need not wait for the lease.
    #[arg(long, requires = "shard", conflicts_with = "json")]
    release: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command and returns the exit status. The first argument is the program's name.
pub(crate) fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    command::run(args, |args: OwnerArgs| {
        let bucket = Bucket::open(&args.url)?;
        if let (true, Some(shard)) = (args.release, args.shard) {
            return hand_over(&bucket, shard);
        }
        let mut owned = owners(&bucket)?;
        if let Some(shard) = args.shard {
            let count = owned.len();
            owned.retain(|one| one.shard == shard);
            if owned.is_empty() {
                let error = Error::new(Kind::Config, "the bucket has no such shard");
                return Err(error.expected(format!("one of its {count} shards"), format!("shard {shard}")));
            }
        }
        if args.json {
            let shards: Vec<_> = owned.iter().map(for_programs).collect();
            say(&[in_json(&json!({ "shards": shards }))?])?;
        } else {
            say(&owned.iter().map(|one| for_people(one, now())).collect::<Vec<_>>())?;
        }
        Ok(true)
    })
}

fn hand_over(bucket: &Bucket, shard: u32) -> Result<bool> {
    let asked = |record: &Record| {
        let Record { address, term, .. } = record;
        let _ = say(&[format!("shard {shard}: {address} (term {term}) is asked to give it up")]);
    };
    let free = match release(bucket, shard, asked)? {
        None => format!("shard {shard}: nobody owns it"),
        Some(Record { stage: Stage::Released, address, .. }) => {
            format!("shard {shard}: {address} has given it up")
        }
        Some(Record { address, term, .. }) => format!("shard {shard}: {address} owns it now, in term {term}"),
    };
    say(&[free])?;
    Ok(true)
}

fn for_programs(owned: &Owned) -> Value {
    let Owned { shard, record, renewed, copy } = owned;
    let copy = copy.map(|(snapshot, written)| json!({ "snapshot": snapshot, "written": written }));
    let owner = record.as_ref().map(|Record { cluster, term, stage, address, since, lease_ms, .. }| {
        json!({
            "cluster": format!("{cluster:016x}"), "term": term, "stage": stage, "address": address, "since": since,
            "lease_ms": lease_ms, "renewed": renewed,
        })
    });
    json!({ "shard": shard, "owner": owner, "copy": copy })
}

fn for_people(owned: &Owned, now: u64) -> String {
    let Owned { shard, record, renewed, copy } = owned;
    let ago = |then: u64| duration(now.saturating_sub(then));
    let copy = match copy {
        Some((snapshot, written)) => format!("newest copy: snapshot {snapshot}, {} old", ago(*written)),
        None => "no copy yet".to_owned(),
    };
    let Some(record) = record else {
        return format!("shard {shard}: its servers have no --owner-lease; {copy}");
    };
    let Record { address, term, since, .. } = record;
    let silent = renewed.map(|renewed| now.saturating_sub(renewed));
    let lease = record.lease().as_secs();
    let renewed = silent.map_or_else(String::new, |silent| format!(", renewed {} ago", duration(silent)));
    let owner = match record.stage {
        Stage::Released => format!("nobody; {address} gave it up in term {term}"),
        _ if silent.is_some_and(|silent| silent > lease) => {
            format!("{address} in term {term} is silent for longer than its lease of {lease} s{renewed}")
        }
        Stage::Recovering => format!("{address} is taking it in term {term}{renewed}"),
        Stage::Open => format!("{address} since {} in term {term}{renewed}", ago(*since)),
    };
    format!("shard {shard}: {owner}; {copy}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use fastps_durable::owner::Tip;

    #[test]
    fn a_line_says_who_owns_a_shard_and_how_old_its_copy_is() {
        let record = Record {
            format: 1,
            cluster: 7,
            shard: 3,
            term: 4,
            stage: Stage::Open,
            address: "host-a:7070".to_owned(),
            incarnation: 9,
            since: 1000,
            locked: None,
            lease_ms: 60_000,
            nonce: 1,
            release: false,
            tip: Tip::default(),
            bases: Vec::new(),
        };
        let owned = |record, renewed, copy| Owned { shard: 3, record, renewed, copy };
        let stage = |stage| Some(Record { stage, ..record.clone() });
        for (owned, says) in [
            (owned(None, None, None), "shard 3: its servers have no --owner-lease; no copy yet"),
            (
                owned(stage(Stage::Open), Some(1090), Some((5, 1060))),
                "host-a:7070 since 100 s in term 4, renewed 10 s ago; newest copy: snapshot 5, 40 s old",
            ),
            (owned(stage(Stage::Open), Some(1000), None), "silent for longer than its lease of 60 s"),
            (owned(stage(Stage::Recovering), Some(1090), None), "is taking it in term 4"),
            (owned(stage(Stage::Released), Some(1000), None), "nobody; host-a:7070 gave it up in term 4"),
        ] {
            let line = for_people(&owned, 1100);
            assert!(line.contains(says), "{line}");
            let program = for_programs(&owned);
            assert_eq!(program["owner"]["term"].as_u64(), owned.record.map(|record| record.term));
        }
    }
}
