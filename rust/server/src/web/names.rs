//! The names of the metrics: a contract with dashboards and alerts. tests/vectors/metrics.json has the list,
//! and docs/reference/metrics.md the page; a test writes both from this table.

use Kind::{Counter, Gauge};

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Only grows; its name gets the suffix `_total`.
    Counter,
    Gauge,
    Histogram,
}

/// A metric of each shard, from one of its counters.
#[derive(Debug)]
pub(super) struct Metric {
    /// Name of the counter in statistics.
    pub(super) counter: &'static str,
    /// Name without the prefix `fastps_` and without suffix.
    pub(super) name: &'static str,
    /// Label beside `shard` that tells the counters of one metric apart.
    pub(super) label: Option<(&'static str, &'static str)>,
    pub(super) kind: Kind,
    pub(super) help: &'static str,
}

const fn metric(counter: &'static str, name: &'static str, kind: Kind, help: &'static str) -> Metric {
    Metric { counter, name, label: None, kind, help }
}

const fn labelled(
    counter: &'static str,
    name: &'static str,
    label: (&'static str, &'static str),
    kind: Kind,
    help: &'static str,
) -> Metric {
    Metric { counter, name, label: Some(label), kind, help }
}

const MEMORY: &str = "Memory in use, by purpose";
const SESSIONS_ENDED: &str = "Sessions that ended, by reason";
const UPDATES: &str =
    "Updates of 64 elements of hogwild tensors that were probed, and those overwritten by a racing push";

/// Every counter of a shard, except for ages: their metrics are the times. Counters of one metric are
/// neighbours.
pub(super) const SHARD: &[Metric] = &[
    metric("slices", "slices", Gauge, "Slices on the shard"),
    metric(
        "slices_touched",
        "slices_touched",
        Counter,
        "Slices visited by removals, leaving workers and ending clients",
    ),
    metric("versions", "versions", Gauge, "Sum of the versions of all slices"),
    metric("pushes", "pushes", Counter, "Gradients applied, per slice"),
    metric("assigns", "assigns", Counter, "Assignments of values or state applied, per slice"),
    metric("duplicates", "duplicates", Counter, "Repeated pushes that were answered and not applied again"),
    metric("refused", "refused", Counter, "Pushes refused"),
    metric("pulls", "pulls", Counter, "Slices pulled"),
    metric("slice_copies", "slice_copies", Counter, "Copies of slices made because a push met a pull"),
    metric(
        "gradients_scaled",
        "gradients_scaled",
        Counter,
        "Gradients applied with a smaller rate because they were stale, per slice",
    ),
    metric(
        "gradients_stale",
        "gradients_stale",
        Counter,
        "Gradients refused because they were staler than their mode allows, per slice",
    ),
    metric(
        "gradients_late",
        "gradients_late",
        Counter,
        "Gradients dropped because their version was made without them, per slice",
    ),
    metric(
        "pushes_fenced",
        "pushes_fenced",
        Counter,
        "Pushes in doubt that were not applied and never will be, per slice",
    ),
    metric("rounds", "rounds", Counter, "Versions made of the gradients of several workers, per slice"),
    metric("workers", "places", Gauge, "Places of workers in groups"),
    metric(
        "slices_not_finite",
        "slices_not_finite",
        Gauge,
        "Slices in which the last scan found NaN or infinity",
    ),
    labelled("updates_probed", "updates", ("kind", "probed"), Counter, UPDATES),
    labelled("updates_lost", "updates", ("kind", "lost"), Counter, UPDATES),
    metric("identity_entries", "identity_entries", Gauge, "Clients remembered, summed over the slices"),
    metric("memory_used", "memory_used_bytes", Gauge, "Memory in use"),
    metric("memory_limit", "memory_limit_bytes", Gauge, "Limit on the memory in use"),
    labelled("memory_slices", "memory_bytes", ("kind", "slices"), Gauge, MEMORY),
    labelled("memory_copies", "memory_bytes", ("kind", "copies"), Gauge, MEMORY),
    labelled("memory_answers", "memory_bytes", ("kind", "answers"), Gauge, MEMORY),
    labelled("memory_held", "memory_bytes", ("kind", "held"), Gauge, MEMORY),
    labelled("memory_identities", "memory_bytes", ("kind", "identities"), Gauge, MEMORY),
    labelled("memory_connections", "memory_bytes", ("kind", "connections"), Gauge, MEMORY),
    labelled("memory_map", "memory_bytes", ("kind", "map"), Gauge, MEMORY),
    labelled("memory_vectors", "memory_bytes", ("kind", "vectors"), Gauge, MEMORY),
    metric("sessions", "sessions", Gauge, "Clients with a live lease"),
    labelled("sessions_expired", "sessions_ended", ("reason", "expired"), Counter, SESSIONS_ENDED),
    labelled("sessions_gave_way", "sessions_ended", ("reason", "gave_way"), Counter, SESSIONS_ENDED),
    labelled("sessions_closed", "sessions_ended", ("reason", "closed"), Counter, SESSIONS_ENDED),
    metric("reservations", "reservations", Gauge, "Registrations in progress on the shard"),
    metric("reservations_expired", "reservations_expired", Counter, "Registrations that were abandoned"),
    metric("connections", "connections", Gauge, "Open connections"),
    metric(
        "connections_refused",
        "connections_refused",
        Counter,
        "Connections refused for lack of memory, or closed while opening or unknown",
    ),
    metric("handshakes_failed", "handshakes_failed", Counter, "Connections that TLS refused"),
    metric(
        "credentials_refused",
        "credentials_refused",
        Counter,
        "Calls and streams of the process without a valid token where one is asked for",
    ),
    metric("tls_reloads", "tls_reloads", Counter, "Times that changed TLS files came into force"),
    metric(
        "tls_reloads_failed",
        "tls_reloads_failed",
        Counter,
        "Changes of the TLS files that cannot be used; the last good ones stay in force",
    ),
    metric("token_reloads", "token_reloads", Counter, "Times that a changed token file came into force"),
    metric(
        "token_reloads_failed",
        "token_reloads_failed",
        Counter,
        "Changes of the token file that cannot be used; the last good one stays in force",
    ),
    metric("floods_cut", "floods_cut", Counter, "Connections closed because of too many control frames"),
    metric("streams_reset", "streams_reset", Counter, "Streams of slow readers that were reset"),
    metric("values_lent", "values_lent", Counter, "Full slices that clients read in shared memory"),
    metric("frames", "frames", Counter, "Frames read"),
    metric("frames_refused", "frames_refused", Counter, "Frames answered with a refusal"),
    metric("log_pending", "log_pending_bytes", Gauge, "Changes that are not durable yet"),
    metric("log_syncs", "log_syncs", Counter, "Syncs of the log"),
    metric("log_broken", "log_broken", Gauge, "1 while changes cannot become durable"),
    metric("snapshot", "snapshot", Gauge, "Number of the newest snapshot; 0: none yet"),
    metric("snapshots_failed", "snapshots_failed", Counter, "Failed attempts to write a snapshot"),
    metric("history_bytes", "history_bytes", Gauge, "Bytes of snapshots and log that are kept to be rewound"),
    metric(
        "history_since",
        "history_since_seconds",
        Gauge,
        "Beginning of the history that is kept, as a Unix time",
    ),
    metric("history_copied_bytes", "history_copied_bytes", Gauge, "Bytes of that history in the bucket"),
    metric("history_copies_failed", "history_copies_failed", Counter, "Failed attempts to copy the history"),
    metric("copy", "copy", Gauge, "Number of the last snapshot copied; 0: none since the start"),
    metric("copies_failed", "copies_failed", Counter, "Failed attempts to copy a snapshot"),
    metric(
        "log_copy_behind_ms",
        "log_copy_behind_ms",
        Gauge,
        "Milliseconds for which the oldest change that is not copied has been durable; 0: all are copied",
    ),
    metric("log_copies_failed", "log_copies_failed", Counter, "Failed attempts to copy a piece of the log"),
    metric("owner_term", "owner_term", Gauge, "Term in which the server owns its shard; 0: it does not"),
    metric(
        "owner_lease_left_ms",
        "owner_lease_left_ms",
        Gauge,
        "Milliseconds until the server stops answering, unless it renews its lease",
    ),
    metric("tensors", "tensors", Gauge, "Tensors in the map; shard 0 only"),
    metric("registrations", "registrations", Gauge, "Registrations in progress; shard 0 only"),
    metric("bytes_placed", "placed_bytes", Gauge, "Bytes placed on all shards; shard 0 only"),
    metric(
        "tensors_touched",
        "tensors_touched",
        Counter,
        "Entries visited by look-ups and removals; shard 0 only",
    ),
    metric("portion_names", "portion_names", Gauge, "Names under which workers share samples; shard 0 only"),
    metric("portion_workers", "portion_workers", Gauge, "Workers that share samples; shard 0 only"),
    metric("portions_leased", "portions_leased", Gauge, "Portions that workers hold; shard 0 only"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, Value, json};
    use std::path::{Path, PathBuf};

    fn full_name(metric: &Metric) -> String {
        format!("fastps_{}{}", metric.name, if metric.kind == Counter { "_total" } else { "" })
    }

    /// The list with the metrics of the table; those of ages, which are times, stay.
    fn list(mut now: Value) -> Value {
        let named = |metric: &Metric| match metric.label {
            Some((label, value)) => json!({"name": full_name(metric), "labels": {label: value}}),
            None => json!({"name": full_name(metric)}),
        };
        let mut shard: Map<_, _> = SHARD.iter().map(|m| (m.counter.to_owned(), named(m))).collect();
        let kept =
            now["shard"].as_object().unwrap().iter().filter(|(counter, _)| counter.ends_with("_age_s"));
        shard.extend(kept.map(|(counter, metric)| (counter.clone(), metric.clone())));
        now["shard"] = shard.into();
        now
    }

    /// The page with a row for each metric of the table.
    fn page(now: &str) -> String {
        let mut rows: Vec<String> = SHARD
            .iter()
            .map(|metric| {
                let kind = if metric.kind == Counter { "counter" } else { "gauge" };
                let label = metric.label.map_or_else(String::new, |(label, _)| format!(", `{label}`"));
                format!("| `{}` | {kind} | `shard`{label} | {} |", full_name(metric), metric.help)
            })
            .collect();
        rows.dedup();
        let is_last = |line: &&str| line.starts_with("| `fastps_snapshot_timestamp_seconds`");
        let before =
            now.lines().take_while(|line| !line.starts_with(rows[0].split_inclusive("` |").next().unwrap()));
        let lines = before
            .chain(rows.iter().map(String::as_str))
            .chain(now.lines().skip_while(|line| !is_last(line)));
        lines.flat_map(|line| [line, "\n"]).collect()
    }

    /// `FASTPS_REGENERATE=1` writes them.
    #[test]
    fn the_list_and_the_page_have_the_metrics_of_the_table() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let read = |path: &PathBuf| std::fs::read_to_string(path).unwrap();
        let (json, markdown) =
            (root.join("tests/vectors/metrics.json"), root.join("docs/reference/metrics.md"));
        let now: Value = serde_json::from_str(&read(&json)).unwrap();
        if std::env::var_os("FASTPS_REGENERATE").is_some() {
            let text = serde_json::to_string_pretty(&list(now.clone())).unwrap();
            std::fs::write(&json, text + "\n").unwrap();
            return std::fs::write(&markdown, page(&read(&markdown))).unwrap();
        }
        assert_eq!(now, list(now.clone()));
        assert_eq!(read(&markdown), page(&read(&markdown)));
    }
}
