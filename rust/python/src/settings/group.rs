//! The modes that bind a group.

use crate::errors::config;
use fastps_core::mode::{Mode, Quorum};
use pyo3::prelude::*;

/// A mode that binds a group: its name, and its numbers and flags in the order of their names in Python.
pub(crate) type GroupMode = (String, Vec<u64>, Vec<bool>);

pub(crate) fn group_mode(py: Python<'_>, mode: &GroupMode) -> PyResult<Mode> {
    let (name, numbers, flags) = mode;
    let number = |k: usize| numbers.get(k).copied().unwrap_or(0);
    let count = |k: usize| u32::try_from(number(k)).unwrap_or(u32::MAX);
    let flag = |k: usize| flags.get(k).copied().unwrap_or(false);
    Ok(match &**name {
        "free" => Mode::Free,
        "bounded" => Mode::Bounded { staleness: number(0) },
        "warm_start" => Mode::WarmStart { steps: number(0) },
        "sync" => {
            Mode::Sync(Quorum { workers: count(0), backup: count(1), deterministic: flag(0), sum: flag(1) })
        }
        other => {
            return Err(config(py, "invalid mode of a group", "free, bounded, sync or warm_start", other));
        }
    })
}
