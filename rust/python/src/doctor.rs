//! The CPU's instruction sets and whether its vectors tear, for `fastps doctor`.

use crate::errors::OrRaise;
use fastps_core::isa::Isa;
use fastps_core::litmus::{self, Mapping};
use pyo3::prelude::*;

/// Bytes of a lane.
const LANE: usize = 4;

/// The names of the instruction sets that this CPU has, as `FASTPS_ISA` takes them.
#[pyfunction]
pub(crate) fn instruction_sets() -> Vec<&'static str> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect()
}

/// The name of the instruction set that this process uses; raises if `FASTPS_ISA` asks for one that is
/// missing.
#[pyfunction]
pub(crate) fn instruction_set(py: Python<'_>) -> PyResult<&'static str> {
    Ok(Isa::get().or_raise(py)?.name())
}

/// Races two storing threads against this one, which loads `loads` lines at each place. Returns for each
/// place its distance in bytes from the border of a cache line, the loads, the number of loads that mixed
/// both values, and the torn lanes. `shared`: in memory like that of a shared store.
#[pyfunction]
pub(crate) fn tearing(
    py: Python<'_>,
    isa: &str,
    shared: bool,
    loads: u64,
) -> PyResult<Vec<(usize, u64, u64, u64)>> {
    let isa = Isa::parse(isa).or_raise(py)?;
    let mapping = if shared { Mapping::Shared } else { Mapping::Private };
    let report = py.detach(|| litmus::tearing(isa, mapping, loads)).or_raise(py)?;
    Ok(report.trials.iter().map(|t| (t.shift * LANE, t.loads, t.mixed, t.torn_lanes)).collect())
}
