//! The metrics of a shard's measurements.

use super::family::{Family, Labels, Value};
use super::names::Kind;
use crate::cluster::node::Node;
use crate::measures::{Observed, Traffic};
use crate::persistence::Times;
use std::sync::Arc;

const NANOSECONDS: f64 = 1e9;

/// The families of all shards.
pub(super) fn families(nodes: &[Arc<Node>]) -> Vec<Family> {
    let time = |name, help, value: fn(Times) -> Option<Value>| {
        let series = |node: &Node| {
            let value = node.files.times().and_then(value);
            value.map(|value| (Vec::new(), value)).into_iter().collect()
        };
        Family { name, kind: Kind::Gauge, help, series: each(nodes, series) }
    };
    vec![
        time(
            "snapshot_timestamp_seconds",
            "Time of the newest snapshot, or of the server's start, in seconds since 1970",
            |times| Some(Value::Whole(times.snapshot)),
        ),
        time("snapshot_interval_seconds", "Time between automatic snapshots (--snapshot-every)", |times| {
            Some(Value::Real(times.every.as_secs_f64()))
        }),
        time(
            "copy_timestamp_seconds",
            "Time of the last copy, or of the server's start, in seconds since 1970",
            |times| times.copy.map(Value::Whole),
        ),
        Family {
            name: "push_staleness",
            kind: Kind::Histogram,
            help: "Staleness of applied pushes, in changes by others, per slice",
            series: each(nodes, |node| vec![(Vec::new(), histogram(&node.measures.staleness(), 1.0))]),
        },
        Family {
            name: "answer_seconds",
            kind: Kind::Histogram,
            help: "Time from reading a request to sending its answer, by kind of request",
            series: each(nodes, |node| {
                let series = |(kind, observed)| (label("kind", kind), histogram(&observed, NANOSECONDS));
                node.measures.answers().map(series).collect()
            }),
        },
        Family {
            name: "received_bytes",
            kind: Kind::Counter,
            help: "Bytes of gradients and other payloads received",
            series: each(nodes, |node| traffic(node.measures.traffic()[0])),
        },
        Family {
            name: "sent_bytes",
            kind: Kind::Counter,
            help: "Bytes of values sent; values that clients read in shared memory are not sent",
            series: each(nodes, |node| traffic(node.measures.traffic()[1])),
        },
        Family {
            name: "refusals",
            kind: Kind::Counter,
            help: "Requests refused, by the kind of the error",
            series: each(nodes, |node| {
                let series = |(reason, count)| (label("reason", reason), Value::Whole(count));
                node.measures.refusals().map(series).collect()
            }),
        },
    ]
}

type Series = Vec<(Labels, Value)>;

/// The series of each shard, with its label.
fn each(nodes: &[Arc<Node>], of: impl Fn(&Node) -> Series) -> Series {
    let labelled = |node: &Arc<Node>| {
        let mut series = of(node);
        for (labels, _) in &mut series {
            labels.insert(0, ("shard", node.index().to_string()));
        }
        series
    };
    nodes.iter().flat_map(labelled).collect()
}

fn label(name: &'static str, value: &str) -> Labels {
    vec![(name, value.to_owned())]
}

fn traffic(traffic: &Traffic) -> Series {
    let series = |(codec, medium, bytes): (&str, &str, u64)| {
        let labels = vec![("codec", codec.to_owned()), ("transport", medium.to_owned())];
        (labels, Value::Whole(bytes))
    };
    traffic.counts().into_iter().map(series).collect()
}

/// A histogram in another unit, of which `in_unit` parts were counted.
fn histogram(observed: &Observed, in_unit: f64) -> Value {
    let bucket = |(bound, count): &(u64, u64)| (*bound as f64 / in_unit, *count);
    let mut buckets: Vec<_> = observed.buckets.iter().map(bucket).collect();
    buckets.push((f64::INFINITY, observed.above));
    Value::Histogram { sum: observed.sum as f64 / in_unit, count: observed.count(), buckets }
}
