//! The tables of `fastps top`: those of `fastps status`, in 80 columns.

use crate::status::{Looks, shard_row, shortened, table, worker_row};
use fastps_client::ShardView;
use fastps_core::verbs::{WorkerReport, WorkerState};

/// Least width of a worker's name.
const MIN_NAME: usize = 8;

/// The shards with their titles; at most `most`, those in trouble first.
pub(super) fn shards(looks: &Looks, most: usize) -> Vec<String> {
    let mut views: Vec<_> = looks.now.shards.iter().collect();
    if views.len() > most {
        views.sort_by_key(|view| view.answer.as_ref().is_ok_and(|stats| stats.trouble.is_none()));
    }
    let mut rows = vec![["SHARD", "ADDRESS", "STATE", "PUSHES/S", "MEMORY", "SNAPSHOT"].map(str::to_owned)];
    rows.extend(views.iter().take(most).map(|view| {
        let [index, address, state, _, rate, _, snapshot] = shard_row(view, looks);
        [index, address, state, rate, memory(view), snapshot]
    }));
    let mut lines = table(&rows, 3);
    if views.len() > most {
        lines.push(format!("... and {} more: fastps status --all", views.len() - most));
    }
    lines
}

/// Share of the memory limit in use.
fn memory(view: &ShardView) -> String {
    let counter = |name: &str| view.answer.as_ref().ok()?.counters.get(name).copied();
    match (counter("memory_used"), counter("memory_limit")) {
        (Some(used), Some(limit)) if limit > 0 => format!("{:.0} %", 100.0 * used as f64 / limit as f64),
        _ => "-".to_owned(),
    }
}

/// The workers with their titles, in the order given; names are shortened to fit the width.
pub(super) fn workers(found: &[(&WorkerState, &WorkerReport)], width: usize) -> Vec<String> {
    let titles = ["WORKER", "RANK", "STEPS", "STEPS/S", "LOSS", "STALE", "WAITS", "SEEN", ""];
    let mut rows = vec![titles.map(str::to_owned)];
    rows.extend(found.iter().map(|(state, report)| {
        let [name, rank, _, steps, rate, loss, stale, _, waits, seen, slow] =
            worker_row(state, report, found);
        [name, rank, steps, rate, loss, stale, waits, seen, slow]
    }));
    let widest = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let others: usize = (1..titles.len()).map(|column| widest(column) + 2).sum();
    let room = width.saturating_sub(others).max(MIN_NAME);
    for [name, ..] in &mut rows {
        *name = shortened(name, room);
    }
    table(&rows, 1)
}
