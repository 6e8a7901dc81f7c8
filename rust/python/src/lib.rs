//! The extension module `fastps._fastps`: converts Python's objects to values of the core and the client, and
//! their results back. It holds no arithmetic. `python/fastps` is the only caller; users import that.

// Docstrings here are read by Python users.
#![allow(clippy::doc_markdown)]

mod arguments;
mod arrays;
mod call;
mod client;
mod codecs;
mod doctor;
mod errors;
mod history;
mod openmp;
mod resolver;
mod results;
mod server;
mod settings;
mod training;
mod waits;

use pyo3::prelude::*;

/// The compiled half of fastps; use the names in `fastps` instead.
#[pymodule]
mod _fastps {
    #[pymodule_export]
    use super::arrays::encoded::Encoded;
    #[pymodule_export]
    use super::arrays::shared_view::SharedView;
    #[pymodule_export]
    use super::arrays::sparse::Sparse;
    #[pymodule_export]
    use super::call::forked;
    #[pymodule_export]
    use super::client::{
        BoundList, Client, Exchange, Listener, PullFlight, PushFlight, PushSettings, PyVectorSpaces,
        assign_all,
    };
    #[pymodule_export]
    use super::codecs::{ErrorFeedback, body_len, decode, encode};
    #[pymodule_export]
    use super::doctor::{instruction_set, instruction_sets, tearing};
    #[pymodule_export]
    use super::errors::without_secrets;
    #[pymodule_export]
    use super::history::{fetch_history, moment_of, recorded, rewind_to};
    #[pymodule_export]
    use super::results::in_doubt::InDoubt;
    #[pymodule_export]
    use super::results::receipts::{Receipt, Receipts};
    #[pymodule_export]
    use super::results::versions::Versions;
    #[pymodule_export]
    use super::server::{Server, command_cli, connect, described, nearest, printable, serve_cli};
    #[pymodule_export]
    use super::settings::codec::check_codec;
    #[pymodule_export]
    use super::settings::optimizer::check_optimizer;
    #[pymodule_export]
    use super::settings::tensor::check_average;
    #[pymodule_export]
    use super::training::check::check_gradient;
    #[pymodule_export]
    use super::training::estimators::{FactorTrainer, LinearTrainer};
    #[pymodule_export]
    use super::training::local_steps::LocalSteps;
    use pyo3::prelude::*;

    /// Runs when the module is imported.
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
