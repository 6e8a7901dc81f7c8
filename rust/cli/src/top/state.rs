//! What `fastps top` shows: the last two looks at the cluster, a history of staleness, and the viewer's
//! choices.

use crate::status::{Looks, workers};
use fastps_client::ClusterView;
use fastps_core::error::{Error, Result};
use fastps_core::verbs::{WorkerReport, WorkerState};
use std::cmp::Ordering;
use std::collections::VecDeque;
use std::time::Instant;

/// Looks whose staleness is kept.
const HISTORY: usize = 512;

/// Order of the workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Sort {
    #[default]
    Rank,
    /// The slowest first.
    Speed,
    /// The stalest first.
    Staleness,
    /// Those that wait most first.
    Waiting,
}

impl Sort {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Rank => Self::Speed,
            Self::Speed => Self::Staleness,
            Self::Staleness => Self::Waiting,
            Self::Waiting => Self::Rank,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rank => "rank",
            Self::Speed => "slowest",
            Self::Staleness => "stalest",
            Self::Waiting => "waiting",
        }
    }

    /// Order of two workers; those without the number come last.
    fn compare(self, a: &WorkerReport, b: &WorkerReport) -> Ordering {
        let largest = |a: Option<f64>, b: Option<f64>| {
            b.unwrap_or(f64::NEG_INFINITY).total_cmp(&a.unwrap_or(f64::NEG_INFINITY))
        };
        let stale = |report: &WorkerReport| report.staleness_p99.map(|stale| stale as f64);
        match self {
            Self::Rank => Ordering::Equal,
            Self::Speed => largest(a.step_seconds, b.step_seconds),
            Self::Staleness => largest(stale(a), stale(b)),
            Self::Waiting => largest(a.waited, b.waited),
        }
    }
}

/// The state.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) looks: Option<Looks>,
    /// Why the last look failed.
    pub(super) error: Option<Error>,
    /// The largest p99 of the workers at each look, the oldest first.
    pub(super) staleness: VecDeque<u64>,
    pub(super) sort: Sort,
    pub(super) is_paused: bool,
    pub(super) shows_help: bool,
    at: Option<Instant>,
}

impl State {
    /// Takes in a look, unless the viewer has paused.
    pub(super) fn looked(&mut self, found: Result<ClusterView>, at: Instant) {
        if self.is_paused {
            return;
        }
        let now = match found {
            Ok(now) => now,
            Err(error) => {
                self.error = Some(error);
                return;
            }
        };
        self.error = None;
        if self.staleness.len() == HISTORY {
            self.staleness.pop_front();
        }
        self.staleness.push_back(stalest(&now).unwrap_or(0));
        let apart = self.at.replace(at).map_or(1.0, |before| (at - before).as_secs_f64());
        let before = self.looks.take().map_or_else(nothing, |looks| looks.now);
        self.looks = Some(Looks { now, before, apart });
    }

    /// The workers in the viewer's order.
    pub(super) fn workers(&self) -> Vec<(&WorkerState, &WorkerReport)> {
        let mut found = self.looks.as_ref().map_or_else(Vec::new, |looks| workers(&looks.now));
        found.sort_by(|(_, a), (_, b)| self.sort.compare(a, b));
        found
    }

    /// Sum of a counter's increase per second over the shards; `None` before the second look.
    pub(super) fn rate(&self, counter: &str) -> Option<f64> {
        let looks = self.looks.as_ref()?;
        let rates = looks.now.shards.iter().filter_map(|view| looks.rate(view.shard, counter));
        rates.reduce(|a, b| a + b)
    }

    /// Returns whether every shard serves.
    pub(super) fn serves(&self) -> bool {
        self.error.is_none() && self.looks.as_ref().is_some_and(Looks::serve)
    }
}

/// The largest p99 of the workers' staleness.
fn stalest(view: &ClusterView) -> Option<u64> {
    workers(view).iter().filter_map(|(_, report)| report.staleness_p99).max()
}

fn nothing() -> ClusterView {
    ClusterView { shards: Vec::new(), spaces: Vec::new() }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use fastps_client::{ShardStats, ShardView};
    use fastps_core::error::Kind;
    use std::time::Duration;

    /// A cluster of one shard, with its pushes and its workers' name, seconds of a step and staleness.
    pub(in crate::top) fn cluster(pushes: u64, workers: &[(&str, f64, u64)]) -> ClusterView {
        let worker = |(rank, (name, step, stale)): (usize, &(&str, f64, u64))| {
            let report = WorkerReport {
                rank: Some(rank as u32),
                step_seconds: Some(*step),
                staleness_p50: Some(stale / 2),
                staleness_p99: Some(*stale),
                loss: Some(0.25),
                waited: Some(0.5),
                steps: 7,
                ..WorkerReport::default()
            };
            WorkerState { name: (*name).to_owned(), report: Some(report), ..WorkerState::default() }
        };
        let stats = ShardStats {
            shard: 0,
            cluster: vec!["a:1".to_owned()],
            owners: Vec::new(),
            version: "1.2.3".to_owned(),
            trouble: None,
            insecure: false,
            counters: [("pushes".to_owned(), pushes)].into(),
            workers: workers.iter().enumerate().map(worker).collect(),
            groups: Vec::new(),
        };
        let view = ShardView { address: "a:1".to_owned(), shard: Some(0), answer: Ok(stats) };
        ClusterView { shards: vec![view], spaces: Vec::new() }
    }

    /// A state after two looks, a second apart.
    pub(in crate::top) fn state(workers: &[(&str, f64, u64)]) -> State {
        let (mut state, now) = (State::default(), Instant::now());
        state.looked(Ok(cluster(100, workers)), now);
        state.looked(Ok(cluster(350, workers)), now + Duration::from_secs(1));
        state
    }

    #[test]
    fn rates_are_between_looks_and_a_pause_keeps_them() {
        let mut state = State::default();
        let now = Instant::now();
        state.looked(Ok(cluster(100, &[])), now);
        assert_eq!(state.rate("pushes"), None, "one look has no rate");
        state.looked(Ok(cluster(300, &[])), now + Duration::from_secs(2));
        assert_eq!(state.rate("pushes"), Some(100.0));
        state.is_paused = true;
        state.looked(Ok(cluster(900, &[])), now + Duration::from_secs(3));
        assert_eq!(state.rate("pushes"), Some(100.0));
        state.is_paused = false;
        state.looked(Err(Error::new(Kind::Connection, "no")), now + Duration::from_secs(4));
        assert!(!state.serves());
        state.looked(Ok(cluster(900, &[])), now + Duration::from_secs(5));
        assert_eq!(state.rate("pushes"), Some(200.0), "over the time since the last one shown");
        assert!(state.serves());
    }

    #[test]
    fn workers_are_sorted_as_asked() {
        let mut state = state(&[("a", 0.1, 3), ("b", 0.9, 1), ("c", 0.2, 9)]);
        let mut orders = Vec::new();
        for _ in 0..4 {
            let names: Vec<_> = state.workers().iter().map(|(worker, _)| worker.name.as_str()).collect();
            orders.push((state.sort.name(), names.concat()));
            state.sort = state.sort.next();
        }
        let of = |name, order: &str| (name, order.to_owned());
        assert_eq!(
            orders,
            [of("rank", "abc"), of("slowest", "bca"), of("stalest", "cab"), of("waiting", "abc")]
        );
        assert_eq!(state.staleness, [9, 9]);
        for _ in 0..2 * HISTORY {
            state.looked(Ok(cluster(1, &[])), Instant::now());
        }
        assert_eq!(state.staleness.len(), HISTORY);
    }
}
