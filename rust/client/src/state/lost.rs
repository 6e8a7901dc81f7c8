//! Acknowledged changes that a restarted server lacks: found by asking, reported once.
//!
//! A link keeps the newest version in an answer about each slice. When it meets another server than before,
//! it asks for the version of each of these slices and sends nothing else until it knows. So frames that it
//! sends again do not count, and the numbers are exact.

use crate::state::map::Map;
use crate::state::runtime::lock;
use crate::state::stats::{self, Counters};
use fastps_core::error::{Error, Kind, Lost, Result};
use fastps_core::fault::fault;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Most tensors that an error names.
const MAX_NAMED_TENSORS: usize = 5;

/// Changes that a slice lacks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostSlice {
    pub(crate) shard: u32,
    pub(crate) slice: u64,
    pub(crate) own: Option<u64>,
    pub(crate) seen: u64,
    pub(crate) now: u64,
}

/// Losses that were found and not reported yet.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    found: Mutex<Vec<Lost>>,
    any: AtomicBool,
    /// Set once the user asks for losses, so that calls raise nothing.
    asked_for: AtomicBool,
}

impl Losses {
    /// Records the losses of one restart, for the next call to report. Losses of later restarts are recorded
    /// beside them, so that they add up.
    pub(crate) fn note(&self, lost: Vec<LostSlice>, map: &Map, counters: &Counters) {
        let lost = by_tensor(lost, map);
        for one in &lost {
            stats::count(&counters.pushes_lost, one.own.unwrap_or(0));
        }
        if fault("loss_swallowed") {
            return;
        }
        lock(&self.found).extend(lost);
        self.any.store(true, Ordering::Release);
    }

    /// Fails once if anything was lost. The failing call has done nothing yet.
    pub(crate) fn raise(&self) -> Result<()> {
        if !self.any() || self.asked_for.load(Ordering::Relaxed) {
            return Ok(());
        }
        let lost = self.take();
        if lost.is_empty() { Ok(()) } else { Err(error(lost)) }
    }

    /// Takes the unreported losses; calls raise nothing from here on.
    pub(crate) fn ask(&self) -> Vec<Lost> {
        self.asked_for.store(true, Ordering::Relaxed);
        self.take()
    }

    /// Returns whether there are unreported losses.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    fn take(&self) -> Vec<Lost> {
        let mut found = lock(&self.found);
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut *found)
    }
}

/// The slice of each tensor that lost most.
fn by_tensor(slices: Vec<LostSlice>, map: &Map) -> Vec<Lost> {
    let names = map.names_of_slices();
    let mut lost: BTreeMap<(Arc<str>, u32), Lost> = BTreeMap::new();
    for LostSlice { shard, slice, own, seen, now } in slices {
        let tensor = names.get(&slice).cloned().unwrap_or_else(|| format!("slice {slice}").into());
        let one = Lost { tensor: tensor.clone(), shard, own, seen, now };
        let of = |lost: &Lost| (lost.own, lost.seen.saturating_sub(lost.now));
        let most = lost.entry((tensor, shard)).or_insert_with(|| one.clone());
        if of(&one) > of(most) {
            *most = one;
        }
    }
    lost.into_values().collect()
}

fn error(lost: Vec<Lost>) -> Error {
    let mut message = "a server restarted without changes that it had acknowledged: ".to_owned();
    let named: Vec<_> = lost.iter().take(MAX_NAMED_TENSORS).map(ToString::to_string).collect();
    message.push_str(&named.join("; "));
    if lost.len() > MAX_NAMED_TENSORS {
        message = format!("{message}; and {} more", lost.len() - MAX_NAMED_TENSORS);
    }
    message.push_str(". This is reported once; training can continue from here");
    let mut error = Error::new(Kind::VersionsLost, message);
    error.lost = lost;
    error
}
