//! The calls that change values or optimizer state.

use super::values::{
    Caller, Gradient, OptimizerState, Patient, PushError, PushOptions, Pushed, Receipt, Ticket,
};
use crate::base::error::{Error, Kind, Result};
use crate::tensor::Versions;
use std::sync::Arc;
use std::time::Duration;

/// Changes of tensors: gradients, new values, new optimizer state.
pub trait PushTensors: Send + Sync {
    /// Pushes and waits until everything is applied.
    fn push(&self, gradients: &[Gradient], options: &PushOptions) -> Pushed {
        self.push_for(&mut Patient, gradients, options)
    }
    /// As [`PushTensors::push`], for a caller that may stop waiting.
    fn push_for(&self, caller: &mut dyn Caller, gradients: &[Gradient], options: &PushOptions) -> Pushed;
    /// Pushes without waiting for the result: the call checks the gradients and queues them before it
    /// returns.
    fn push_async(&self, gradients: Vec<Gradient>, options: PushOptions) -> Result<Arc<dyn Ticket<Pushed>>>;
    /// As [`PushTensors::push_async`], for a caller that waits at once: no other thread is woken for it.
    fn begin_push(&self, gradients: Vec<Gradient>, options: PushOptions) -> Result<Arc<dyn Ticket<Pushed>>> {
        self.push_async(gradients, options)
    }
    /// Pushes and pulls the same tensors; the pulled values include the push.
    fn push_pull(
        &self,
        gradients: &[Gradient],
        options: &PushOptions,
        caller: &mut dyn Caller,
    ) -> Result<(Vec<Receipt>, Versions), PushError>;
    /// Replaces the values of tensors, or those of some rows; of a row that is named more than once, the last
    /// values remain. All are checked before the first is changed.
    fn assign_all(&self, values: &[Gradient], timeout: Duration) -> Pushed;
    /// As [`PushTensors::assign_all`], of one tensor.
    fn assign(&self, values: &Gradient, timeout: Duration) -> Result<Receipt, PushError> {
        let mut receipts = self.assign_all(std::slice::from_ref(values), timeout)?;
        receipts.pop().ok_or_else(|| Error::new(Kind::Internal, "an assignment without a receipt").into())
    }
    /// Replaces a tensor's optimizer state.
    fn load_state(&self, name: &str, state: &OptimizerState, timeout: Duration)
    -> Result<Receipt, PushError>;
}
