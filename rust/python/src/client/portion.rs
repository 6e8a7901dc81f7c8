//! Requests for portions of samples, as Python writes them.

use crate::errors;
use fastps_core::portions::{Ask, Given as Portion, PortionAnswer, Samples, Then};
use pyo3::prelude::*;

/// Run, epoch, unfinished portions, the portion given, and whether the epoch is over.
pub(super) type Given = (u64, u64, u64, Option<u64>, bool);

pub(super) fn ask(
    py: Python<'_>,
    (name, n, size, seed): (String, u64, u64, u64),
    worker: u64,
    (run, epoch, finished): (u64, u64, Option<u64>),
    then: &str,
) -> PyResult<Ask> {
    let then = match then {
        "take" => Then::Take,
        "rest" => Then::Rest,
        "leave" => Then::Leave,
        other => return Err(errors::config(py, "invalid then", "take, rest or leave", other)),
    };
    Ok(Ask { samples: Samples { name: name.into(), n, size, seed }, worker, run, epoch, finished, then })
}

pub(super) fn given(answer: PortionAnswer) -> Given {
    let (portion, over) = match answer.given {
        Portion::Portion(portion) => (Some(portion), false),
        Portion::Over => (None, true),
        Portion::Nothing => (None, false),
    };
    (answer.run, answer.epoch, answer.unfinished, portion, over)
}
