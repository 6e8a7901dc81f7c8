//! The interface that an in-process store and a cluster of servers share.

use super::values::Stats;
use super::{PullTensors, PushTensors, TensorRegistry, TrainTogether};
use crate::base::error::{Lost, Result};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A client of tensors, wherever they are kept.
pub trait ParameterServer:
    TensorRegistry + PushTensors + PullTensors + TrainTogether + Send + Sync + fmt::Debug
{
    /// This client's incarnation.
    fn client(&self) -> u64;
    /// Another client of the same parameters, with an identity of its own.
    fn another(&self) -> Result<Arc<dyn ParameterServer>>;
    /// Counters.
    fn stats(&self, timeout: Duration) -> Result<Stats>;
    /// Takes what servers that were started anew lack of what this client was told. From the first call on
    /// that is not raised by other calls; nothing in process.
    fn lost(&self) -> Vec<Lost> {
        Vec::new()
    }
    /// For each server: its address, and how it is reached and why; nothing in process.
    fn transport(&self) -> Vec<(String, String)> {
        Vec::new()
    }
    /// Ends the client's session; further calls fail.
    fn close(&self);
}
