//! Portions of samples for workers of an in-process store, which wait for them on their own threads.

use super::Store;
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::lock;
use crate::coordination::portions::{Ask, PortionAnswer, PortionWaiter};
use std::sync::mpsc;
use std::time::Duration;

impl Store {
    pub(super) fn ask_for_portion(&self, ask: &Ask, wait: Duration) -> Result<PortionAnswer> {
        if self.shared.directory.is_some() {
            let message = "a shared store leases no portions: its processes would not know of each other's";
            return Err(Error::new(Kind::Config, message)
                .expected("a server, or a store of one process", "shared=True"));
        }
        let (later, answer) = mpsc::sync_channel(1);
        let later = || -> PortionWaiter {
            Box::new(move |answer| {
                // A worker that stops waiting withdraws its waiter first, so no portion is lost here.
                let _ = later.send(answer);
            })
        };
        if let Some(answer) = lock(&self.shared.portions).ask(self.client, ask, later)? {
            return Ok(answer);
        }
        match answer.recv_timeout(wait) {
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let nothing = lock(&self.shared.portions).withdraw(self.client, ask);
                nothing.map_or_else(|| answer.recv().map_err(|_| gone()), Ok)
            }
            answer => answer.map_err(|_| gone()),
        }
    }
}

fn gone() -> Error {
    Error::new(Kind::Lease, "the store was closed, or its worker asked again")
}
