//! A push of which a policy holds something back, mostly until other workers push, too: what its caller has
//! of it meanwhile.

use super::places::Places;
use super::settle::Begun;
use crate::base::error::{Error, Kind};
use crate::base::sync::{Arc, Mutex, lock};
use crate::verbs::{Caller, Pushed, Ticket};
use std::sync::Condvar;
use std::time::Duration;

/// How often a caller is asked whether it still waits.
const ASKED: Duration = Duration::from_millis(100);

pub(super) struct Later {
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    /// What is waited for, until somebody does.
    begun: Option<(Places, Begun)>,
    pushed: Option<Pushed>,
    callbacks: Vec<Box<dyn FnOnce() + Send>>,
}

impl Later {
    /// Waits in a thread of its own, which keeps the deadline, too.
    pub(super) fn start(places: Places, begun: Begun, timeout: Duration) -> Arc<Self> {
        let state = State { begun: Some((places, begun)), pushed: None, callbacks: Vec::new() };
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

    /// Waits for a caller that may leave.
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
        let waits = |state: &mut State| state.pushed.is_none();
        let waited = self.ended.wait_timeout_while(lock(&self.state), timeout, waits);
        // Locked anew, where ThreadSanitizer sees it.
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
