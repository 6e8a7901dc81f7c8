//! Brings a client's copy of the cluster map up to date.

use crate::link::state::Link;
use crate::link::unary::{call, request};
use crate::state::map::{Entry, Map};
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most tensors that one call names; servers refuse more than 4096.
pub(crate) const NAMES_ASKED: usize = 1000;

/// Asks shard 0 for some tensors, or for all.
pub(crate) async fn refresh(
    map: &Map,
    link: &Link,
    shards: usize,
    names: &[String],
    deadline: Instant,
) -> Result<()> {
    if names.is_empty() {
        return ask(map, link, shards, names, deadline).await;
    }
    for names in names.chunks(NAMES_ASKED) {
        ask(map, link, shards, names, deadline).await?;
    }
    Ok(())
}

async fn ask(map: &Map, link: &Link, shards: usize, names: &[String], deadline: Instant) -> Result<()> {
    let run = map.run();
    let mut entries = Vec::new();
    // The names of a run follow its prefix.
    let mut after = run.prefix().to_owned();
    let there: Vec<_> = names.iter().map(|name| run.there(name)).collect();
    loop {
        let ask = pb::GetMapRequest { names: there.clone(), after: after.clone(), page_size: 0 };
        let mut page: pb::GetMapResponse = call(link, deadline, |mut client, left| {
            let ask = ask.clone();
            async move { client.get_map(request(ask, left)).await }
        })
        .await?;
        link.shared.owners.note(std::mem::take(&mut page.owners), link.shards);
        let mut ended = page.next.is_empty();
        for entry in &page.entries {
            match run.spec_here(convert::spec_from_wire(entry.spec.as_ref())?) {
                Some(spec) => entries.push(Entry::new(Arc::new(spec), entry.placement.as_ref(), shards)?),
                None => ended = true,
            }
        }
        if ended {
            map.update(page.epoch, names, entries);
            return Ok(());
        }
        if page.next <= after {
            return Err(Error::new(Kind::Frame, "bad map from the server: its pages do not end"));
        }
        after = page.next;
    }
}

/// Asks shard 0 who owns the shards. No answer within the time is none.
pub(crate) async fn ask_owners(first: &Link, within: Duration) {
    let ask = pb::GetMapRequest { page_size: 1, ..Default::default() };
    let asked = call(first, Instant::now() + within, |mut client, left| {
        let ask = ask.clone();
        async move { client.get_map(request(ask, left)).await }
    });
    if let Ok(pb::GetMapResponse { owners, .. }) = asked.await {
        first.shared.owners.note(owners, first.shards);
    }
}
