//! Makes receipts of a push's outcomes, or tells what is known of each slice.

use crate::link::call::{Call, CallPart, Outcome};
use crate::state::shared::Shared;
use fastps_core::error::{Error, Kind};
use fastps_core::verbs::{InDoubt, PartialPush, PushError, Pushed, Receipt, Ticket};
use fastps_transport::convert::{Retry, retry};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Sorts the outcomes of a push that is done; one receipt per tensor, or what went wrong.
pub(crate) fn pushed(client: &Shared, call: &Call, tensors: usize) -> Pushed {
    let outcomes = call.outcomes();
    let mut whole = vec![true; tensors];
    let mut bytes = vec![0; tensors];
    let mut refused = Vec::new();
    let mut in_doubt: Vec<Arc<dyn InDoubt>> = Vec::new();
    let mut doubt_error = None;
    for (part, outcome) in &outcomes {
        bytes[part.tensor] += part.sent_bytes as u64;
        match outcome {
            Outcome::Answered(_) => continue,
            Outcome::Failed(error) => {
                if retry(error.kind) == Retry::Map {
                    client.map_is_stale.store(true, Ordering::Release);
                }
                refused.push((part.name.clone(), part.elements.clone(), error.clone()));
            }
            Outcome::InDoubt(doubt) => {
                doubt_error.get_or_insert_with(|| part.refused(doubt.error()));
                in_doubt.push(doubt.clone());
            }
            Outcome::Open => {
                refused.push((
                    part.name.clone(),
                    part.elements.clone(),
                    Error::new(Kind::Internal, "a slice was lost"),
                ));
            }
        }
        whole[part.tensor] = false;
    }
    let applied = |outcome: &Outcome| match outcome {
        Outcome::Answered(answer) => Some(answer.applied),
        _ => None,
    };
    let receipt = |tensor: usize| {
        let slices = outcomes.iter().filter(|(part, _)| part.tensor == tensor);
        Receipt::merge(slices.filter_map(|(_, outcome)| applied(outcome)), bytes[tensor])
    };
    let error = match (refused.first(), doubt_error) {
        (None, None) => return Ok(receipts(&outcomes, &bytes)),
        (Some((_, _, error)), _) => error.clone(),
        (None, Some(error)) => error,
    };
    if in_doubt.is_empty() && !outcomes.iter().any(|(_, outcome)| applied(outcome).is_some()) {
        return Err(PushError::Refused(error));
    }
    let name = |tensor: usize| {
        outcomes.iter().find(|(part, _)| part.tensor == tensor).map(|(part, _)| part.name.clone())
    };
    let receipts = (0..tensors).filter(|t| whole[*t]).filter_map(|t| Some((name(t)?, receipt(t)))).collect();
    let torn = outcomes.iter().filter(|(part, _)| !whole[part.tensor]);
    let applied =
        torn.filter_map(|(part, o)| Some((part.name.clone(), part.elements.clone(), applied(o)?))).collect();
    Err(PushError::Partial(Box::new(PartialPush { error, receipts, refused, applied, in_doubt })))
}

/// The receipts of a push whose parts were all applied.
fn receipts(outcomes: &[(&CallPart, Outcome)], bytes: &[u64]) -> Vec<Receipt> {
    let mut receipts: Vec<_> = bytes.iter().map(|bytes| Receipt::of_nothing(*bytes)).collect();
    for (part, outcome) in outcomes {
        if let Outcome::Answered(answer) = outcome {
            receipts[part.tensor].add(&answer.applied);
        }
    }
    receipts.into_iter().map(Receipt::done).collect()
}

/// A push under way.
#[derive(Debug)]
pub(crate) struct PushTicket {
    pub(crate) shared: Arc<Shared>,
    pub(crate) call: Arc<Call>,
    pub(crate) tensors: usize,
}

impl Ticket<Pushed> for PushTicket {
    fn is_done(&self) -> bool {
        self.call.is_done()
    }

    fn wait(&self, timeout: Duration) -> Option<Pushed> {
        match self.call.wait(timeout, None) {
            Ok(true) => Some(pushed(&self.shared, &self.call, self.tensors)),
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
