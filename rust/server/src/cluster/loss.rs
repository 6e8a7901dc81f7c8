//! Finds out whether a shard has lost slices: shard 0 lists the tensors with slices on it. A shard that lacks
//! some, or whose shard 0 has lost the map, refuses to serve, unless `--accept-loss` lets it drop what is
//! incomplete.

use crate::cluster::membership::Standing;
use crate::cluster::node::Node;
use crate::cluster::node::coordinator::Coordinator;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Interval between questions to shard 0 until it answers, and until nothing is lost any more.
const ASK_INTERVAL: Duration = Duration::from_millis(200);
/// Tensors that a message names.
const MAX_NAMED_TENSORS: usize = 5;

/// A shard's loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Its slices of these tensors.
    Slices(Vec<String>),
    /// The map: shard 0 has no record of the shard's slices.
    Map,
}

/// Shard 0's list of the tensors on a shard.
#[derive(Debug, Default)]
struct Listing {
    cluster_id: u64,
    tensors: Vec<pb::ListedTensor>,
}

impl Listing {
    /// The question for the page after this name.
    fn question(shard: u32, after: String) -> pb::SettleRequest {
        pb::SettleRequest { listed_on: Some(shard), after, ..Default::default() }
    }

    /// Adds a page. Returns the name after which the next one starts, if there is one.
    fn add(&mut self, page: pb::SettleResponse) -> Option<String> {
        self.cluster_id = page.cluster_id;
        self.tensors.extend(page.listed);
        Some(page.next).filter(|next| !next.is_empty())
    }

    /// The loss of `node`, given this listing.
    fn loss(self, node: &Node) -> Option<Loss> {
        let known = node.membership.id();
        let is_other = match (self.cluster_id, known) {
            // An earlier version lists nothing.
            (0, _) => return None,
            // So does one of a shard.
            (_, 0) => self.tensors.is_empty() && node.reservations.holds_committed(),
            (listed, known) => listed != known && node.reservations.holds_any(),
        };
        if is_other {
            return Some(Loss::Map);
        }
        let lacks = |one: &pb::ListedTensor| node.reservations.held(one.reservation) as u64 != one.slices;
        let lost: Vec<_> = self.tensors.into_iter().filter(lacks).map(|one| one.name).collect();
        (!lost.is_empty()).then_some(Loss::Slices(lost))
    }
}

/// The loss of a shard whose shard 0 is in this process and serves no clients yet.
pub(crate) fn found_at_start(node: &Node) -> Result<Option<Loss>> {
    let Coordinator::Local(first) = &node.coordinator else { return Ok(None) };
    let (mut listing, mut after) = (Listing::default(), Some(String::new()));
    while let Some(name) = after {
        after = listing.add(first.answer_settle(&Listing::question(node.index(), name))?);
    }
    let id = listing.cluster_id;
    let loss = listing.loss(node);
    if loss.is_some() {
        node.membership.change(Standing::Waits(None));
    } else {
        node.hear(id)?;
        node.membership.change(Standing::Serves);
    }
    Ok(loss)
}

/// Keeps a shard's standing up to date until aborted.
pub(crate) async fn watch(node: Arc<Node>) {
    if node.is_coordinator() {
        return;
    }
    loop {
        match confirm(&node).await {
            Ok(true) => node.membership.doubted().await,
            Ok(false) => tokio::time::sleep(ASK_INTERVAL).await,
            Err(error) => {
                tracing::debug!(shard = node.index(), %error, "shard 0 has not said which slices are here");
                let refused = matches!(error.kind, Kind::Denied | Kind::Unauthenticated);
                let error = if refused { node.unanswered(&error) } else { error };
                node.membership.go_on_without_first(node.reservations.holds_any(), error);
                tokio::time::sleep(ASK_INTERVAL).await;
            }
        }
    }
}

/// Asks shard 0, then serves or refuses to. Returns whether the shard serves.
async fn confirm(node: &Arc<Node>) -> Result<bool> {
    // A tensor that is unregistered meanwhile is not listed the second time.
    let mut listing = ask(node).await?;
    let mut id = listing.cluster_id;
    let mut loss = listing.loss(node);
    if loss.is_some() {
        listing = ask(node).await?;
        id = listing.cluster_id;
        loss = listing.loss(node);
    }
    let Some(loss) = loss else {
        node.hear(id)?;
        node.membership.change(Standing::Serves);
        return Ok(true);
    };
    if node.membership.accept_loss {
        node.membership.change(Standing::Waits(None));
        if let Err(error) = drop_incomplete(node, &loss, id).await {
            tracing::warn!(shard = node.index(), %error, "lost slices are not removed yet");
        }
        return Ok(false);
    }
    let error = node.lost(&loss);
    if node.membership.check() != Err(error.clone()) {
        tracing::error!(shard = node.index(), "{error}");
    }
    node.membership.change(Standing::Refuses(error));
    Ok(false)
}

async fn ask(node: &Node) -> Result<Listing> {
    let (mut listing, mut after) = (Listing::default(), Some(String::new()));
    while let Some(name) = after {
        after = listing.add(node.ask_for_list(Listing::question(node.index(), name)).await?);
    }
    Ok(listing)
}

impl Node {
    /// Error of a shard that refuses to serve, with the remedies.
    pub(crate) fn lost(&self, loss: &Loss) -> Error {
        let durable = self.files.journal().is_some();
        let (what, kind) = match (loss, durable) {
            (Loss::Slices(_), true) => ("its data directory lacks", Kind::Precondition),
            (Loss::Slices(_), false) => ("it was started without data and lacks", Kind::Fenced),
            (Loss::Map, _) => ("shard 0 has lost the map of", Kind::Precondition),
        };
        let whose = match loss {
            Loss::Slices(names) => format!("slices of {}, which shard 0 lists", quoted(names)),
            Loss::Map => "this shard's slices".to_owned(),
        };
        let (folder, dropped) = match loss {
            Loss::Slices(_) => ("that directory", "removes these tensors from the cluster"),
            Loss::Map => ("the data directory of shard 0", "drops these slices"),
        };
        let restore = format!("replace {folder} by its backup and start again, or ");
        let restore = if durable || *loss == Loss::Map { restore } else { String::new() };
        let message = format!(
            "the shard does not serve: {what} {whose}. To continue, {restore}start this shard once with --accept-loss, which {dropped}"
        );
        Error::new(kind, message).shard(self.index())
    }
}

fn quoted(names: &[String]) -> String {
    let shown: Vec<_> = names.iter().take(MAX_NAMED_TENSORS).map(|name| format!("{name:?}")).collect();
    let shown = shown.join(", ");
    match names.len().saturating_sub(MAX_NAMED_TENSORS) {
        0 => format!("tensor {shown}"),
        more => format!("tensors {shown} and {more} more"),
    }
}

/// Makes a loss final, so that the cluster has whole tensors only.
async fn drop_incomplete(node: &Arc<Node>, loss: &Loss, id: u64) -> Result<()> {
    let names = match loss {
        Loss::Map => {
            let slices = node.reservations.drop_all(&node.shard);
            tracing::error!(
                shard = node.index(),
                slices,
                "dropped: shard 0 has lost the map of these slices"
            );
            node.learn(id);
            return Ok(());
        }
        Loss::Slices(names) => names,
    };
    for name in names {
        let placement = node.unregister_at_coordinator(name).await?;
        tracing::error!(
            shard = node.index(),
            tensor = name,
            "removed: the tensor's slices on this shard are lost"
        );
        let mut elsewhere: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        for (slice, shard) in placement.slices.iter().zip(&placement.shards) {
            elsewhere.entry(*shard).or_default().push(*slice);
        }
        let own = elsewhere.remove(&node.index()).unwrap_or_default();
        let own: Vec<_> = own.into_iter().map(SliceId).collect();
        node.reservations.drop_slices(&node.shard, &own);
        for (shard, slices) in elsewhere {
            if let Err(error) = node.drop_at(shard, slices).await {
                tracing::warn!(shard = node.index(), tensor = name, %error, "its slices on shard {shard} stay there");
            }
        }
    }
    Ok(())
}
