//! The part of `fastps checkpoint` that works on copies in a bucket.

use crate::checkpoint::verified as lines_of;
use crate::command::{in_json, note, say};
use fastps_core::error::{Error, Kind, Result};
use fastps_server::backup::{self, Bucket, Stored, Verified, Which};
use fastps_server::human::{duration, now, size};
use serde_json::{Value, json};
use std::path::Path;

/// Returns whether this is meant as the URL of a bucket.
pub(crate) fn is_url(path: &Path) -> bool {
    path.to_str().is_some_and(backup::is_url)
}

fn open(url: &Path) -> Result<Bucket> {
    Bucket::open(&url.to_string_lossy())
}

/// Tells which copies there are.
pub(crate) fn list(url: &Path, json: bool) -> Result<bool> {
    let stored = backup::list(&open(url)?)?;
    if json {
        let snapshots: Vec<_> = stored.iter().map(stored_in_json).collect();
        say(&[in_json(&json!({ "snapshots": snapshots }))?])?;
    } else {
        say(&stored.iter().map(stored_for_people).collect::<Vec<_>>())?;
    }
    Ok(true)
}

fn stored_in_json(stored: &Stored) -> Value {
    let Stored { shard, shards, number, place, latest, problem, written, bytes, slices, cut } = stored;
    json!({
        "shard": shard, "shards": shards, "number": number, "place": place, "latest": latest, "problem": problem,
        "written": written, "bytes": bytes, "slices": slices, "cut": cut,
    })
}

fn stored_for_people(stored: &Stored) -> String {
    let Stored { shard, shards, number, place, latest, problem, written, bytes, slices, cut } = stored;
    let of = shards.map_or(String::new(), |shards| format!(" of {shards}"));
    let mark = if *latest { ", the latest" } else { "" };
    let head = format!("shard {shard}{of}: snapshot {number}{mark}");
    if let Some(problem) = problem {
        return format!("{head}: {place}: {problem}");
    }
    let (age, bytes) = (duration(now().saturating_sub(*written)), size(*bytes));
    let cut = cut.as_ref().map_or(String::new(), |group| format!(", a cut over group {group:?}"));
    format!("{head}: {age} ago, {slices} slices, {bytes}{cut}: {place}")
}

/// Reads every byte of the copies; false: something is damaged.
pub(crate) fn verify(url: &Path, json: bool) -> Result<bool> {
    let verified = backup::verify(&open(url)?)?;
    let ok = verified.iter().all(|shard| shard.damages.is_empty());
    if json {
        let shards = verified.iter().map(|Verified { shard, place, whole, damages }| {
            json!({ "shard": shard, "path": place, "whole": whole, "damages": damages })
        });
        say(&[in_json(&json!({ "ok": ok, "shards": shards.collect::<Vec<_>>() }))?])?;
    } else {
        let lines = verified.iter().flat_map(|v| lines_of(v.shard, &v.whole, &v.damages));
        say(&lines.collect::<Vec<_>>())?;
    }
    Ok(ok)
}

/// Makes a data directory of the newest copies, or of those of the newest consistent snapshot.
pub(crate) fn fetch(url: &str, dir: &Path, consistent: bool) -> Result<bool> {
    let which = if consistent { Which::Cut } else { Which::Newest };
    let got = backup::fetch(&Bucket::open(url)?, which, dir)?;
    let mut lines: Vec<_> = got
        .iter()
        .map(|got| {
            let bytes = size(got.bytes);
            format!(
                "shard {}: snapshot {}, {} slices, {bytes}, from {}",
                got.shard, got.number, got.slices, got.place
            )
        })
        .collect();
    lines.push(format!("{}: for {} shards", dir.display(), got.len()));
    say(&lines)?;
    Ok(true)
}

/// Copies the newest snapshots of a data directory.
pub(crate) fn upload(dir: &Path, url: &str, keep: usize) -> Result<bool> {
    if keep == 0 {
        return Err(Error::new(Kind::Config, "the last copy stays").expected("--keep 1 or more", keep));
    }
    let uploaded = backup::upload_all(dir, &Bucket::open(url)?, keep)?;
    let lines = uploaded.iter().map(|done| {
        let was_there = if done.was_there { "was there already" } else { "copied" };
        format!(
            "shard {}: snapshot {}, {}, {was_there}: {}",
            done.shard,
            done.number,
            size(done.bytes),
            done.place
        )
    });
    say(&lines.collect::<Vec<_>>())?;
    let left: Vec<_> = uploaded.iter().filter_map(|done| done.left.as_ref()).collect();
    for error in left {
        note(format_args!("older copies stay: {error}"));
    }
    Ok(true)
}
