//! The compiled half of the Python package: a table of contents. Numerics live in `fastps-core`, the network in
//! `fastps-client` and `fastps-server`; here Python's objects become theirs and back. The face that users see is `python/fastps`.

// Docstrings here are read by Python users.
#![allow(clippy::doc_markdown)]

mod buffer;
mod call;
mod client;
mod codecs;
mod doctor;
mod errors;
mod flight;
mod hogwild;
mod live;
mod openmp;
mod options;
mod server;
mod sparse;
mod steps;
mod values;
mod waits;

use pyo3::prelude::*;

/// The compiled half of fastps; use the names in `fastps` instead.
#[pymodule]
mod _fastps {
    #[pymodule_export]
    use super::call::forked;
    #[pymodule_export]
    use super::client::{BoundList, Client, Exchange};
    #[pymodule_export]
    use super::codecs::{ErrorFeedback, decode, encode};
    #[pymodule_export]
    use super::doctor::{instruction_set, instruction_sets, tearing};
    #[pymodule_export]
    use super::flight::{InDoubt, PullFlight, PushFlight};
    #[pymodule_export]
    use super::hogwild::{FactorTrainer, LinearTrainer};
    #[pymodule_export]
    use super::live::LiveValues;
    #[pymodule_export]
    use super::options::{check_codec, check_optimizer};
    #[pymodule_export]
    use super::server::{Server, checkpoint_cli, connect, serve_cli};
    #[pymodule_export]
    use super::sparse::Sparse;
    #[pymodule_export]
    use super::steps::LocalSteps;
    #[pymodule_export]
    use super::values::{Receipt, Receipts, Versions};
    use pyo3::prelude::*;

    /// What the module does when it is imported.
    #[pymodule_init]
    #[allow(clippy::unnecessary_wraps)] // its type is PyO3's
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::waits::listen();
        Ok(())
    }

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
