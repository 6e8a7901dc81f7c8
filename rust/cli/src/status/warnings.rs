//! Problems of a cluster that its statistics show, each with a next step.

use fastps_client::{ClusterView, ShardStats, ShardView};
use fastps_core::text::printable;
use fastps_core::verbs::{WorkerReport, WorkerState};
use fastps_server::human::{duration, size};

/// A worker is slow if its steps take this many times the median.
const SLOW: f64 = 3.0;
/// A shorter step, in seconds, is not slow: no user would look for its cause.
const SLOW_STEP_S: f64 = 0.05;
/// Workers from which on one can be slower than the others: of two, either may be the odd one.
const SLOW_OF: usize = 3;
/// Percent of the memory limit from which on it is reported.
const FULL: u64 = 90;
/// Seconds from which on a copy of the log that lags is reported.
const LATE_COPY_S: u64 = 10;
/// Seconds of silence from which on a worker is reported.
const SILENT_S: u64 = 5;

/// All problems, of shards first.
pub(crate) fn of(cluster: &ClusterView) -> Vec<String> {
    let mut found: Vec<_> = cluster.shards.iter().flat_map(of_shard).collect();
    found.extend(of_workers(&workers(cluster)));
    found
}

/// The clients that report their training, by rank and name.
pub(crate) fn workers(cluster: &ClusterView) -> Vec<(&WorkerState, &WorkerReport)> {
    let answers = cluster.shards.iter().filter_map(|view| view.answer.as_ref().ok());
    let mut workers: Vec<_> = answers
        .flat_map(|stats| &stats.workers)
        .filter_map(|one| Some((one, one.report.as_ref()?)))
        .collect();
    workers.sort_by(|(a, of_a), (b, of_b)| {
        let rank = |report: &WorkerReport| report.rank.unwrap_or(u32::MAX);
        rank(of_a)
            .cmp(&rank(of_b))
            .then_with(|| a.shown_name().cmp(b.shown_name()))
            .then(a.session.cmp(&b.session))
    });
    workers
}

/// The workers' median time of a step.
fn median_step(workers: &[(&WorkerState, &WorkerReport)]) -> Option<f64> {
    let mut seconds: Vec<_> = workers.iter().filter_map(|(_, report)| report.step_seconds).collect();
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len().saturating_sub(1) / 2).copied()
}

/// How many times the median a worker's step takes, if it is slow.
pub(crate) fn slowness(workers: &[(&WorkerState, &WorkerReport)], report: &WorkerReport) -> Option<f64> {
    let (median, own) = (median_step(workers)?, report.step_seconds?);
    let times = own / median;
    (workers.len() >= SLOW_OF && median > 0.0 && own >= SLOW_STEP_S && times >= SLOW).then_some(times)
}

fn of_shard(view: &ShardView) -> Vec<String> {
    let shard = view.shard.map_or_else(|| "a shard".to_owned(), |shard| format!("shard {shard}"));
    let at = format!("{shard} at {}", view.address);
    match &view.answer {
        Err(error) => {
            vec![format!("{at} does not answer: {}; start it, or check address and network", error.message)]
        }
        Ok(stats) => of_stats(stats).into_iter().map(|what| format!("{at}: {what}")).collect(),
    }
}

fn of_stats(stats: &ShardStats) -> Vec<String> {
    let counter = |name: &str| stats.counters.get(name).copied().unwrap_or(0);
    let mut found = Vec::new();
    if let Some(trouble) = &stats.trouble {
        found.push(trouble.clone());
    }
    if stats.insecure {
        found.push(
            "started with --insecure: everybody who reaches it may read and change everything; give it TLS and --tokens"
                .to_owned(),
        );
    }
    if counter("log_broken") > 0 {
        let pending = size(counter("log_pending"));
        found.push(format!(
            "changes are not durable ({pending} wait): its log names the reason, such as a full disk; free space there"
        ));
    }
    if counter("snapshots_failed") > 0 && counter("log_broken") == 0 {
        let age = duration(counter("snapshot_age_s"));
        found.push(format!("snapshots failed; the last is {age} old: its log names the reason"));
    }
    if counter("copies_failed") > 0 {
        let age = duration(counter("copy_age_s"));
        found.push(format!(
            "copies of snapshots failed; the last is {age} old: check --copy-to and its credentials"
        ));
    }
    if counter("history_copies_failed") > 0 {
        found.push("copies of the history failed: check --copy-to and its credentials".to_owned());
    }
    let behind = counter("log_copy_behind_ms") / 1000;
    if behind >= LATE_COPY_S {
        found.push(format!(
            "the copy of the log is {} behind, which is lost with the machine: check --copy-to, its credentials and the network",
            duration(behind)
        ));
    }
    let (used, limit) = (counter("memory_used"), counter("memory_limit"));
    if limit > 0 && u128::from(used) * 100 >= u128::from(limit) * u128::from(FULL) {
        found.push(format!(
            "{} of {} memory is used: add shards, or raise --memory-limit",
            size(used),
            size(limit)
        ));
    }
    if counter("slices_not_finite") > 0 {
        found.push(format!(
            "{} slices have NaN or infinity: stop the run and restore a snapshot without them (fastps checkpoint list)",
            counter("slices_not_finite")
        ));
    }
    found
}

fn of_workers(workers: &[(&WorkerState, &WorkerReport)]) -> Vec<String> {
    let mut found = Vec::new();
    for (state, report) in workers {
        let name = label(state, report);
        if let Some(times) = slowness(workers, report) {
            let step = report.step_seconds.unwrap_or(0.0);
            found.push(format!(
                "worker {name} is slow: {step:.3} s a step, {times:.0} times the median; look at that machine, or use a mode that does not wait for it"
            ));
        }
        if state.idle.as_secs() >= SILENT_S {
            let idle = duration(state.idle.as_secs());
            found.push(format!("worker {name} is silent for {idle}: it is stopped, killed or disconnected"));
        }
    }
    found
}

/// A worker's name with its host, if the name does not have it.
pub(super) fn label(state: &WorkerState, report: &WorkerReport) -> String {
    let name = printable(state.shown_name());
    if report.host.is_empty() || name.contains(&report.host) {
        return name;
    }
    format!("{name} on {}", printable(&report.host))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastps_core::error::{Error, Kind};
    use std::time::Duration;

    fn worker(name: &str, step_seconds: f64) -> WorkerState {
        let report = WorkerReport {
            host: "host-a".into(),
            step_seconds: Some(step_seconds),
            ..WorkerReport::default()
        };
        WorkerState { name: name.into(), report: Some(report), ..WorkerState::default() }
    }

    fn shard(counters: &[(&str, u64)], workers: Vec<WorkerState>) -> ShardView {
        let counters = counters.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let answer = ShardStats {
            shard: 0,
            cluster: Vec::new(),
            owners: Vec::new(),
            version: String::new(),
            trouble: None,
            insecure: false,
            counters,
            workers,
            groups: Vec::new(),
        };
        ShardView { address: "a:1".into(), shard: Some(0), answer: Ok(answer) }
    }

    fn warned(view: ShardView) -> Vec<String> {
        of(&ClusterView { shards: vec![view], spaces: Vec::new() })
    }

    #[test]
    fn a_healthy_cluster_has_no_warning() {
        let counters = [("memory_used", 89), ("memory_limit", 100), ("log_broken", 0)];
        assert_eq!(warned(shard(&counters, vec![worker("a", 0.1), worker("b", 0.29)])), [""; 0]);
    }

    #[test]
    fn every_problem_is_named() {
        let cases = [
            (vec![("log_broken", 1), ("log_pending", 2048)], "not durable (2.0 KiB"),
            (vec![("snapshots_failed", 1), ("snapshot_age_s", 600)], "10 min old"),
            (vec![("copies_failed", 1)], "--copy-to"),
            (vec![("history_copies_failed", 1)], "history failed"),
            (vec![("log_copy_behind_ms", 90_000)], "90 s behind"),
            (vec![("memory_used", 90), ("memory_limit", 100)], "memory is used"),
            (vec![("slices_not_finite", 2)], "NaN"),
        ];
        for (counters, part) in cases {
            let found = warned(shard(&counters, Vec::new()));
            assert!(found.len() == 1 && found[0].starts_with("shard 0 at a:1: "), "{found:?}");
            assert!(found[0].contains(part), "{found:?}");
        }
        let mut open = shard(&[], Vec::new());
        open.answer.as_mut().unwrap().insecure = true;
        assert!(warned(open)[0].contains("--insecure"));
        let answer = Err(Error::new(Kind::Connection, "refused"));
        let found = warned(ShardView { address: "b:2".into(), shard: Some(1), answer });
        assert!(found[0].starts_with("shard 1 at b:2 does not answer: refused"), "{found:?}");
    }

    #[test]
    fn one_of_two_workers_or_one_with_short_steps_is_not_slow() {
        let warnings = |steps: &[f64]| {
            let workers = steps.iter().map(|step| worker("a", *step)).collect();
            warned(shard(&[], workers)).len()
        };
        assert_eq!([0.1, 4.0, 0.01, 0.04, 0.06].map(|step| warnings(&[0.01, step])), [0; 5]);
        assert_eq!([0.02, 0.04, 0.06, 4.0].map(|step| warnings(&[0.01, 0.01, step])), [0, 0, 1, 1]);
    }

    #[test]
    fn a_slow_worker_and_a_silent_one_are_named() {
        let silent = WorkerState { idle: Duration::from_secs(8), ..worker("c", 0.1) };
        let found = warned(shard(&[], vec![worker("a", 0.1), worker("b", 4.0), silent]));
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("b on host-a is slow") && found[0].contains("40 times"), "{found:?}");
        assert!(found[1].contains("c on host-a is silent for 8 s"), "{found:?}");
    }
}
