//! The one interface of an in-process store and of a cluster of servers.

use super::values::{
    Caller, Gradient, Patient, Pulled, PushError, PushOptions, Pushed, Receipt, Rows, State, Stats, Ticket,
};
use crate::base::dtype::View;
use crate::base::error::{Lost, Result};
use crate::base::mode::{Clocks, Joined, Seat};
use crate::coordination::portions::{Answer, Ask};
use crate::tensor::{TensorSpec, Versions};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What one can do with parameters, wherever they lie.
pub trait ParameterServer: Send + Sync + fmt::Debug {
    /// This client's incarnation.
    fn client(&self) -> u64;
    /// Another client of the same parameters, with an identity of its own.
    fn another(&self) -> Result<Arc<dyn ParameterServer>>;
    /// Creates a tensor; nothing happens if it exists with the same spec.
    fn register(&self, spec: TensorSpec, values: View<'_>, timeout: Duration) -> Result<()>;
    /// Removes a tensor.
    fn unregister(&self, name: &str, timeout: Duration) -> Result<()>;
    /// What a tensor is.
    fn spec(&self, name: &str, timeout: Duration) -> Result<Arc<TensorSpec>>;
    /// The names of all tensors, sorted.
    fn names(&self, timeout: Duration) -> Result<Vec<Arc<str>>>;
    /// Pushes and waits until everything is applied.
    fn push(&self, gradients: &[Gradient], options: &PushOptions) -> Pushed {
        self.push_for(&mut Patient, gradients, options)
    }
    /// The same for a caller that may leave.
    fn push_for(&self, caller: &mut dyn Caller, gradients: &[Gradient], options: &PushOptions) -> Pushed;
    /// Pushes without waiting: scans and queues before it returns.
    fn push_async(&self, gradients: Vec<Gradient>, options: PushOptions) -> Result<Arc<dyn Ticket<Pushed>>>;
    /// Pushes and pulls the same tensors; the values contain the push.
    fn push_pull(
        &self,
        gradients: &[Gradient],
        options: &PushOptions,
        caller: &mut dyn Caller,
    ) -> Result<(Vec<Receipt>, Versions), PushError>;
    /// Pulls values into the caller's memory.
    fn pull(&self, names: &[Arc<str>], timeout: Duration, caller: &mut dyn Caller) -> Result<Versions>;
    /// Pulls some rows of tensors into the caller's memory, where those of a tensor stand one after the other
    /// in the order given. The versions are those of the slices that have them.
    fn pull_rows(&self, rows: &[Rows], timeout: Duration, caller: &mut dyn Caller) -> Result<Versions>;
    /// Pulls without waiting.
    fn pull_async(&self, names: Vec<Arc<str>>, timeout: Duration) -> Result<Arc<dyn Ticket<Result<Pulled>>>>;
    /// Replaces a tensor's values.
    fn assign(&self, gradient: &Gradient, timeout: Duration) -> Result<Receipt, PushError>;
    /// A tensor's optimizer state.
    fn state(&self, name: &str, timeout: Duration) -> Result<State>;
    /// Replaces a tensor's optimizer state.
    fn load_state(&self, name: &str, state: &State, timeout: Duration) -> Result<Receipt, PushError>;
    /// Versions of tensors.
    fn versions(&self, names: &[Arc<str>], timeout: Duration) -> Result<Versions>;
    /// Takes a place among the workers of a group, which are bound as the seat says; again is the same as
    /// once. Where a server has none free, it waits for one until the timeout.
    fn join(&self, group: &str, seat: &Seat, timeout: Duration) -> Result<Joined>;
    /// Gives the place in a group (`warm`: in its warm start) back. It goes with the client, too.
    fn leave(&self, group: &str, warm: bool, timeout: Duration) -> Result<()>;
    /// Says that this worker has taken so many more steps, and waits until it may take the next.
    fn advance(&self, group: &str, warm: bool, steps: u64, timeout: Duration) -> Result<Clocks>;
    /// Asks for a portion of samples, or tells that one is finished; waits up to `wait` for one to be free.
    fn portion(&self, ask: &Ask, wait: Duration, timeout: Duration) -> Result<Answer>;
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
