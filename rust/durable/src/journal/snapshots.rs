//! Taking snapshots of a running shard, and removing the snapshots and log segments that they replace.

use crate::files::io::failed;
use crate::journal::{Journal, JournalState};
use crate::log::segment::Segment;
use crate::recovery::KeptSnapshots;
use crate::recovery::growth::Growth;
use crate::snapshot::generation::{Generation, Summary};
use crate::snapshot::manifest::Cut;
use crate::snapshot::{self, SnapshotInput};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_core::shard::Shard;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Remove the oldest snapshots while the log of all is longer than this many times the length at which it is
/// too long after one, but keep [`MIN_KEPT_WITH_LOG`].
const MAX_KEPT_LOG_TIMES: u64 = 2;
const MIN_KEPT_WITH_LOG: usize = 2;

/// Why a snapshot is written.
#[derive(Clone, Copy, Debug)]
pub(super) enum SnapshotReason {
    /// On schedule, or on request.
    Requested,
    /// The log is too long.
    LogTooLong,
}

impl Journal {
    pub(super) fn write(
        &self,
        shard: &Shard,
        why: SnapshotReason,
        cut: Option<Cut>,
        begun: &dyn Fn() -> Result<()>,
    ) -> Result<Summary> {
        let mut guard = self.files();
        let Some(files) = guard.as_mut() else {
            return Err(Error::new(Kind::Internal, "the shard is not recovered yet"));
        };
        let of_cut = cut.is_some();
        let written = self.write_into(files, shard, why, cut, begun);
        if of_cut {
            shard.end_cut();
        }
        written
    }

    fn write_into(
        &self,
        files: &mut JournalState,
        shard: &Shard,
        why: SnapshotReason,
        cut: Option<Cut>,
        begun: &dyn Fn() -> Result<()>,
    ) -> Result<Summary> {
        self.ensure_owned(files)?;
        let after_gap = self.log.check().is_err();
        let segment = Segment::create(&self.directory, files.segment, after_gap, files.origin, files.author);
        // A number is used once, even if writing fails.
        let (log, number) = (files.segment, files.generation);
        (files.segment, files.generation) = (log + 1, number + 1);
        let from = self.log.position();
        // If the log breaks at this moment, `switch` fails, and the next segment records the gap.
        let catalog = self.log.switch(segment?, after_gap)?;
        // After the switch, so that the log after the snapshot contains all changes that the cut lacks.
        if let Some(cut) = &cut {
            shard.begin_cut(&cut.group)?;
        }
        begun()?;
        let slice = |id| shard.slice(id).ok();
        let logging = || self.log.pending_bytes() > 0;
        let (origin, author) = (files.origin, files.author);
        let synced = || self.log.synced();
        let input = SnapshotInput {
            slice: &slice,
            catalog,
            origin,
            author,
            log,
            cut,
            synced: &synced,
            logging: &logging,
        };
        let generation = snapshot::write(&self.directory, number, &input, || {
            // After the slices were copied, so that the log reaches every version in them. A broken log
            // cannot be synced.
            let _ = self.log.sync(self.log.position());
        })?;
        reach("snapshot_complete");
        self.log.close_gap();
        files.growth = Growth::after_snapshot(from, generation.summary().bytes);
        let bounds = self.bound(&files.growth);
        self.keep(files, why, number, log, bounds.map(|bounds| bounds.bytes))?;
        Ok(generation.summary())
    }

    /// Keeps a new snapshot, and removes the files that are no longer kept. A log of more than `log_bytes` is
    /// too long.
    fn keep(
        &self,
        files: &mut JournalState,
        why: SnapshotReason,
        number: u64,
        log: u64,
        log_bytes: Option<u64>,
    ) -> Result<()> {
        let most = log_bytes.map_or(u64::MAX, |bytes| bytes.saturating_mul(MAX_KEPT_LOG_TIMES));
        let is_long = matches!(why, SnapshotReason::LogTooLong)
            && self.oldest_may_go(&files.kept)
            && self.log_of(&files.kept)? > most;
        let replaced = match why {
            SnapshotReason::Requested => None,
            SnapshotReason::LogTooLong => files.overgrown.replace(number),
        };
        let replaced =
            replaced.filter(|number| !is_long && files.kept.iter().any(|(kept, _)| kept == number));
        files.kept.retain(|(kept, _)| Some(*kept) != replaced);
        files.kept.push_back((number, log));
        while is_long && files.kept.len() > MIN_KEPT_WITH_LOG && self.oldest_may_go(&files.kept) {
            files.kept.pop_front();
            if self.log_of(&files.kept)? <= most {
                break;
            }
        }
        while files.kept.len() > self.settings.keep.max(1) && !self.oldest_is_young(&files.kept) {
            files.kept.pop_front();
        }
        if let Some(replaced) = replaced {
            self.directory.discard(replaced)?;
        }
        self.prune(files)
    }

    /// Returns whether the oldest snapshot may be removed to shorten the log: neither a cut nor a young one
    /// may.
    fn oldest_may_go(&self, kept: &KeptSnapshots) -> bool {
        let is_cut = |number| {
            Generation::open(self.directory.path(), number)
                .is_ok_and(|generation| generation.manifest.cut.is_some())
        };
        kept.front().is_some_and(|(number, _)| !is_cut(*number)) && !self.oldest_is_young(kept)
    }

    /// Bytes of the log that these snapshots need.
    fn log_of(&self, kept: &KeptSnapshots) -> Result<u64> {
        let Some((_, first)) = kept.front() else { return Ok(0) };
        let needed = self.directory.segments()?.into_iter().filter(|number| number >= first);
        let length = |number| std::fs::metadata(self.directory.segment(number)).map_or(0, |file| file.len());
        Ok(needed.map(length).sum())
    }

    /// Checks that the directory still belongs to this server: it may have been removed and recreated.
    /// Otherwise nothing counts as durable until it does again.
    fn ensure_owned(&self, files: &JournalState) -> Result<()> {
        let lock = self.directory.lock();
        if let Err(lost) = lock.check() {
            // An idle log has not noticed the loss. With the lock retaken, it would take the new directory's
            // files for its own.
            self.log.give_up(&failed("write", self.directory.path(), &lost));
        }
        let held = lock.retake(|| files.lineage.check(&self.directory));
        if let Err(error) = &held
            && (lock.check().is_err() || error.kind == Kind::Config)
        {
            self.log.give_up(error);
        }
        held
    }

    /// Returns whether the oldest snapshot must be kept because of its age. One that is unreadable or from
    /// the future has no age.
    fn oldest_is_young(&self, kept: &KeptSnapshots) -> bool {
        let age = |number| {
            let written = Generation::open_head(self.directory.path(), number).ok()?.manifest.written;
            SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_secs(written)).ok()
        };
        let keep_for = self.settings.keep_for;
        let oldest = kept.front().filter(|_| !keep_for.is_zero());
        oldest.and_then(|(number, _)| age(*number)).is_some_and(|age| age < keep_for)
    }

    /// Removes snapshots and segments that no kept snapshot needs; the newest snapshot is durable.
    fn prune(&self, files: &JournalState) -> Result<()> {
        let Some((oldest, log)) = files.kept.front() else { return Ok(()) };
        for number in self.directory.generations()?.into_iter().filter(|number| number < oldest) {
            self.directory.discard(number)?;
        }
        for number in self.directory.segments()?.into_iter().filter(|number| number < log) {
            self.directory.discard_segment(number)?;
        }
        Ok(())
    }
}
