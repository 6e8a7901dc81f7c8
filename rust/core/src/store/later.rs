//! [`Later`], the ticket of a push of which a policy holds some slices, usually until other workers push,
//! too. A thread of its own waits for the answers, so that the caller may poll, wait or leave.

use super::places::Places;
use super::settle::Begun;
use crate::base::error::{Error, Kind};
use crate::base::sync::{Arc, Mutex, lock};
use crate::verbs::{Caller, Pushed, Ticket};
use std::sync::Condvar;
use std::time::Duration;

/// Interval at which a caller is asked whether it still waits.
const ASKED: Duration = Duration::from_millis(100);

pub(super) struct Later {
    state: Mutex<LaterState>,
    ended: Condvar,
}

struct LaterState {
    /// The push to wait for, until a thread takes it.
    begun: Option<(Places, Begun)>,
    pushed: Option<Pushed>,
    callbacks: Vec<Box<dyn FnOnce() + Send>>,
}

impl Later {
    /// Starts a thread that waits for the answers and enforces the deadline; waits here if none can be
    /// started.
    pub(super) fn start(places: Places, begun: Begun, timeout: Duration) -> Arc<Self> {
        let state = LaterState { begun: Some((places, begun)), pushed: None, callbacks: Vec::new() };
        let later = Arc::new(Self { state: Mutex::new(state), ended: Condvar::new() });
        let own = later.clone();
        let thread = std::thread::Builder::new().name("fastps-push".to_owned());
        if thread.spawn(move || own.end(timeout)).is_err() {
            later.end(timeout);
        }
        later
    }

    fn end(&self, timeout: Duration) {
        let Some((places, begun)) = lock(&self.state).begun.take() else { return };
        let pushed = begun.end(&places, timeout);
        let mut state = lock(&self.state);
        state.pushed = Some(pushed);
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.ended.notify_all();
        for callback in callbacks {
            callback();
        }
    }

    /// Waits on behalf of a caller that may stop waiting.
    pub(super) fn wait_for(&self, caller: &mut dyn Caller) -> Pushed {
        loop {
            if let Some(pushed) = self.wait(ASKED) {
                return pushed;
            }
            if let Some(at_end) = caller.leaves() {
                self.on_done(at_end);
                return Err(Error::new(Kind::Unavailable, "the caller waits no longer").into());
            }
        }
    }
}

impl Ticket<Pushed> for Later {
    fn is_done(&self) -> bool {
        lock(&self.state).pushed.is_some()
    }

    fn wait(&self, timeout: Duration) -> Option<Pushed> {
        let waits = |state: &mut LaterState| state.pushed.is_none();
        let waited = self.ended.wait_timeout_while(lock(&self.state), timeout, waits);
        // Lock again, because ThreadSanitizer does not see the lock that the wait returns.
        drop(waited);
        lock(&self.state).pushed.clone()
    }

    fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        let mut state = lock(&self.state);
        if state.pushed.is_none() {
            state.callbacks.push(callback);
            return;
        }
        drop(state);
        callback();
    }
}
