//! The state of a cluster as lines of text.

use super::Looks;
use super::warnings::{label, slowness, workers};
use fastps_client::{ShardStats, ShardView};
use fastps_core::error::Kind;
use fastps_core::text::printable;
use fastps_core::verbs::{WorkerReport, WorkerState};
use fastps_server::human::{duration, now, size};

/// Most shards and workers shown without `--all`.
const MAX_SHARDS: usize = 6;
const MAX_WORKERS: usize = 8;
/// Longest name of a worker in a table.
const MAX_LABEL: usize = 28;

/// The whole text.
pub(super) fn of(looks: &Looks, warnings: &[String], all: bool) -> Vec<String> {
    let found = workers(&looks.now);
    let mut lines = vec![sentence(looks)];
    lines.extend(shards(looks, all));
    lines.extend(owners(looks));
    lines.extend(history(looks));
    lines.extend(groups(looks));
    lines.extend(worker_table(&found, all));
    lines.extend(warnings.iter().map(|warning| format!("warning: {warning}")));
    if all {
        lines.extend(details(looks));
    }
    lines
}

fn answers(looks: &Looks) -> impl Iterator<Item = &ShardStats> {
    looks.now.shards.iter().filter_map(|view| view.answer.as_ref().ok())
}

/// The state in one sentence.
pub(crate) fn sentence(looks: &Looks) -> String {
    let workers = workers(&looks.now).len();
    let (shards, answered) = (looks.now.shards.len(), answers(looks).count());
    let serving = answers(looks).filter(|stats| stats.trouble.is_none()).count();
    let clients = clients(looks).saturating_sub(workers);
    let version = answers(looks).next().map_or(String::new(), |stats| format!(", version {}", stats.version));
    let state = if answered < shards {
        format!(
            "{} of {shards} shards {}",
            shards - answered,
            if shards - answered == 1 { "does not answer" } else { "do not answer" }
        )
    } else if serving < shards {
        format!("{} of {shards} shards refuse calls", shards - serving)
    } else {
        format!("{} serving{version}", counted(shards, "shard"))
    };
    let others = if clients > 0 { format!(", {}", counted(clients, "other client")) } else { String::new() };
    format!("{state}; {}{others}", counted(workers, "worker"))
}

/// Sessions at shard 0.
fn clients(looks: &Looks) -> usize {
    answers(looks).find(|stats| stats.shard == 0).map_or(0, |stats| stats.workers.len())
}

fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn shards(looks: &Looks, all: bool) -> Vec<String> {
    let most = if all { usize::MAX } else { MAX_SHARDS };
    let mut rows =
        vec![["SHARD", "ADDRESS", "STATE", "SLICES", "PUSHES/S", "MEMORY", "SNAPSHOT"].map(str::to_owned)];
    // Those in trouble come first, so that they are seen.
    let mut views: Vec<_> = looks.now.shards.iter().collect();
    if views.len() > most {
        views.sort_by_key(|view| view.answer.as_ref().is_ok_and(|stats| stats.trouble.is_none()));
    }
    rows.extend(views.iter().take(most).map(|view| shard_row(view, looks)));
    let mut lines = table(&rows, 3);
    if views.len() > most {
        lines.push(format!("... and {} more (--all)", views.len() - most));
    }
    lines
}

/// State of a shard that did not answer.
pub(super) fn unanswered(view: &ShardView) -> &'static str {
    if view.answer.as_ref().is_err_and(|error| error.kind == Kind::Deadline) { "late" } else { "no answer" }
}

/// The cells of a shard.
pub(crate) fn shard_row(view: &ShardView, looks: &Looks) -> [String; 7] {
    let index = view.shard.map_or_else(|| "?".to_owned(), |shard| shard.to_string());
    let Ok(stats) = &view.answer else {
        let dash = || "-".to_owned();
        return [index, view.address.clone(), unanswered(view).to_owned(), dash(), dash(), dash(), dash()];
    };
    let counter = |name: &str| stats.counters.get(name).copied().unwrap_or(0);
    let state = match &stats.trouble {
        Some(_) => "refuses",
        None if counter("log_broken") > 0 => "not durable",
        None => "serving",
    };
    let rate = looks.rate(view.shard, "pushes").map_or_else(|| "-".to_owned(), number);
    let memory = format!("{} of {}", size(counter("memory_used")), size(counter("memory_limit")));
    let snapshot = match stats.counters.get("snapshot_age_s") {
        None => "in memory".to_owned(),
        Some(_) if counter("snapshot") == 0 => "none yet".to_owned(),
        Some(age) => format!("{} ago", duration(*age)),
    };
    [index, view.address.clone(), state.to_owned(), counter("slices").to_string(), rate, memory, snapshot]
}

/// The terms in which servers own their shards, if they do, and how far the copies of their logs are behind.
fn owners(looks: &Looks) -> Option<String> {
    let counter = |stats: &ShardStats, name: &str| stats.counters.get(name).copied();
    let terms = answers(looks).filter_map(|stats| Some((stats.shard, counter(stats, "owner_term")?)));
    let terms: Vec<_> = terms.map(|(shard, term)| format!("shard {shard} in term {term}")).collect();
    let (shown, more) = terms.split_at(terms.len().min(MAX_SHARDS));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let behind = answers(looks).filter_map(|stats| counter(stats, "log_copy_behind_ms")).max();
    let behind = behind.map(|ms| format!("; the copy of the log is {:.1} s behind", ms as f64 / 1000.0));
    (!terms.is_empty()).then(|| format!("owned: {}{more}{}", shown.join(", "), behind.unwrap_or_default()))
}

/// What the servers can be rewound to, if they keep history.
fn history(looks: &Looks) -> Option<String> {
    let counter =
        |name: &'static str| answers(looks).filter_map(move |stats| stats.counters.get(name).copied());
    let (bytes, since) = (counter("history_bytes").sum(), counter("history_since").max()?);
    let copied: Vec<_> = counter("history_copied_bytes").collect();
    let copied = if copied.is_empty() {
        String::new()
    } else {
        format!(", {} in the bucket", size(copied.iter().sum()))
    };
    let span = duration(now().saturating_sub(since));
    Some(format!("history: the last {span}, {} on disk{copied}", size(bytes)))
}

/// Groups whose workers wait for each other, and those with workers at different clocks.
fn groups(looks: &Looks) -> Vec<String> {
    let states = answers(looks).flat_map(|stats| &stats.groups);
    let line = |state: &fastps_core::verbs::GroupState| {
        let present = counted(state.workers as usize, "worker");
        format!(
            "group {}: {}, {present}, clocks {} to {}",
            state.name, state.mode, state.slowest, state.fastest
        )
    };
    states.filter(|state| state.fastest > 0).take(2).map(line).collect()
}

/// The workers; without `all` few, the slow ones first.
fn worker_table(found: &[(&WorkerState, &WorkerReport)], all: bool) -> Vec<String> {
    if found.is_empty() {
        return Vec::new();
    }
    let most = if all { usize::MAX } else { MAX_WORKERS };
    let mut shown = found.to_vec();
    if shown.len() > most {
        shown.sort_by_key(|(_, report)| slowness(found, report).is_none());
    }
    shown.truncate(most);
    let titles = [
        "WORKER",
        "RANK",
        "MODE",
        "STEPS",
        "STEPS/S",
        "LOSS",
        "STALE p50/p99",
        "MOMENTUM",
        "WAITS",
        "SEEN",
        "",
    ];
    let mut rows = vec![titles.map(str::to_owned)];
    rows.extend(shown.iter().map(|(state, report)| worker_row(state, report, found)));
    let mut lines = table(&rows, 3);
    if found.len() > most {
        lines.push(format!("... and {} more (--all)", found.len() - most));
    }
    lines
}

/// The cells of a worker among all.
pub(crate) fn worker_row(
    state: &WorkerState,
    report: &WorkerReport,
    all: &[(&WorkerState, &WorkerReport)],
) -> [String; 11] {
    let dash = || "-".to_owned();
    let staleness = match (report.staleness_p50, report.staleness_p99) {
        (Some(half), Some(most)) => format!("{half}/{most}"),
        _ => dash(),
    };
    [
        shortened(&label(state, report), MAX_LABEL),
        report.rank.map_or_else(dash, |rank| rank.to_string()),
        report.mode.clone(),
        report.steps.to_string(),
        report.step_seconds.filter(|step| *step > 0.0).map_or_else(dash, |step| number(1.0 / step)),
        report.loss.map_or_else(dash, |loss| format!("{loss:.4}")),
        staleness,
        report.momentum.map_or_else(dash, |momentum| format!("{momentum:.3}")),
        report.waited.map_or_else(dash, |share| format!("{:.0} %", share * 100.0)),
        format!("{:.1} s", state.idle.as_secs_f64()),
        if slowness(all, report).is_some() { "slow".to_owned() } else { String::new() },
    ]
}

/// Text of at most `most` characters, at least three.
pub(crate) fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let head: String = text.chars().take(most - 3).collect();
    format!("{head}...")
}

/// A rate: three digits of small ones.
pub(crate) fn number(value: f64) -> String {
    if value >= 100.0 || value == 0.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// Columns of equal width; those from `right` on are aligned to the right.
pub(crate) fn table<const N: usize>(rows: &[[String; N]], right: usize) -> Vec<String> {
    let rows: Vec<_> = rows.iter().map(|row| row.each_ref().map(|cell| printable(cell))).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..N).map(width).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if column < right { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// All counters, and the spaces.
fn details(looks: &Looks) -> Vec<String> {
    let mut lines = Vec::new();
    for stats in answers(looks) {
        lines.push(format!("shard {}:", stats.shard));
        lines.extend(stats.counters.iter().map(|(name, value)| format!("  {name}: {value}")));
    }
    for info in &looks.now.spaces {
        let names =
            |names: &[std::sync::Arc<str>]| names.iter().map(|name| &**name).collect::<Vec<_>>().join(", ");
        let coordinator = info.coordinator.as_deref().unwrap_or("none");
        lines.push(format!(
            "space {}: tensors {}; vectors {}; coordinator {coordinator}",
            info.spec.space.name,
            names(&info.spec.tensors),
            names(&info.spec.space.vectors)
        ));
    }
    lines
}
