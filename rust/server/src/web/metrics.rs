//! `/metrics`: the counters of this process's shards, its groups, and the reports of its workers.

use super::Subject;
use super::family::{Family, Form, Value, encode};
use super::measured;
use super::names::{Kind, SHARD};
use super::process;
use super::totals;
use crate::auth::scope::Scope;
use crate::human;
use fastps_core::verbs::{GroupState, WorkerReport, WorkerState};
use std::collections::HashMap;
use std::fmt;
use std::sync::PoisonError;
use std::time::Instant;

/// Most workers with series of their own: of each principal those with most steps. The others are summed.
pub(super) const MAX_WORKERS: usize = 64;
/// Label of the workers that are summed.
const OTHERS: &str = "(others)";

/// The text of all metrics.
pub(super) fn text(subject: &Subject, form: Form) -> Result<String, fmt::Error> {
    let mut totals = subject.totals.lock().unwrap_or_else(PoisonError::into_inner);
    let mut families = vec![ready(subject), build()];
    families.extend(process::families());
    families.extend(shards(subject, &mut totals));
    families.extend(measured::families(subject.nodes()));
    if let Some(first) = subject.nodes().iter().find(|node| node.index() == 0) {
        families.extend(groups(&first.group_states(&Scope::Everything)));
        families.extend(workers(first.sessions.workers(Instant::now()), &mut totals));
    }
    families.retain(|family| !family.series.is_empty());
    encode(families, form)
}

fn ready(subject: &Subject) -> Family {
    let value = Value::Whole(u64::from(subject.trouble().is_none()));
    let help = "1 while every shard of the process serves";
    Family { name: "ready", kind: Kind::Gauge, help, series: vec![(Vec::new(), value)] }
}

fn build() -> Family {
    let labels = [("version", env!("CARGO_PKG_VERSION")), ("arch", std::env::consts::ARCH)];
    let series = vec![(labels.map(|(name, value)| (name, value.to_owned())).to_vec(), Value::Whole(1))];
    Family { name: "build_info", kind: Kind::Gauge, help: "1, with the version of the program", series }
}

fn shards(subject: &Subject, totals: &mut Totals) -> Vec<Family> {
    let counters: Vec<(u32, HashMap<&str, u64>)> =
        subject.nodes().iter().map(|node| (node.index(), node.counters().into_iter().collect())).collect();
    let mut families: Vec<Family> = Vec::new();
    for metric in SHARD {
        let series = counters.iter().filter_map(|(shard, counters)| {
            let mut labels = vec![("shard", shard.to_string())];
            labels.extend(metric.label.map(|(label, value)| (label, value.to_owned())));
            let mut value = *counters.get(metric.counter)?;
            if metric.kind == Kind::Counter {
                value = totals.of_shard(*shard, metric.counter, value);
            }
            Some((labels, Value::Whole(value)))
        });
        match families.last_mut().filter(|last| last.name == metric.name) {
            Some(last) => last.series.extend(series),
            None => families.push(Family {
                name: metric.name,
                kind: metric.kind,
                help: metric.help,
                series: series.collect(),
            }),
        }
    }
    families
}

fn groups(states: &[GroupState]) -> Vec<Family> {
    let family = |name, help, value: fn(&GroupState) -> u64| {
        let series =
            states.iter().map(|state| (vec![("group", state.name.clone())], Value::Whole(value(state))));
        Family { name, kind: Kind::Gauge, help, series: series.collect() }
    };
    let mode = |state: &GroupState| {
        let labels = vec![("group", state.name.clone()), ("kind", state.mode.clone())];
        (labels, Value::Whole(1))
    };
    let help = "1 for the mode of the group, which is the label kind";
    let series = states.iter().map(mode).collect();
    vec![
        Family { name: "group_mode", kind: Kind::Gauge, help, series },
        family("group_workers", "Workers present in the group", |state| state.workers),
        family("group_clock_slowest", "Clock of the group's slowest worker", |state| state.slowest),
        family("group_clock_fastest", "Clock of the group's fastest worker", |state| state.fastest),
    ]
}

/// A metric of each worker.
#[derive(Debug)]
struct OfWorker {
    name: &'static str,
    kind: Kind,
    help: &'static str,
    value: fn(&WorkerState, &WorkerReport) -> Option<Value>,
}

const fn counted(
    name: &'static str,
    help: &'static str,
    value: fn(&WorkerState, &WorkerReport) -> Option<Value>,
) -> OfWorker {
    OfWorker { name, kind: Kind::Counter, help, value }
}

const fn gauge(
    name: &'static str,
    help: &'static str,
    value: fn(&WorkerState, &WorkerReport) -> Option<Value>,
) -> OfWorker {
    OfWorker { name, kind: Kind::Gauge, help, value }
}

const WORKER: &[OfWorker] = &[
    counted("worker_steps", "Steps of the worker", |_, r| Some(Value::Whole(r.steps))),
    counted("worker_pushes", "Pushes of the worker that were acknowledged", |_, r| {
        Some(Value::Whole(r.pushes))
    }),
    counted("worker_sent_bytes", "Bytes of gradients that the worker sent", |_, r| {
        Some(Value::Whole(r.bytes))
    }),
    counted("worker_rejected", "Pushes of the worker that were dropped", |_, r| {
        Some(Value::Whole(r.rejected))
    }),
    counted("worker_scaled", "Pushes of the worker applied with a smaller rate", |_, r| {
        Some(Value::Whole(r.scaled))
    }),
    gauge("worker_step_seconds", "Mean time of the worker's latest steps", |_, r| {
        r.step_seconds.map(Value::Real)
    }),
    gauge("worker_waited_ratio", "Share of time that the worker waited for servers and others", |_, r| {
        r.waited.map(Value::Real)
    }),
    gauge("worker_loss", "Loss of the worker's last step", |_, r| r.loss.map(Value::Real)),
    gauge("worker_staleness_p50", "Staleness that half of the worker's pushes do not exceed", |_, r| {
        r.staleness_p50.map(Value::Whole)
    }),
    gauge("worker_staleness_p99", "Staleness that 99 % of the worker's pushes do not exceed", |_, r| {
        r.staleness_p99.map(Value::Whole)
    }),
    gauge("worker_momentum", "Momentum (beta1 of Adam) of the steps by the worker's latest push", |_, r| {
        r.momentum.map(Value::Real)
    }),
    gauge(
        "worker_last_message_timestamp_seconds",
        "Time of the worker's last message, in seconds since 1970",
        |s, _| Some(Value::Whole((human::now_ms().saturating_sub(s.idle.as_millis() as u64) + 500) / 1000)),
    ),
];

/// What former answers have shown.
pub(super) type Totals = totals::Totals<{ WORKER.len() }>;

/// The counters of a worker, in the order of [`WORKER`]; 0 for those that are none.
fn counts(state: &WorkerState) -> [u64; WORKER.len()] {
    let report = state.report.clone().unwrap_or_default();
    std::array::from_fn(|k| match (WORKER[k].kind, (WORKER[k].value)(state, &report)) {
        (Kind::Counter, Some(Value::Whole(count))) => count,
        _ => 0,
    })
}

fn workers(mut states: Vec<WorkerState>, totals: &mut Totals) -> Vec<Family> {
    let mut named: HashMap<String, usize> = HashMap::new();
    for state in &states {
        *named.entry(state.shown_name().to_owned()).or_default() += 1;
    }
    let label = |state: &WorkerState| match named.get(state.shown_name()) {
        Some(1) if !["", OTHERS].contains(&state.shown_name()) => state.shown_name().to_owned(),
        _ => format!("{}#{}", state.shown_name(), state.session),
    };
    let rest = states.split_off(states.len().min(MAX_WORKERS));
    let each = |states: &[WorkerState]| states.iter().map(|state| (state.session, counts(state))).collect();
    let others = totals.others(each(&states), each(&rest));
    let family = |(k, metric): (usize, &OfWorker)| {
        let value = |state: &WorkerState| (metric.value)(state, state.report.as_ref()?);
        let series = states.iter().filter_map(|state| Some((vec![("worker", label(state))], value(state)?)));
        let mut series: Vec<_> = series.collect();
        if let (Kind::Counter, Some(others)) = (metric.kind, &others) {
            series.push((vec![("worker", OTHERS.to_owned())], Value::Whole(others[k])));
        }
        Family { name: metric.name, kind: metric.kind, help: metric.help, series }
    };
    WORKER.iter().enumerate().map(family).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(session: u64, name: &str, steps: u64) -> WorkerState {
        let report = WorkerReport { steps, loss: Some(0.5), ..WorkerReport::default() };
        WorkerState { session, name: name.to_owned(), report: Some(report), ..WorkerState::default() }
    }

    fn of(states: Vec<WorkerState>) -> String {
        encode(workers(states, &mut Totals::default()), Form::OpenMetrics).unwrap()
    }

    fn others(states: Vec<WorkerState>, totals: &mut Totals) -> Option<u64> {
        let text = encode(workers(states, totals), Form::OpenMetrics).unwrap();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("fastps_worker_steps_total{worker=\"(others)\"} "));
        line.map(|value| value.parse().unwrap())
    }

    #[test]
    fn the_sum_of_the_others_never_falls() {
        let mut totals = Totals::default();
        let mut all: Vec<_> = (0..MAX_WORKERS as u64).map(|k| worker(k, "", 1000)).collect();
        assert_eq!(others(all.clone(), &mut totals), None);
        all.extend([worker(100, "a", 20), worker(101, "b", 30)]);
        assert_eq!(others(all.clone(), &mut totals), Some(50));
        all.pop(); // a worker leaves
        all[64] = worker(100, "a", 25);
        assert_eq!(others(all.clone(), &mut totals), Some(55));
        all[64] = worker(100, "a", 4); // it begins again
        assert_eq!(others(all.clone(), &mut totals), Some(59));
        all[64] = worker(100, "a", 2000); // it gets a series of its own, and another loses it
        all.swap(0, 64);
        assert_eq!(others(all.clone(), &mut totals), Some(59));
        all[1] = worker(1, "", 1003);
        all.truncate(3);
        assert_eq!(others(all.clone(), &mut totals), Some(59));
    }

    #[test]
    fn every_worker_is_one_series() {
        let text = of(vec![worker(1, "a", 3), worker(2, "a", 5), worker(3, "b", 4), worker(4, "", 1)]);
        for line in [
            "fastps_worker_steps_total{worker=\"a#1\"} 3",
            "fastps_worker_steps_total{worker=\"a#2\"} 5",
            "fastps_worker_steps_total{worker=\"b\"} 4",
            "fastps_worker_steps_total{worker=\"#4\"} 1",
            "fastps_worker_loss{worker=\"b\"} 0.5",
        ] {
            assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn names_of_workers_cannot_add_lines() {
        let text = of(vec![worker(1, "a\"} 1\nfastps_worker_steps_total{worker=\"\\", 3)]);
        let escaped =
            r#"fastps_worker_steps_total{worker="a\"} 1\nfastps_worker_steps_total{worker=\"\\"} 3"#;
        assert!(text.lines().any(|line| line == escaped), "{text}");
    }

    #[test]
    fn at_most_64_workers_have_series_and_the_rest_are_summed() {
        let text = of((0..100).rev().map(|k| worker(k, &format!("w{k}"), k)).collect());
        let series: Vec<_> = text.lines().filter(|l| l.starts_with("fastps_worker_steps_total")).collect();
        assert_eq!(series.len(), MAX_WORKERS + 1);
        let rest: u64 = (0..36).sum();
        assert!(
            text.contains(&format!("fastps_worker_steps_total{{worker=\"(others)\"}} {rest}\n")),
            "{text}"
        );
        assert!(text.contains("{worker=\"w99\"} 99") && !text.contains("w35"));
    }
}
