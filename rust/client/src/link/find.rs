//! Finds a link's shard at another address. The shard is recognized by its identity: the cluster's, and the
//! index in it.

use crate::link::refresh::ask_owners;
use crate::link::state::Link;
use crate::link::unary::{self, CONNECT_TIMEOUT};
use crate::state::resolution::Resolution;
use fastps_core::error::{Error, Kind, Result};
use fastps_transport::channel;
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tonic::transport::Channel;

/// How long a search waits for the resolver before the present address is tried again.
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// How long a search waits for shard 0.
const OWNERS_WAIT: Duration = Duration::from_millis(500);

/// Server at an address.
enum Found {
    /// The link's shard.
    Shard(String, Channel),
    /// Another shard of the cluster.
    Other,
    /// A server of another cluster.
    Stranger(Error),
    /// None that answers.
    Silence,
}

/// Result of a search.
enum Search {
    Moved,
    /// A server answers at each address that the resolver names, and one is of another cluster.
    OnlyStrangers(Error),
    Nothing,
}

/// Asks the resolver, if there is one, and shard 0 where the shard is, and moves the link there. Returns whether it
/// moved. Ends the client if two answers of the resolver in a row name only other servers: then the shard's data is
/// gone.
pub(crate) async fn find(link: &Arc<Link>, first: &Link) -> bool {
    let Some(resolution) = &link.shared.resolution else {
        ask_for_owner(link, first).await;
        return matches!(search(link, None, None).await, Search::Moved);
    };
    let (answer, ()) = tokio::join!(resolution.ask(ANSWER_WAIT), ask_for_owner(link, first));
    let mut found = search(link, Some(resolution), answer).await;
    if let Search::OnlyStrangers(_) = found {
        // The answer may be from before the server's start at another address.
        let answer = resolution.ask_again(ANSWER_WAIT).await;
        found = search(link, Some(resolution), answer).await;
        if let Search::OnlyStrangers(error) = found {
            link.fenced(error);
            return false;
        }
    }
    matches!(found, Search::Moved)
}

/// Asks shard 0 who owns the shard now, if shards have owners and it can be reached.
async fn ask_for_owner(link: &Link, first: &Link) {
    if link.shard() != first.shard() && link.term.load(Ordering::Acquire) > 0 && first.is_connected() {
        ask_owners(first, OWNERS_WAIT).await;
    }
}

/// Looks for the shard at all addresses of an answer, at the one that the other servers list, and at its owner's.
async fn search(
    link: &Arc<Link>,
    resolution: Option<&Arc<Resolution>>,
    answer: Option<Result<Vec<String>>>,
) -> Search {
    let named = answer.and_then(Result::ok).unwrap_or_default();
    let listed = resolution.and_then(|resolution| resolution.listed(link.shard()));
    let present = link.address();
    let owner = link.shared.owners.address(link.shard(), link.term.load(Ordering::Acquire));
    let told = listed.into_iter().chain(owner.filter(|owner| *owner != present));
    let told: BTreeSet<_> = told.filter(|told| !named.contains(told)).collect();
    let addresses = named.iter().cloned().map(|address| (address, true));
    let addresses = addresses.chain(told.into_iter().map(|address| (address, false)));
    let mut probes: FuturesUnordered<_> =
        addresses.map(|(address, is_named)| async move { (probe(link, address).await, is_named) }).collect();
    let (mut stranger, mut silent) = (None, false);
    while let Some((found, is_named)) = probes.next().await {
        match found {
            Found::Shard(address, _) if address == present => return Search::Nothing,
            Found::Shard(address, channel) => {
                tracing::info!(shard = link.shard(), from = present, to = address, "the shard has moved");
                link.move_to(address, channel);
                return Search::Moved;
            }
            Found::Stranger(error) if is_named => stranger = Some(error),
            Found::Silence if is_named => silent = true,
            Found::Stranger(_) | Found::Silence | Found::Other => {}
        }
    }
    stranger.filter(|_| !silent).map_or(Search::Nothing, Search::OnlyStrangers)
}

/// Says hello to the server at an address, as the link's shard.
async fn probe(link: &Link, address: String) -> Found {
    let shared = &link.shared;
    let route = link.route().at(address.clone());
    if let Err(error) = shared.bearer.check_address(&address, route.tls().is_some()) {
        tracing::warn!(shard = link.shard(), %error, "a server that the resolver returned is skipped");
        return Found::Silence;
    }
    let Ok(channel) = channel(&address, route.tls()) else {
        return Found::Silence;
    };
    match tokio::time::timeout(CONNECT_TIMEOUT, unary::hello(channel.clone(), link.who(), true)).await {
        // An earlier owner is not where the shard is.
        Ok(Ok(hello)) if link.term.load(Ordering::Acquire) > hello.term => Found::Silence,
        Ok(Ok(_)) => Found::Shard(address, channel),
        Ok(Err(error)) if error.kind == Kind::Fenced => Found::Stranger(error),
        // It has no session of this client, or is not ready.
        Ok(Err(error)) if error.shard == Some(link.shard()) => Found::Shard(address, channel),
        Ok(Err(error)) if error.shard.is_some() => Found::Other,
        Ok(Err(_)) | Err(_) => Found::Silence,
    }
}
