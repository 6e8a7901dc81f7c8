//! [`Later`], the ticket of a push of which a policy holds some slices, usually until other workers push,
//! too. The caller may poll, wait or leave; it needs no separate thread.

use super::deadlines::{Deadlines, HeldPush};
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
    changed: Condvar,
}

struct LaterState {
    /// The push, until a thread ends it.
    begun: Option<(Places, Begun)>,
    /// Set once all answers have arrived.
    complete: bool,
    pushed: Option<Pushed>,
    callbacks: Vec<Box<dyn FnOnce() + Send>>,
}

impl LaterState {
    /// Returns whether a thread that waits has nothing to do yet.
    fn waits(&self) -> bool {
        self.pushed.is_none() && !(self.complete && self.begun.is_some())
    }
}

impl Later {
    /// Lets the push continue until its answers have arrived or the deadline has passed; waits here if no
    /// thread can be started for deadlines.
    pub(super) fn start(deadlines: &Deadlines, places: Places, begun: Begun, timeout: Duration) -> Arc<Self> {
        let answers = begun.late.clone();
        let state =
            LaterState { begun: Some((places, begun)), complete: false, pushed: None, callbacks: Vec::new() };
        let later = Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() });
        let (own, pushes) = (later.clone(), deadlines.pushes().clone());
        let complete = move || {
            lock(&own.state).complete = true;
            own.changed.notify_all();
            pushes.note_complete(own);
        };
        match answers {
            Some(answers) => answers.when_complete(Box::new(complete)),
            None => complete(),
        }
        if !deadlines.keep(later.clone(), timeout) {
            drop(later.wait(timeout));
            later.end();
        }
        later
    }

    /// Waits on behalf of a caller that may stop waiting.
    pub(super) fn wait_for(&self, caller: &mut dyn Caller) -> Pushed {
        loop {
            if let Some(pushed) = self.wait(ASKED) {
                return pushed;
            }
            if let Some(at_end) = caller.leaves() {
                self.on_done(at_end);
                return Err(Error::new(Kind::Unavailable, "the caller no longer waits").into());
            }
        }
    }
}

impl HeldPush for Later {
    fn is_complete(&self) -> bool {
        lock(&self.state).complete
    }

    fn is_ended(&self) -> bool {
        lock(&self.state).pushed.is_some()
    }

    fn end(&self) {
        let Some((places, begun)) = lock(&self.state).begun.take() else { return };
        let pushed = begun.end(&places, Duration::ZERO);
        let mut state = lock(&self.state);
        state.pushed = Some(pushed);
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.changed.notify_all();
        for callback in callbacks {
            callback();
        }
    }
}

impl Ticket<Pushed> for Later {
    fn is_done(&self) -> bool {
        let state = lock(&self.state);
        state.complete || state.pushed.is_some()
    }

    fn wait(&self, timeout: Duration) -> Option<Pushed> {
        let waited = self.changed.wait_timeout_while(lock(&self.state), timeout, |state| state.waits());
        // Lock again, because ThreadSanitizer does not see the lock that the wait returns.
        drop(waited);
        if lock(&self.state).complete {
            self.end();
        }
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
