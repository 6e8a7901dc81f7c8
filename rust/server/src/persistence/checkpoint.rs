//! Requested snapshots, written one at a time on a blocking thread. Requests that arrive while one waits
//! share it, and the disk rests between two of them, so the work does not grow with the calls.

use crate::persistence::gate::Gate;
use crate::persistence::{Begun, Files};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::Shard;
use fastps_durable::{Cut, Summary};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// Longest rest after a snapshot; a rest takes no longer than the snapshot did.
const MAX_REST: Duration = Duration::from_secs(1);

/// The snapshots that a shard was asked for.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    shard: Arc<Shard>,
    files: Files,
    gate: Arc<Gate>,
    /// Number of snapshots begun.
    begun: AtomicU64,
    /// Locked while a snapshot is written.
    last: Arc<Mutex<Option<Last>>>,
}

/// The last snapshot that was not of a cut.
#[derive(Debug)]
struct Last {
    number: u64,
    result: Result<Summary>,
    rest: Instant,
}

impl Checkpoints {
    pub(crate) fn of(shard: Arc<Shard>, files: Files, gate: Arc<Gate>) -> Arc<Self> {
        Arc::new(Self { shard, files, gate, begun: AtomicU64::new(0), last: Arc::default() })
    }

    /// Writes a snapshot, or waits for one that begins after this call; of a cut, if writes are held for it.
    pub(crate) async fn take(self: &Arc<Self>, cut: Option<Cut>) -> Result<Summary> {
        if cut.as_ref().is_some_and(|cut| !self.gate.holds(cut.id)) {
            return Err(held_too_long());
        }
        let seen = self.begun.load(Ordering::Acquire);
        let mut last = self.last.clone().lock_owned().await;
        if let (None, Some(last)) = (&cut, &*last) {
            if last.number > seen {
                return last.result.clone();
            }
            tokio::time::sleep_until(last.rest.into()).await;
        }
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let this = self.clone();
        // The write continues, and keeps its turn, if its caller leaves.
        let taken = tokio::task::spawn_blocking(move || {
            let begin = Instant::now();
            let Some(cut) = cut else {
                let result = this.files.snapshot(&this.shard, None);
                let rest = Instant::now() + begin.elapsed().min(MAX_REST);
                *last = Some(Last { number, result: result.clone(), rest });
                return result;
            };
            let id = cut.id;
            let begun = || if this.gate.open(id) { Ok(()) } else { Err(held_too_long()) };
            this.files.snapshot(&this.shard, Some((cut, &begun as &Begun<'_>)))
        });
        taken.await.unwrap_or_else(|error| Err(Error::new(Kind::Internal, error.to_string())))
    }
}

/// Error of a cut that came after its hold.
pub(crate) fn held_too_long() -> Error {
    let why = "the cut is void: no writes were held for it any more when it began";
    Error::new(Kind::Deadline, why)
}
