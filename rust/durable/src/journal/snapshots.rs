//! Taking snapshots of a running shard, and removing the snapshots and log segments that they replace.

use crate::files::io::failed;
use crate::frame::Content;
use crate::journal::{Journal, JournalState, Span};
use crate::log::read::read;
use crate::log::segment::Segment;
use crate::recovery::KeptSnapshots;
use crate::recovery::growth::Growth;
use crate::snapshot::generation::{Generation, Summary};
use crate::snapshot::manifest::Cut;
use crate::snapshot::{self, SnapshotInput};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_core::shard::Shard;
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Remove the oldest snapshots while the log of all is longer than this many times the length at which it is
/// too long after one, but keep [`MIN_KEPT_WITH_LOG`].
const MAX_KEPT_LOG_TIMES: u64 = 2;
pub(super) const MIN_KEPT_WITH_LOG: usize = 2;
/// In history, a snapshot is worth its bytes where the log since the one before is this many times as long.
const HISTORY_LOG_TIMES: u64 = 10;

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
        self.make_room(files)?;
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

    /// Gives up history, the oldest first, while the disk is nearly full or did not take the log: training
    /// goes on for longer than history is kept.
    fn make_room(&self, files: &mut JournalState) -> Result<()> {
        if self.settings.history == 0 {
            return Ok(());
        }
        let state = files.growth.state.unwrap_or(0).max(self.log.catalog_bytes());
        let log =
            self.bound(&files.growth).map_or(state, |bounds| bounds.limit.saturating_sub(files.growth.from));
        let needed = state.saturating_mul(2).saturating_add(log);
        let is_short = || {
            let space = rustix::fs::statvfs(self.directory.path());
            space.is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) < needed)
        };
        while files.kept.len() > self.settings.keep.max(1) && (self.log.check().is_err() || is_short()) {
            files.kept.pop_front();
            self.prune(files)?;
        }
        Ok(())
    }

    /// Keeps a new snapshot and as much history as the settings allow.
    fn keep_history(&self, files: &mut JournalState, number: u64, log: u64) -> Result<()> {
        files.kept.push_back((number, log));
        let kept = self.thin_history(files);
        self.measure_history(&files.kept);
        kept
    }

    /// Notes how much history is kept, and since when.
    pub(super) fn measure_history(&self, kept: &KeptSnapshots) {
        if !self.keeps_history() {
            return;
        }
        let heads =
            kept.iter().filter_map(|(number, _)| Generation::open_head(self.directory.path(), *number).ok());
        let snapshots: u64 = heads.map(|generation| generation.summary().bytes).sum();
        let bytes = self.log_of(kept).unwrap_or(0) + snapshots;
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let since = kept.front().and_then(|oldest| self.began(*oldest)).unwrap_or_else(now);
        *self.history() = Span { bytes, since, position: self.log.position() };
    }

    /// When the oldest kept snapshot was written, or the log without one before it was begun, in seconds since
    /// 1970.
    fn began(&self, (number, segment): (u64, u64)) -> Option<u64> {
        if let Ok(oldest) = Generation::open_head(self.directory.path(), number) {
            return Some(oldest.manifest.written);
        }
        let mut first = None;
        let find = |_, content: Content<'_>| {
            first = if let Content::Time(time) = content { Some(time / 1000) } else { None };
            Ok(if first.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        read(&self.directory.segment(segment), segment, None, find).ok()?;
        first
    }

    /// Of the older snapshots, removes those that the log between them does not outweigh, and the oldest ones
    /// beyond the size of the history.
    fn thin_history(&self, files: &mut JournalState) -> Result<()> {
        let lengths = self.segment_lengths()?;
        let least = self.settings.keep.max(MIN_KEPT_WITH_LOG);
        let (mut at, mut sizes) = (0, VecDeque::new());
        while let Some((number, first)) = files.kept.get(at).copied() {
            let head = Generation::open_head(self.directory.path(), number);
            let bytes = head.as_ref().map_or(0, |generation| generation.summary().bytes);
            let is_asked_for = head.is_ok_and(|generation| generation.manifest.cut.is_some());
            let before = at.checked_sub(1).and_then(|before| files.kept.get(before));
            let replayed = before
                .map(|(_, before)| lengths.range(before..&first).map(|(_, length)| length).sum::<u64>());
            let is_thin = replayed.is_some_and(|log| log < bytes.saturating_mul(HISTORY_LOG_TIMES));
            if is_thin && !is_asked_for && at + least < files.kept.len() {
                files.kept.remove(at);
                reach("history_thinned");
                self.directory.discard(number)?;
            } else {
                sizes.push_back(bytes);
                at += 1;
            }
        }
        let log_of = |kept: &KeptSnapshots| {
            kept.front().map_or(0, |(_, first)| lengths.range(first..).map(|(_, length)| length).sum::<u64>())
        };
        while files.kept.len() > self.settings.keep.max(1)
            && log_of(&files.kept) + sizes.iter().sum::<u64>() > self.settings.history
            && !self.oldest_is_young(&files.kept)
        {
            files.kept.pop_front();
            sizes.pop_front();
        }
        reach("history_shortened");
        self.prune(files)
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
        if self.settings.history > 0 {
            return self.keep_history(files, number, log);
        }
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
        Ok(self.segment_lengths()?.range(first..).map(|(_, length)| length).sum())
    }

    fn segment_lengths(&self) -> Result<BTreeMap<u64, u64>> {
        let length = |number| std::fs::metadata(self.directory.segment(number)).map_or(0, |file| file.len());
        Ok(self.directory.segments()?.into_iter().map(|number| (number, length(number))).collect())
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
