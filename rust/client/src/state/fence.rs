//! The end of a client: a server has turned out not to have the client's tensors any more. From then on every
//! call fails, `register` too: what the client has and what the servers have belong to different trainings. A
//! new client begins another one on purpose.

use fastps_core::error::{Error, Kind, Result};
use std::sync::OnceLock;

/// The reason of a client's end, once there is one.
#[derive(Debug, Default)]
pub(crate) struct Fence(OnceLock<Error>);

impl Fence {
    /// Ends the client for this reason, unless it has ended before.
    pub(crate) fn close(&self, why: Error) {
        let _ = self.0.set(why);
    }

    /// Fails once the client has ended.
    pub(crate) fn check(&self) -> Result<()> {
        self.error().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Why the client has ended.
    pub(crate) fn error(&self) -> Option<&Error> {
        self.0.get()
    }
}

/// The server at this address was started again and has nothing of what it had.
pub(crate) fn restarted_without_data(address: &str) -> Error {
    let message = format!(
        "the server at {address} restarted without data: this client's tensors are gone. Create a new client \
         (fastps.connect) and register them again; a server keeps its tensors with --data-dir"
    );
    Error::new(Kind::Fenced, message)
}

/// The server at this address is of another cluster than the one before.
pub(crate) fn another_cluster(address: &str, known: u64, told: u64) -> Error {
    let message = format!(
        "the server at {address} is of another cluster than before: this client's tensors are not there. Create a \
         new client (fastps.connect) and register them again, or start their cluster again, with --data-dir"
    );
    Error::new(Kind::Fenced, message)
        .expected(format!("cluster {known:016x}"), format!("cluster {told:016x}"))
}
