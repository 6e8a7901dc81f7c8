//! A shard's claim, shared by the thread that renews it and by those that answer.

use crate::owner::since_boot;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::owner::{Answer, Candidate, Claim, Phase, Record, Request, Timing};
use object_store::UpdateVersion;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Retry delay of calls to a server that does not own its shard.
const RETRY_AFTER_MS: u64 = 500;

/// The claim of this server to one shard.
#[derive(Debug)]
pub(crate) struct Ownership {
    state: Mutex<State>,
    /// When the lease ends, in nanoseconds since boot; 0: this server does not own the shard.
    ends: AtomicU64,
    changed: watch::Sender<()>,
}

/// Called once.
type Callback = Box<dyn FnOnce() + Send>;

struct State {
    /// `None`: nothing has been claimed yet.
    claim: Option<Claim<UpdateVersion>>,
    /// What the start waits for.
    waits_for: String,
    failed: Option<Error>,
    /// Those who wait for the confirmation of a later swap than that of this number.
    waiters: Vec<(u64, Callback)>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("claim", &self.claim)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl State {
    /// The callbacks of those whose wait is over.
    fn due(&mut self) -> Vec<Callback> {
        let confirmed = self.claim.as_ref().map_or(0, Claim::confirmed);
        let is_due = |waiter: &mut (u64, Callback)| waiter.0 < confirmed;
        self.waiters.extract_if(.., is_due).map(|(_, then)| then).collect()
    }
}

impl Ownership {
    pub(crate) fn new() -> Self {
        let waits_for = "it reads its files".to_owned();
        let state = Mutex::new(State { claim: None, waits_for, failed: None, waiters: Vec::new() });
        Self { state, ends: AtomicU64::new(0), changed: watch::Sender::new(()) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether this server may answer. To be asked after everything that the answer contains or relies
    /// on: the clock is read last.
    pub(crate) fn holds(&self) -> bool {
        let ends = self.ends.load(Ordering::Acquire);
        ends > 0 && since_boot() < Duration::from_nanos(ends)
    }

    /// Fails unless this server may answer. The error does not name the shard: clients take who does so for it.
    pub(crate) fn check(&self) -> Result<()> {
        if self.holds() { Ok(()) } else { Err(self.refusal()) }
    }

    /// The refusal of a server that does not own its shard. It says who does.
    pub(crate) fn refusal(&self) -> Error {
        let state = self.state();
        let phase = state.claim.as_ref().map(Claim::phase);
        let why = match phase {
            None => format!("this server does not own its shard yet: {}", state.waits_for),
            Some(Phase::Waiting) => "another server owned the shard, and its lease may last".to_owned(),
            Some(Phase::Lost) => "another server has taken the shard".to_owned(),
            Some(Phase::Open) => {
                "the lease of this server on its shard has ended, and its record cannot be renewed".to_owned()
            }
            Some(Phase::Releasing | Phase::Released) => "this server has given its shard up".to_owned(),
            Some(_) => "this server is taking the shard".to_owned(),
        };
        let error = Error::new(Kind::Unavailable, why).retry_after_ms(RETRY_AFTER_MS);
        match state.claim.as_ref().and_then(Claim::record) {
            Some(Record { address, term, .. }) if matches!(phase, Some(Phase::Waiting | Phase::Lost)) => {
                error.expected(format!("the owner, {address} (term {term})"), "another server")
            }
            _ => error,
        }
    }

    /// Begins to claim.
    pub(crate) fn begin(&self, candidate: Candidate, timing: Timing) {
        self.state().claim = Some(Claim::new(candidate, timing));
        self.publish();
    }

    /// The request to send now, and when there will be one otherwise.
    pub(crate) fn poll(&self, nonce: u64) -> (Option<Request<UpdateVersion>>, Option<Duration>) {
        let mut state = self.state();
        let Some(claim) = &mut state.claim else { return (None, None) };
        let request = claim.poll(since_boot(), nonce);
        (request, claim.wake())
    }

    /// Takes the answer to the request.
    pub(crate) fn answer(&self, answer: Answer<UpdateVersion>) -> Result<()> {
        let taken = match &mut self.state().claim {
            Some(claim) => claim.answer(since_boot(), answer),
            None => Ok(()),
        };
        self.publish();
        taken
    }

    /// Changes the claim.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Claim<UpdateVersion>) -> T) -> Option<T> {
        let changed = self.state().claim.as_mut().map(change);
        self.publish();
        changed
    }

    /// Shows the state of the claim to those who answer, and wakes those who wait for it.
    fn publish(&self) {
        let mut state = self.state();
        let claim = state.claim.as_ref().filter(|claim| claim.phase() == Phase::Open);
        let ends = claim.and_then(Claim::ends).map_or(0, |ends| ends.as_nanos() as u64);
        self.ends.store(if state.failed.is_none() { ends } else { 0 }, Ordering::Release);
        let due = state.due();
        drop(state);
        self.changed.send_replace(());
        for then in due {
            then();
        }
    }

    /// Calls `then` once a renewal is confirmed that is sent after this call. All who call before it is sent share it.
    pub(crate) fn when_renewed(&self, then: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        let sent = state.claim.as_ref().map_or(0, Claim::sent);
        state.waiters.push((sent, Box::new(then)));
        drop(state);
        self.change(Claim::hurry);
    }

    /// Wakes at each change.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(crate) fn phase(&self) -> Option<Phase> {
        self.state().claim.as_ref().map(Claim::phase)
    }

    /// The record, as last read or written.
    pub(crate) fn record(&self) -> Option<Record> {
        self.state().claim.as_ref().and_then(Claim::record).cloned()
    }

    /// The term of this server; 0: it does not own the shard.
    pub(crate) fn term(&self) -> u64 {
        match self.phase() {
            None | Some(Phase::Waiting | Phase::Lost) => 0,
            Some(_) => self.record().map_or(0, |record| record.term),
        }
    }

    /// Returns whether somebody has asked this server to give the shard up.
    pub(crate) fn is_asked_to_release(&self) -> bool {
        self.state().claim.as_ref().is_some_and(Claim::is_asked_to_release)
    }

    /// Waits until somebody has asked this server to give the shard up.
    pub(crate) async fn asked_to_release(&self) {
        let mut changes = self.changes();
        loop {
            if self.is_asked_to_release() {
                return;
            }
            if changes.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Milliseconds until the lease ends; 0: this server does not own the shard.
    pub(crate) fn left_ms(&self) -> u64 {
        let ends = Duration::from_nanos(self.ends.load(Ordering::Acquire));
        ends.saturating_sub(since_boot()).as_millis() as u64
    }

    /// Notes what the start waits for, before there is a claim.
    pub(crate) fn waits_for(&self, what: String) {
        self.state().waits_for = what;
    }

    /// The claim has ended for a reason that only a person can remove.
    pub(crate) fn fail(&self, error: Error) {
        self.state().failed = Some(error);
        self.publish();
    }

    pub(crate) fn failure(&self) -> Option<Error> {
        self.state().failed.clone()
    }
}
