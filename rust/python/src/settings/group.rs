//! Modes: the frozen dataclasses of `fastps.modes`, to the core, where they bind a group.

use super::{field, kind};
use crate::errors::config;
use fastps_core::mode::{Mode, Quorum};
use pyo3::prelude::*;

/// The classes of `fastps.modes`.
const MODES: [&str; 6] = ["Async", "Bounded", "Hogwild", "Local", "Sync", "WarmStart"];

/// Reads a mode. Those that bind no group are all `Free`.
pub(crate) fn read_mode(object: &Bound<'_, PyAny>) -> PyResult<Mode> {
    let number = |name| field::<u64>(object, name, "an integer from 0 to 2**64 - 1");
    match kind(object, "mode", &MODES, "fastps.Async()")?.as_str() {
        "free" => Ok(Mode::Free),
        "bounded" => Ok(Mode::Bounded { staleness: number("staleness")? }),
        "warm_start" => Ok(Mode::WarmStart { steps: number("steps")? }),
        "sync" => read_quorum(object).map(Mode::Sync),
        _ => {
            let expected = "an object such as fastps.Async()";
            Err(config(object.py(), "invalid mode", expected, object.repr()?))
        }
    }
}

fn read_quorum(object: &Bound<'_, PyAny>) -> PyResult<Quorum> {
    let count = |name| field::<u32>(object, name, "an integer from 0 to 2**32 - 1");
    let reduce = field::<String>(object, "reduce", "a string")?;
    let sum = match reduce.as_str() {
        "mean" => false,
        "sum" => true,
        other => {
            let expected = "\"mean\" or \"sum\"";
            return Err(config(object.py(), "invalid reduce", expected, format!("{other:?}")));
        }
    };
    let deterministic = field::<bool>(object, "deterministic", "True or False")?;
    Ok(Quorum { workers: count("workers")?, backup: count("backup")?, deterministic, sum })
}
