//! Modes: the frozen dataclasses of `fastps.modes`, to the core, where they bind a group.

use super::{FLAG, field, kind};
use crate::errors::config;
use fastps_core::mode::{Mode, Quorum, Robust};
use pyo3::prelude::*;

/// The classes of `fastps.modes`.
const MODES: [&str; 7] = ["Async", "Bounded", "DiLoCo", "Hogwild", "Local", "Sync", "WarmStart"];

/// Reads a mode. Those that bind no group are all `Free`.
pub(crate) fn read_mode(object: &Bound<'_, PyAny>) -> PyResult<Mode> {
    let number = |name| field::<u64>(object, name, "an integer from 0 to 2**64 - 1");
    match kind(object, "mode", &MODES, "fastps.Async()")?.as_str() {
        "free" => Ok(Mode::Free),
        "bounded" => Ok(Mode::Bounded { staleness: number("staleness")? }),
        "warm_start" => Ok(Mode::WarmStart { steps: number("steps")? }),
        "sync" => {
            let count = |name| field::<u32>(object, name, "an integer from 0 to 2**32 - 1");
            let (workers, backup) = (count("workers")?, count("backup")?);
            Ok(Mode::Sync(Quorum { workers, backup, ..read_quorum(object)? }))
        }
        "diloco" => {
            let workers = field::<Option<u32>>(object, "workers", "None or an integer from 1 to 2**32 - 1")?;
            let (workers, every) = (workers.unwrap_or(0), number("every")?);
            let fragments = field::<u32>(object, "fragments", "an integer from 1 to 2**32 - 1")?;
            let (fragments, overlap) = (if fragments == 1 { 0 } else { fragments }, number("overlap")?);
            Ok(Mode::Sync(Quorum { workers, every, fragments, overlap, ..read_quorum(object)? }))
        }
        _ => {
            let expected = "an object such as fastps.Async()";
            Err(config(object.py(), "invalid mode", expected, object.repr()?))
        }
    }
}

fn read_quorum(object: &Bound<'_, PyAny>) -> PyResult<Quorum> {
    let reduce = field::<String>(object, "reduce", "a string")?;
    let (mut sum, mut weighted, mut robust) = (false, false, None);
    match reduce.as_str() {
        "mean" => {}
        "sum" => sum = true,
        "weighted" => weighted = true,
        "median" => robust = Some(Robust::Median),
        "trimmed_mean" => {
            let trim = field::<u32>(object, "trim", "an integer from 1 to 2**32 - 1")?;
            robust = Some(Robust::TrimmedMean(trim));
        }
        other => {
            let expected = "\"mean\", \"sum\", \"weighted\", \"median\" or \"trimmed_mean\"";
            return Err(config(object.py(), "invalid reduce", expected, format!("{other:?}")));
        }
    }
    let deterministic = field::<bool>(object, "deterministic", FLAG)?;
    let enough =
        field::<Option<u32>>(object, "quorum", "None or an integer from 1 to 2**32 - 1")?.unwrap_or(0);
    let grace = field::<Option<f64>>(object, "grace", "None or a number of seconds")?.unwrap_or(0.0);
    let grace_ms = (grace * 1e3).round() as u64;
    Ok(Quorum { deterministic, sum, weighted, robust, enough, grace_ms, ..Quorum::default() })
}
