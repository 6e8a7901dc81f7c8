//! The calls of workers that train together.

use crate::base::error::Result;
use crate::base::mode::{Clocks, Joined, MembershipRequest};
use crate::base::sync::Arc;
use crate::coordination::portions::{Ask, PortionAnswer};
use crate::tensor::Versions;
use std::fmt;
use std::time::Duration;

/// Tells a worker, at no cost and whenever it asks, whether the version that it computes for goes on without
/// it.
pub struct Listener(Box<dyn Fn() -> bool + Send + Sync>);

impl Listener {
    /// A listener that asks a function.
    pub fn new(heard: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Box::new(heard))
    }

    /// Returns whether the version has its quorum without the worker, or is made.
    pub fn heard(&self) -> bool {
        (self.0)()
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").finish_non_exhaustive()
    }
}

/// Places in groups of workers, and portions of the samples that they share.
pub trait TrainTogether: Send + Sync {
    /// Takes a place in a group whose workers use the seat's mode; a worker that already has a place keeps
    /// it. If a server has no free place, the call waits for one until the timeout.
    fn join(&self, group: &str, seat: &MembershipRequest, timeout: Duration) -> Result<Joined>;
    /// Gives up the place in a group (`warm`: in its warm start). The place also ends with the client.
    fn leave(&self, group: &str, warm: bool, timeout: Duration) -> Result<()>;
    /// Reports that this worker has taken `steps` more steps, and waits until it may take the next one.
    fn advance(&self, group: &str, warm: bool, steps: u64, timeout: Duration) -> Result<Clocks>;
    /// Listens while a worker computes a gradient at these versions of a tensor, whose first slice stands for
    /// all: a worker contributes to all slices at once.
    fn listen(&self, name: &Arc<str>, at: &Versions, timeout: Duration) -> Result<Listener>;
    /// Asks for a portion of samples, or reports one finished; waits up to `wait` for a free one.
    fn portion(&self, ask: &Ask, wait: Duration, timeout: Duration) -> Result<PortionAnswer>;
}
