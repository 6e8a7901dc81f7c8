//! Settles a push: waits for the answers of its slices, and turns them into receipts or an error that says
//! what failed.

use super::Store;
use super::places::Places;
use crate::base::error::Result;
use crate::base::sync::{Arc, Ordering};
use crate::push::held::HeldDoubt;
use crate::push::outcome::{Collect, Outcomes, receipts};
use crate::push::residue::Residue;
use crate::slice::frame::{Applied, Identity};
use crate::verbs::Pushed;
use std::collections::HashMap;
use std::time::Duration;

/// The answer of each slice, in the order of [`Places::parts`]; `None` for slices whose push a policy holds.
pub(super) type Answers = Vec<Option<Result<Applied>>>;

/// Encoded bodies of slices whose push a policy holds, by their index in [`Places::parts`]; their content
/// must not be lost.
pub(super) type Residues = Vec<(usize, Residue<Vec<u8>>)>;

/// A push that all of its slices have got.
pub(super) struct Begun {
    pub(super) identity: Identity,
    pub(super) answers: Answers,
    /// Collects the answers of slices whose push a policy holds.
    pub(super) late: Option<Arc<Collect>>,
    pub(super) residues: Residues,
    /// Bytes sent for each tensor; `None`: those of its values.
    pub(super) sent: Option<Vec<u64>>,
}

impl Begun {
    /// Bytes sent for the k-th tensor.
    fn sent(&self, places: &Places, k: usize) -> u64 {
        self.sent.as_ref().map_or_else(|| places.tensors[k].bytes(), |sent| sent[k])
    }

    /// Waits for the slices whose push a policy holds, and makes receipts of all answers.
    pub(super) fn end(mut self, places: &Places, timeout: Duration) -> Pushed {
        let mut residues: HashMap<usize, Residue<Vec<u8>>> =
            std::mem::take(&mut self.residues).into_iter().collect();
        for (part, result) in self.late.take().map(|late| late.wait(timeout)).unwrap_or_default() {
            if let (Some(residue), Err(error)) = (residues.remove(&part), &result) {
                residue.refused(error.kind)?;
            }
            self.answers[part] = Some(result);
        }
        let slices =
            |k| places.rows(k).map_or(places.tensors[k].slices.len(), |rows| rows.plan.parts().len());
        let tensors = (0..places.tensors.len()).map(|k| (self.sent(places, k), slices(k)));
        let answers = self.answers.iter().map(|answer| answer.as_ref()?.as_ref().ok());
        if let Some(receipts) = receipts(tensors, answers) {
            return Ok(receipts);
        }
        let sent: Vec<_> = (0..places.tensors.len()).map(|k| self.sent(places, k)).collect();
        let mut outcome = Outcomes::default();
        for (part, ((k, slice), result)) in places.parts().zip(self.answers).enumerate() {
            match result {
                Some(Ok(applied)) => outcome.applied.push((k, slice.range(), applied)),
                Some(Err(error)) => outcome.refused.push((k, slice.range(), error)),
                None => {
                    let doubt = HeldDoubt::new(slice.clone(), self.identity, residues.remove(&part));
                    outcome.in_doubt.push((k, Arc::new(doubt)));
                }
            }
        }
        outcome.into_pushed(&|k| places.tensors[k].spec.name.clone(), &sent)
    }
}

impl Store {
    /// Counts the push, and ends it as [`Begun::end`] does.
    pub(super) fn settle(&self, places: &Places, begun: Begun, timeout: Duration) -> Pushed {
        self.count(places, &begun);
        begun.end(places, timeout)
    }

    pub(super) fn count(&self, places: &Places, begun: &Begun) {
        let bytes = begun.sent.as_ref().map_or(places.bytes, |sent| sent.iter().sum());
        self.bytes_pushed.fetch_add(bytes, Ordering::Relaxed);
        self.bytes_saved.fetch_add(places.bytes.saturating_sub(bytes), Ordering::Relaxed);
        self.pushed.fetch_add(1, Ordering::Relaxed);
    }
}
