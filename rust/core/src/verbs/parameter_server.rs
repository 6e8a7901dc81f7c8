//! [`ParameterServer`], the interface that the in-process store and the network client implement.

use super::report::WorkerReport;
use super::values::Stats;
use super::{PullTensors, PushTensors, TensorRegistry, TrainTogether, VectorSpaces};
use crate::base::error::{Error, Kind, Lost, Result};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A client of tensors, in process or on servers.
pub trait ParameterServer:
    TensorRegistry + PushTensors + PullTensors + TrainTogether + VectorSpaces + Send + Sync + fmt::Debug
{
    /// This client's incarnation.
    fn client(&self) -> u64;
    /// Another client of the same parameters, with a new identity.
    fn another(&self) -> Result<Arc<dyn ParameterServer>>;
    /// [`another`](Self::another) within `timeout`, if connecting takes time; it calls itself `name` (`None`: as this
    /// one does).
    fn another_within(&self, _name: Option<&str>, _timeout: Duration) -> Result<Arc<dyn ParameterServer>> {
        self.another()
    }
    /// Counters.
    fn stats(&self, timeout: Duration) -> Result<Stats>;
    /// Replaces the worker's report about its training, which servers show to people: a cluster sends it with
    /// renewals of the lease, at most once a second. In process it is only checked.
    fn report(&self, report: WorkerReport) -> Result<()> {
        report.check()
    }
    /// Names a moment of all shards in the logs of servers that keep history, to which `fastps rewind` can go
    /// back exactly.
    fn mark(&self, _name: &str, _timeout: Duration) -> Result<()> {
        let error =
            Error::new(Kind::Precondition, "a store in this process keeps no history, which marks belong to");
        Err(error.expected("servers with --keep-history", "none"))
    }
    /// Takes the list of what restarted servers have lost although this client had receipts for it. After the
    /// first call, other calls no longer raise these losses. Empty in process.
    fn lost(&self) -> Vec<Lost> {
        Vec::new()
    }
    /// Returns whether [`lost`](Self::lost) has something to report.
    fn has_lost(&self) -> bool {
        false
    }
    /// The number of tensors that are known here, without asking a server.
    fn known_tensors(&self) -> usize;
    /// For each server: its address, and how it is reached and why. Empty in process.
    fn transport(&self) -> Vec<(String, String)> {
        Vec::new()
    }
    /// Ends the client's session, and waits at most this long for the servers; further calls fail.
    fn close(&self, within: Duration);
}
