//! One logical worker of a run: its client, and its state in virtual time.

use crate::worker::Worker;

/// One logical worker.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is an independent fact")]
pub(crate) struct Member {
    /// Its client while it has a place.
    pub(crate) worker: Option<Worker>,
    /// The step that it computes, from 1; 0 before the first.
    pub(crate) step: u64,
    /// Changes when its next arrival is delayed or cancelled.
    pub(crate) turn: u64,
    /// Time at which its step began.
    pub(crate) began: f64,
    /// Virtual seconds of each way in its step.
    pub(crate) delay: f64,
    /// Time at which its gradient arrives.
    pub(crate) arrives: f64,
    /// Start of its wait.
    pub(crate) since: Option<f64>,
    /// Set while it waits for the end of a warm start rather than in a step.
    pub(crate) starting: bool,
    /// Total time of its waits.
    pub(crate) waited: f64,
    /// Set once it was killed.
    pub(crate) dead: bool,
    /// Time of its pause or death.
    pub(crate) silent: f64,
    /// End of its pause; 0 before the first.
    pub(crate) resumes: f64,
    /// Time at which it first joined.
    pub(crate) born: f64,
    /// Time at which it ended.
    pub(crate) left: Option<f64>,
    /// Set when its next gradient is to be NaN.
    pub(crate) breaks: bool,
    /// Number of its gradients that were applied.
    pub(crate) applied: u64,
    /// Staleness of its last push.
    pub(crate) staleness: Option<u64>,
    /// Updates of the server when its gradient was applied; 0 if not applied.
    pub(crate) version: u64,
    /// Loss and place of the gradient of its step.
    pub(crate) loss: f64,
    pub(crate) place: [f64; 2],
    /// Set when its last step was refused.
    pub(crate) refused: bool,
}

impl Member {
    /// Ends a wait, if there is one.
    pub(crate) fn waits_no_more(&mut self, now: f64) {
        if let Some(since) = self.since.take() {
            self.waited += now - since;
        }
    }

    /// Returns whether it is stopped at this moment.
    pub(crate) fn paused(&self, now: f64) -> bool {
        now < self.resumes
    }

    /// Pauses it, which delays its next arrival; false if it is paused for longer already.
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
