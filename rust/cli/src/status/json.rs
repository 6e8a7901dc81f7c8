//! The state of a cluster as JSON.

use super::Looks;
use super::lines::unanswered;
use fastps_client::ShardView;
use fastps_core::verbs::{SpaceInfo, WorkerState};
use fastps_server::json;
use serde_json::{Value, json};

/// One object.
pub(super) fn of(looks: &Looks, warnings: &[String]) -> Value {
    let first = looks.now.shards.iter().find_map(|view| view.answer.as_ref().ok().filter(|s| s.shard == 0));
    json!({
        "shards": looks.now.shards.iter().map(|view| shard(view, looks)).collect::<Vec<_>>(),
        "workers": first.map(|stats| stats.workers.iter().map(worker).collect::<Vec<_>>()),
        "groups": first.map(|stats| stats.groups.iter().map(json::group).collect::<Vec<_>>()),
        "spaces": looks.now.spaces.iter().map(space).collect::<Vec<_>>(),
        "warnings": warnings,
    })
}

fn shard(view: &ShardView, looks: &Looks) -> Value {
    match &view.answer {
        Ok(stats) => json!({
            "shard": stats.shard,
            "address": view.address,
            "state": stats.trouble.as_deref().unwrap_or("serving"),
            "version": stats.version,
            "insecure": stats.insecure,
            "pushes_per_second": looks.rate(view.shard, "pushes"),
            "counters": stats.counters,
        }),
        Err(error) => json!({
            "shard": view.shard,
            "address": view.address,
            "state": unanswered(view),
            "error": error.to_string(),
        }),
    }
}

fn worker(state: &WorkerState) -> Value {
    let WorkerState { session, applied, idle, report, .. } = state;
    json!({
        "session": session,
        "name": state.shown_name(),
        "frames_applied": applied,
        "idle_s": idle.as_secs_f64(),
        "report": report.as_ref().map(json::report),
    })
}

fn space(info: &SpaceInfo) -> Value {
    json!({
        "name": &*info.spec.space.name,
        "number": info.spec.space.id.0,
        "tensors": info.spec.tensors.iter().map(|name| &**name).collect::<Vec<_>>(),
        "vectors": info.spec.space.vectors.iter().map(|name| &**name).collect::<Vec<_>>(),
        "coordinator": info.coordinator.as_deref(),
    })
}
