//! Groups and workers as JSON, for the web listener and the command line.

use fastps_core::verbs::{GroupState, WorkerReport};
use serde_json::{Map, Value, json};

/// A group that has workers.
pub fn group(state: &GroupState) -> Value {
    let GroupState { name, mode, workers, slowest, fastest } = state;
    json!({ "name": name, "mode": mode, "workers": workers, "slowest": slowest, "fastest": fastest })
}

/// The fields of a worker's report.
pub fn report(report: &WorkerReport) -> Map<String, Value> {
    let fields = [
        ("rank", json!(report.rank)),
        ("host", json!(report.host)),
        ("steps", json!(report.steps)),
        ("step_seconds", json!(report.step_seconds)),
        ("loss", json!(report.loss)),
        ("pushes", json!(report.pushes)),
        ("bytes", json!(report.bytes)),
        ("staleness_p50", json!(report.staleness_p50)),
        ("staleness_p99", json!(report.staleness_p99)),
        ("momentum", json!(report.momentum)),
        ("waited", json!(report.waited)),
        ("rejected", json!(report.rejected)),
        ("scaled", json!(report.scaled)),
        ("mode", json!(report.mode)),
        ("codec", json!(report.codec)),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
