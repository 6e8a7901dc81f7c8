//! Ends asynchronous calls when their deadline passes.

use crate::link::call::Call;
use crate::link::wait::{Links, expire};
use crate::state::runtime::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;
use tokio::sync::{Notify, watch};

#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    calls: Mutex<Calls>,
    earlier: Notify,
}

#[derive(Debug, Default)]
struct Calls {
    next: u64,
    by_time: BTreeMap<(Instant, u64), Weak<Call>>,
}

impl Deadlines {
    /// Watches a call until it is done.
    pub(crate) fn watch(self: &Arc<Self>, call: &Arc<Call>) {
        let mut calls = lock(&self.calls);
        calls.next += 1;
        let key = (call.deadline, calls.next);
        let first = calls.by_time.first_key_value().is_none_or(|(first, _)| key < *first);
        calls.by_time.insert(key, Arc::downgrade(call));
        drop(calls);
        if first {
            self.earlier.notify_one();
        }
        let this = Arc::downgrade(self);
        call.on_done(Box::new(move || {
            if let Some(this) = this.upgrade() {
                lock(&this.calls).by_time.remove(&key);
            }
        }));
    }

    /// Runs until the client is closed.
    pub(crate) async fn run(self: Arc<Self>, links: Links, mut closed: watch::Receiver<bool>) {
        loop {
            let first = lock(&self.calls).by_time.first_key_value().map(|((time, _), _)| *time);
            let due = async {
                match first {
                    Some(time) => tokio::time::sleep_until(time.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = self.earlier.notified() => continue,
                _ = closed.wait_for(|closed| *closed) => return,
            }
            let now = Instant::now();
            while let Some(call) = self.take_due(now) {
                if let Some(call) = call.upgrade() {
                    expire(&call, &links);
                }
            }
        }
    }

    fn take_due(&self, now: Instant) -> Option<Weak<Call>> {
        let mut calls = lock(&self.calls);
        let entry = calls.by_time.first_entry().filter(|entry| entry.key().0 <= now)?;
        Some(entry.remove())
    }
}
