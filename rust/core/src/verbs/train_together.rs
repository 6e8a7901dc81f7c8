//! What workers that train together ask for.

use crate::base::error::Result;
use crate::base::mode::{Clocks, Joined, Seat};
use crate::coordination::portions::{Answer, Ask};
use std::time::Duration;

/// Places in groups of workers, and portions of the samples that they share.
pub trait TrainTogether: Send + Sync {
    /// Takes a place among the workers of a group, which are bound as the seat says; again is the same as
    /// once. Where a server has none free, it waits for one until the timeout.
    fn join(&self, group: &str, seat: &Seat, timeout: Duration) -> Result<Joined>;
    /// Gives the place in a group (`warm`: in its warm start) back. It goes with the client, too.
    fn leave(&self, group: &str, warm: bool, timeout: Duration) -> Result<()>;
    /// Says that this worker has taken so many more steps, and waits until it may take the next.
    fn advance(&self, group: &str, warm: bool, steps: u64, timeout: Duration) -> Result<Clocks>;
    /// Asks for a portion of samples, or tells that one is finished; waits up to `wait` for one to be free.
    fn portion(&self, ask: &Ask, wait: Duration, timeout: Duration) -> Result<Answer>;
}
