//! `/api/v1/cluster`: the state of this process's shards as JSON.

use super::Subject;
use super::metrics::MAX_WORKERS;
use crate::auth::scope::Scope;
use crate::cluster::node::Node;
use crate::json;
use fastps_core::verbs::WorkerState;
use serde_json::{Value, json};
use std::time::Instant;

/// One object; docs/reference/metrics.md describes it.
pub(super) fn json(subject: &Subject) -> String {
    let nodes = subject.nodes();
    let first = nodes.iter().find(|node| node.index() == 0);
    let object = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ready": subject.trouble().is_none(),
        "trouble": subject.trouble(),
        "cluster": nodes.first().map_or(&[][..], |node| &node.cluster),
        "shards": nodes.iter().map(|node| shard(node)).collect::<Vec<_>>(),
        "workers": first.map(|node| workers(node)),
        "groups": first.map(|node| node.group_states(&Scope::Everything).iter().map(json::group).collect::<Vec<_>>()),
    });
    format!("{object}\n")
}

fn shard(node: &Node) -> Value {
    let counters: serde_json::Map<String, Value> =
        node.counters().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    json!({ "shard": node.index(), "trouble": node.trouble(), "counters": counters })
}

fn workers(node: &Node) -> Vec<Value> {
    let mut states = node.sessions.workers(Instant::now());
    states.truncate(MAX_WORKERS);
    states.sort_by_key(|state| std::cmp::Reverse(state.report.as_ref().map(|report| report.steps)));
    states.iter().map(worker).collect()
}

fn worker(state: &WorkerState) -> Value {
    let mut fields = json::report(&state.report.clone().unwrap_or_default());
    fields.insert("session".to_owned(), json!(state.session));
    fields.insert("name".to_owned(), json!(state.shown_name()));
    fields.insert("idle_seconds".to_owned(), json!(state.idle.as_secs_f64()));
    fields.into()
}
