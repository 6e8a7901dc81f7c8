//! The metrics of the process, by the names that they have in every program.

use super::family::{Family, Value};
use super::names::Kind;
use rustix::process::{Resource, getrlimit};
use std::fs::{read_dir, read_to_string};

/// Clock ticks per second in `/proc`, on every architecture that fastps has vector code for.
const TICKS: f64 = 100.0;

/// The families; none where there is no `/proc`.
pub(super) fn families() -> Vec<Family> {
    let family = |name, kind, help, value: Option<Value>| {
        let series = value.map(|value| (Vec::new(), value)).into_iter().collect();
        Family { name, kind, help, series }
    };
    let stat = read_to_string("/proc/self/stat").unwrap_or_default();
    // The second field, a name in parentheses, may have spaces.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
    let seconds = ticks(14).zip(ticks(15)).map(|(user, system)| Value::Real((user + system) / TICKS));
    let started = ticks(22).zip(number("/proc/stat", "btime"));
    let started = started.map(|(since_boot, boot)| Value::Real(boot as f64 + since_boot / TICKS));
    let memory = |name| number("/proc/self/status", name).map(|kib| Value::Whole(kib << 10));
    // Without the folder's own descriptor.
    let open = read_dir("/proc/self/fd").ok().map(|all| Value::Whole(all.count().saturating_sub(1) as u64));
    let limit = getrlimit(Resource::Nofile).current.map(Value::Whole);
    vec![
        family("process_cpu_seconds", Kind::Counter, "Processor time of the process", seconds),
        family(
            "process_start_time_seconds",
            Kind::Gauge,
            "Start of the process, in seconds since 1970",
            started,
        ),
        family(
            "process_resident_memory_bytes",
            Kind::Gauge,
            "Memory of the process in RAM",
            memory("VmRSS:"),
        ),
        family(
            "process_virtual_memory_bytes",
            Kind::Gauge,
            "Address space of the process",
            memory("VmSize:"),
        ),
        family("process_open_fds", Kind::Gauge, "Open file descriptors", open),
        family("process_max_fds", Kind::Gauge, "Limit on open file descriptors", limit),
    ]
}

/// The number after a name at the start of a line.
fn number(file: &str, name: &str) -> Option<u64> {
    let text = read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
}
