//! How a thread waits for a call, and drives the links that carry it meanwhile.

use crate::link::call::{Call, Outcome};
use crate::link::send::Abandoned;
use crate::link::state::Link;
use crate::state::waiting;
use fastps_core::error::Result;
use fastps_core::verbs::Caller;
use fastps_transport::wire::{Pace, Spin};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval at which a caller is asked whether it still waits.
const CALLER_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A client's links, by shard.
pub(crate) type Links = Arc<[Arc<Link>]>;

/// A call under way, and the links that carry it.
#[derive(Debug)]
pub(crate) struct CallHandle {
    pub(crate) call: Arc<Call>,
    links: Links,
    begun: Instant,
    /// Set once its wait was reported.
    reported: AtomicBool,
}

impl Deref for CallHandle {
    type Target = Call;

    fn deref(&self) -> &Call {
        &self.call
    }
}

impl CallHandle {
    pub(crate) fn new(call: Arc<Call>, links: Links) -> Self {
        Self { call, links, begun: Instant::now(), reported: AtomicBool::new(false) }
    }

    /// Waits until all is done or the timeout or the deadline passes (that ends the call). Hands out values
    /// as they arrive, or keeps them without a caller. Returns whether all is done. The waiting thread drives
    /// the client's connections itself.
    pub(crate) fn wait(&self, timeout: Duration, caller: Option<&mut dyn Caller>) -> Result<bool> {
        self.process.check()?;
        let until = crate::state::time::after(timeout).min(self.deadline);
        // A call without parts is done already.
        let Some(driver) = self.parts.first().and_then(|part| self.links[part.shard].driver.upgrade()) else {
            return Ok(self.is_over(false));
        };
        let takes = caller.is_some();
        if takes {
            self.set_taken(true);
        }
        let done = driver.drive(async |spin| self.waiting(until, caller, spin).await);
        if takes {
            self.set_taken(false);
        }
        if self.parts.iter().any(|part| self.links[part.shard].has_frames()) {
            driver.nudge();
        }
        Ok(done)
    }

    async fn waiting(&self, until: Instant, mut caller: Option<&mut dyn Caller>, spin: &mut Spin) -> bool {
        let (mut expired, mut asked, pace) = (false, Instant::now(), Pace::new());
        loop {
            let changed = self.changed();
            if let Some(caller) = &mut caller {
                self.hand_out(*caller);
            }
            if self.is_over(caller.is_some()) {
                return true;
            }
            let now = Instant::now();
            let report_at =
                (!self.reported.load(Ordering::Relaxed)).then(|| self.begun + waiting::REPORT_WAIT_AFTER);
            if report_at.is_some_and(|at| now >= at) {
                self.say_for_what_it_waits();
            }
            if let Some(caller) = &mut caller
                && now >= asked + CALLER_CHECK_INTERVAL
            {
                asked = now;
                if let Some(at_end) = caller.leaves() {
                    self.on_done(at_end);
                    return false;
                }
            }
            let next = if expired {
                now + Duration::from_secs(1)
            } else if now >= self.deadline {
                expired = true;
                expire(&self.call, &self.links);
                continue;
            } else if now >= until {
                return false;
            } else if caller.is_some() {
                until.min(asked + CALLER_CHECK_INTERVAL)
            } else {
                until
            };
            let next = report_at.filter(|at| *at > now).map_or(next, |at| next.min(at));
            // The timeout is handled above.
            let _ = tokio::time::timeout_at(next.into(), spin.wait(changed, &pace)).await;
        }
    }

    /// Reports once per call what its first unanswered part waits for.
    fn say_for_what_it_waits(&self) {
        if self.reported.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Some(part) = (0..self.parts.len()).find(|part| self.is_open(*part)) {
            let (what, text) = self.links[self.parts[part].shard].waits_for();
            waiting::say(what, &text);
        }
    }
}

/// Ends a call: unsent parts are withdrawn, unanswered parts are in doubt.
pub(crate) fn expire(call: &Call, links: &[Arc<Link>]) {
    for first in 0..call.parts.len() {
        // Another part of the same frame may have ended it.
        if !call.is_open(first) {
            continue;
        }
        let (parts, abandoned) = links[call.parts[first].shard].abandon(call, first);
        match abandoned {
            Abandoned::NotSent(error) => {
                parts.for_each(|k| call.deliver(k, Outcome::Failed(error.clone()), None));
            }
            Abandoned::Sent(doubts) => {
                parts.zip(doubts).for_each(|(k, doubt)| call.deliver(k, Outcome::InDoubt(doubt), None));
            }
            // Its answer is being delivered right now.
            Abandoned::Answered => {}
        }
    }
}
