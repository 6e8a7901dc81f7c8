//! Sorts the answers of a push, from which the core makes receipts or an error.

use crate::link::call::{Call, Outcome};
use crate::link::wait::CallHandle;
use crate::state::shared::Shared;
use fastps_core::error::{Error, Kind};
use fastps_core::outcome::Outcomes;
use fastps_core::verbs::{Gradient, PushError, Pushed, Ticket};
use fastps_transport::convert::{Retry, retry};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Sorts the answers of a completed push: one receipt per tensor, or the failure.
pub(crate) fn pushed(client: &Shared, call: &Call, names: &[Arc<str>]) -> Pushed {
    let mut outcomes = Outcomes::default();
    let mut bytes = vec![0; names.len()];
    for (part, outcome) in call.outcomes() {
        let (tensor, elements) = (part.tensor, part.elements.clone());
        bytes[tensor] += part.sent_bytes as u64;
        match outcome {
            Outcome::Answered(answer) => outcomes.applied.push((tensor, elements, answer.applied)),
            Outcome::Failed(error) => {
                if retry(error.kind) == Retry::Map {
                    client.map_is_stale.store(true, Ordering::Release);
                }
                outcomes.refused.push((tensor, elements, error));
            }
            Outcome::InDoubt(doubt) => {
                outcomes.why_in_doubt.get_or_insert_with(|| part.refused(doubt.error()));
                outcomes.in_doubt.push((tensor, doubt));
            }
            Outcome::Open => {
                let error = Error::new(Kind::Internal, "a slice was lost");
                outcomes.refused.push((tensor, elements, error));
            }
        }
    }
    outcomes.into_pushed(&|tensor| names[tensor].clone(), &bytes)
}

/// The names of these gradients.
pub(crate) fn names(gradients: &[Gradient]) -> Vec<Arc<str>> {
    gradients.iter().map(|gradient| gradient.name.clone()).collect()
}

/// A push under way.
#[derive(Debug)]
pub(crate) struct PushTicket {
    pub(crate) shared: Arc<Shared>,
    pub(crate) call: CallHandle,
    pub(crate) names: Vec<Arc<str>>,
}

impl Ticket<Pushed> for PushTicket {
    fn is_done(&self) -> bool {
        self.call.is_done()
    }

    fn wait(&self, timeout: Duration) -> Option<Pushed> {
        match self.call.wait(timeout, None) {
            Ok(true) => Some(pushed(&self.shared, &self.call, &self.names)),
            Ok(false) => None,
            Err(error) => Some(Err(error.into())),
        }
    }

    fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        self.call.on_done(callback);
    }
}

/// The error of a push, without the outcomes of its parts.
pub(crate) fn plain(error: PushError) -> Error {
    match error {
        PushError::Refused(error) => error,
        PushError::Partial(partial) => partial.error,
    }
}
