//! What became of a push: the answers of its slices become receipts, or say what failed.

use super::Store;
use super::places::Places;
use crate::error::{Kind, Result};
use crate::frame::{Applied, Identity};
use crate::held::{HeldDoubt, Residue};
use crate::outcome::{Collect, Outcomes};
use crate::sync::{Arc, Ordering};
use crate::verbs::{Pushed, Receipt};
use std::collections::HashMap;
use std::time::Duration;

/// What became of each slice, in the order of [`Places::parts`]; nothing yet of those that a policy holds.
pub(super) type Answers = Vec<Option<Result<Applied>>>;

/// What a push that a policy holds waits for, and what it must not lose.
pub(super) struct Held {
    pub(super) late: Option<Arc<Collect>>,
    pub(super) residues: Vec<(usize, Residue)>,
}

impl Store {
    /// Waits for what a policy holds and makes receipts of all answers; `sent`: bytes of the k-th tensor.
    pub(super) fn settle(
        &self,
        places: &Places,
        mut results: Answers,
        held: Held,
        identity: Identity,
        timeout: Duration,
        sent: impl Fn(usize) -> u64,
    ) -> Pushed {
        let mut residues: HashMap<usize, Residue> = held.residues.into_iter().collect();
        for (part, result) in held.late.map(|late| late.wait(timeout)).unwrap_or_default() {
            if let (Some(residue), Err(error)) = (residues.remove(&part), &result)
                && error.kind != Kind::StalePush
            {
                residue.give_back()?;
            }
            results[part] = Some(result);
        }
        if let Some(receipts) = receipts(places, &results, &sent) {
            self.count(receipts.iter().map(|receipt| receipt.bytes).sum(), places.bytes);
            return Ok(receipts);
        }
        let sent: Vec<_> = (0..places.tensors.len()).map(sent).collect();
        self.count(sent.iter().sum(), places.bytes);
        let mut outcome = Outcomes::default();
        for (part, ((k, slice), result)) in places.parts().zip(results).enumerate() {
            let name = slice.spec().name.clone();
            match result {
                Some(Ok(applied)) => outcome.applied.push((k, slice.range(), applied)),
                Some(Err(error)) => outcome.refused.push((name, slice.range(), error)),
                None => {
                    let doubt = HeldDoubt::new(slice.clone(), identity, residues.remove(&part));
                    outcome.in_doubt.push(Arc::new(doubt));
                }
            }
        }
        outcome.into_pushed(&|k| places.tensors[k].spec.name.clone(), &sent)
    }

    /// Counts a push of so many bytes, which would be so many uncompressed.
    fn count(&self, bytes: u64, plain: u64) {
        self.bytes_pushed.fetch_add(bytes, Ordering::Relaxed);
        self.bytes_saved.fetch_add(plain.saturating_sub(bytes), Ordering::Relaxed);
        self.pushed.fetch_add(1, Ordering::Relaxed);
    }
}

/// The receipts of all tensors, if every slice applied its part; `sent`: bytes of the k-th tensor.
fn receipts(
    places: &Places,
    results: &[Option<Result<Applied>>],
    sent: impl Fn(usize) -> u64,
) -> Option<Vec<Receipt>> {
    let mut results = results.iter();
    let mut receipts = Vec::with_capacity(places.tensors.len());
    for (k, tensor) in places.tensors.iter().enumerate() {
        let mut receipt = Receipt::of_nothing(sent(k));
        let slices = places.rows(k).map_or(tensor.slices.len(), |rows| rows.plan.parts().len());
        for result in results.by_ref().take(slices) {
            let Some(Ok(applied)) = result else { return None };
            receipt.add(applied);
        }
        receipts.push(receipt.done());
    }
    Some(receipts)
}
