//! Where a cluster's servers are, as its user finds out.

use fastps_core::error::Result;
use std::fmt;

/// Finds the addresses of a cluster's servers, such as in the records of the engine that starts them.
pub trait Resolver: Send + Sync + fmt::Debug {
    /// Its name, for errors.
    fn name(&self) -> String;

    /// The addresses (`host:port` or `unix:///path`) of some or all shards, in any order.
    ///
    /// It runs on a thread of its own and may block: no lock is held, and calls keep their deadlines.
    /// `is_open` returns false once the client is closed; a resolver that waits before it starts checks it.
    fn resolve(&self, is_open: &dyn Fn() -> bool) -> Result<Vec<String>>;
}
