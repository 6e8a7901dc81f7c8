//! The end of a client whose tensors a server no longer has. From then on every call fails, `register` too:
//! the client's state and the servers' belong to different trainings. A new client begins another training on
//! purpose.

use fastps_core::error::{Error, Kind, Result};
use std::sync::OnceLock;

/// The reason for a client's end, once there is one.
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

    /// The reason for the client's end.
    pub(crate) fn error(&self) -> Option<&Error> {
        self.0.get()
    }
}

/// Error for a server at this address that was restarted without its state.
pub(crate) fn restarted_without_data(address: &str) -> Error {
    let message = format!(
        "the server at {address} restarted without data: this client's tensors are gone. Create a new client \
         (fastps.connect) and register them again; a server keeps its tensors with --data-dir"
    );
    Error::new(Kind::Fenced, message)
}

/// Error for a server at this address that is of another cluster than before.
pub(crate) fn another_cluster(address: &str, known: u64, received: u64) -> Error {
    let message = format!(
        "the server at {address} is of another cluster than before: this client's tensors are not there. Create a \
         new client (fastps.connect) and register them again, or start their cluster again, with --data-dir"
    );
    Error::new(Kind::Fenced, message)
        .expected(format!("cluster {known:016x}"), format!("cluster {received:016x}"))
}

/// Error for a server at this address that owned its shard before the one that the client has met. It is no end: the
/// owner may come back.
pub(crate) fn earlier_owner(address: &str, known: u64, received: u64) -> Error {
    let message = format!(
        "the server at {address} does not own its shard any more: another one has since answered this client. Stop it, or          give the client the address of the owner (fastps owner URL shows it)"
    );
    let term = |term: u64| if term == 0 { "no term".to_owned() } else { format!("term {term}") };
    Error::new(Kind::Connection, message).expected(format!("{} or later", term(known)), term(received))
}

/// Error for a server at this address whose cluster has had its tensors divided anew.
pub(crate) fn another_number_of_shards(address: &str, known: usize, now: usize) -> Error {
    let message = format!(
        "the cluster of the server at {address} has another number of shards than before, and its tensors other \
         places: create a new client (fastps.connect)"
    );
    let shards = |n: usize| if n == 1 { "1 shard".to_owned() } else { format!("{n} shards") };
    Error::new(Kind::Fenced, message).expected(shards(known), shards(now))
}
