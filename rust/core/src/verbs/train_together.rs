//! The calls of workers that train together.

use crate::base::error::Result;
use crate::base::mode::{Clocks, Joined, MembershipRequest};
use crate::coordination::portions::{Ask, PortionAnswer};
use std::time::Duration;

/// Places in groups of workers, and portions of the samples that they share.
pub trait TrainTogether: Send + Sync {
    /// Takes a place in a group whose workers use the seat's mode; a worker that already has a place keeps
    /// it. If a server has no free place, the call waits for one until the timeout.
    fn join(&self, group: &str, seat: &MembershipRequest, timeout: Duration) -> Result<Joined>;
    /// Gives up the place in a group (`warm`: in its warm start). The place also ends with the client.
    fn leave(&self, group: &str, warm: bool, timeout: Duration) -> Result<()>;
    /// Reports that this worker has taken `steps` more steps, and waits until it may take the next one.
    fn advance(&self, group: &str, warm: bool, steps: u64, timeout: Duration) -> Result<Clocks>;
    /// Asks for a portion of samples, or reports one finished; waits up to `wait` for a free one.
    fn portion(&self, ask: &Ask, wait: Duration, timeout: Duration) -> Result<PortionAnswer>;
}
