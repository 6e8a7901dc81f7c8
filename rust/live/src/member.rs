//! One logical worker of a run: its client, and where it is in virtual time.

use crate::worker::Worker;

/// One logical worker.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(crate) struct Member {
    /// Its client while it has a place.
    pub(crate) worker: Option<Worker>,
    /// The step that it computes, from 1; 0 before the first.
    pub(crate) step: u64,
    /// Changes when its next arrival is put off or cancelled.
    pub(crate) turn: u64,
    /// When its step began.
    pub(crate) began: f64,
    /// Virtual seconds of each way in its step.
    pub(crate) delay: f64,
    /// When its gradient arrives.
    pub(crate) arrives: f64,
    /// Since when it waits.
    pub(crate) since: Option<f64>,
    /// Whether it waits for the end of a warm start rather than in a step.
    pub(crate) starting: bool,
    /// How long it has waited.
    pub(crate) waited: f64,
    /// Whether it was killed.
    pub(crate) dead: bool,
    /// Since when it is paused or dead.
    pub(crate) silent: f64,
    /// When its pause ends; 0 before the first.
    pub(crate) resumes: f64,
    /// When it first joined.
    pub(crate) born: f64,
    /// When it ended.
    pub(crate) left: Option<f64>,
    /// Whether its next gradient is to be NaN.
    pub(crate) breaks: bool,
    /// Its gradients that were applied.
    pub(crate) applied: u64,
    /// Staleness of its last push.
    pub(crate) staleness: Option<u64>,
    /// Updates of the server when its gradient was applied; 0 if it was not.
    pub(crate) version: u64,
    /// Loss and place of the gradient of its step.
    pub(crate) loss: f64,
    pub(crate) place: [f64; 2],
    /// Whether its last step was refused.
    pub(crate) refused: bool,
}

impl Member {
    /// Ends a wait, if there is one.
    pub(crate) fn waits_no_more(&mut self, now: f64) {
        if let Some(since) = self.since.take() {
            self.waited += now - since;
        }
    }

    /// Whether it is stopped at this moment.
    pub(crate) fn paused(&self, now: f64) -> bool {
        now < self.resumes
    }

    /// Stops it, which puts off its next arrival; false if it is paused for longer already.
    pub(crate) fn put_off(&mut self, now: f64, seconds: f64) -> bool {
        if !self.paused(now) {
            (self.silent, self.resumes) = (now, now);
        }
        let added = now + seconds - self.resumes;
        if added <= 0.0 {
            return false;
        }
        self.resumes += added;
        self.arrives += added;
        self.turn += 1;
        true
    }
}
