//! Finds a link's shard at another address. The shard is recognized by its identity: the cluster's, and the
//! index in it.

use crate::link::state::Link;
use crate::link::unary::{self, CONNECT_TIMEOUT};
use crate::state::resolution::Resolution;
use fastps_core::error::{Error, Kind, Result};
use fastps_transport::channel;
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tonic::transport::Channel;

/// How long a search waits for the resolver before the present address is tried again.
const ANSWER_WAIT: Duration = Duration::from_secs(1);

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

/// Asks the resolver where the shard is, and moves the link there. Returns whether it moved. Ends the client
/// if two answers in a row name only other servers: then the shard's data is gone.
pub(crate) async fn find(link: &Arc<Link>, resolution: &Arc<Resolution>) -> bool {
    let answer = resolution.ask(ANSWER_WAIT).await;
    let mut found = search(link, resolution, answer).await;
    if let Search::OnlyStrangers(_) = found {
        // The answer may be from before the server's start at another address.
        let answer = resolution.ask_again(ANSWER_WAIT).await;
        found = search(link, resolution, answer).await;
        if let Search::OnlyStrangers(error) = found {
            link.fenced(error);
            return false;
        }
    }
    matches!(found, Search::Moved)
}

/// Looks for the shard at all addresses of an answer, and at the one that the other servers list.
async fn search(
    link: &Arc<Link>,
    resolution: &Arc<Resolution>,
    answer: Option<Result<Vec<String>>>,
) -> Search {
    let named = answer.and_then(Result::ok).unwrap_or_default();
    let listed = resolution.listed(link.shard()).filter(|listed| !named.contains(listed));
    let addresses = named.iter().cloned().map(|address| (address, true));
    let addresses = addresses.chain(listed.map(|address| (address, false)));
    let mut probes: FuturesUnordered<_> =
        addresses.map(|(address, is_named)| async move { (probe(link, address).await, is_named) }).collect();
    let (present, mut stranger, mut silent) = (link.address(), None, false);
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
