//! Writing snapshots of a journal, and removing what they make needless.

use crate::files::io::failed;
use crate::journal::{Files, Journal};
use crate::log::segment::Segment;
use crate::recovery::Kept;
use crate::recovery::growth::Growth;
use crate::snapshot::generation::{Generation, Summary};
use crate::snapshot::manifest::Cut;
use crate::snapshot::{self, Subject};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_core::shard::Shard;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Why a snapshot is written.
#[derive(Clone, Copy, Debug)]
pub(super) enum Why {
    /// It is time, or somebody wants it.
    Asked,
    /// The log is long.
    Overgrown,
}

impl Journal {
    pub(super) fn write(
        &self,
        shard: &Shard,
        why: Why,
        cut: Option<Cut>,
        begun: &dyn Fn() -> Result<()>,
    ) -> Result<Summary> {
        let mut guard = self.files();
        let Some(files) = guard.as_mut() else {
            return Err(Error::new(Kind::Internal, "the shard was not recovered yet"));
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
        files: &mut Files,
        shard: &Shard,
        why: Why,
        cut: Option<Cut>,
        begun: &dyn Fn() -> Result<()>,
    ) -> Result<Summary> {
        self.hold(files)?;
        let after_hole = self.log.check().is_err();
        let segment = Segment::create(&self.directory, files.segment, after_hole, files.origin, files.author);
        // A number is used once, whatever became of it.
        let (log, number) = (files.segment, files.generation);
        (files.segment, files.generation) = (log + 1, number + 1);
        let from = self.log.position();
        // If the log breaks just now, the next one is told of it, and says so in its segment.
        let catalog = self.log.switch(segment?, after_hole)?;
        // Behind the switch, so that the log behind the snapshot has all that the cut has not.
        if let Some(cut) = &cut {
            shard.begin_cut(&cut.group)?;
        }
        begun()?;
        let slice = |id| shard.slice(id).ok();
        let logging = || self.log.pending() > 0;
        let (origin, author) = (files.origin, files.author);
        let synced = || self.log.synced();
        let subject =
            Subject { slice: &slice, catalog, origin, author, log, cut, synced: &synced, logging: &logging };
        let generation = snapshot::write(&self.directory, number, &subject, || {
            // Behind the images, so that the log reaches every version in them. One that is broken cannot.
            let _ = self.log.sync(self.log.position());
        })?;
        reach("snapshot_complete");
        self.log.heal();
        let replaced = match why {
            Why::Asked => None,
            Why::Overgrown => files.overgrown.replace(number),
        };
        let replaced = replaced.filter(|number| files.kept.iter().any(|(kept, _)| kept == number));
        files.kept.retain(|(kept, _)| Some(*kept) != replaced);
        files.kept.push_back((number, log));
        files.growth = Growth::behind(from, generation.summary().bytes);
        while files.kept.len() > self.settings.keep.max(1) && !self.oldest_is_young(&files.kept) {
            files.kept.pop_front();
        }
        if let Some(replaced) = replaced {
            self.directory.discard(replaced)?;
        }
        self.prune(files)?;
        Ok(generation.summary())
    }

    /// Makes sure that the directory is still this server's, and its alone: it may have been removed and made again. Where it
    /// is not, nothing counts as durable any more, until it is.
    fn hold(&self, files: &Files) -> Result<()> {
        let lock = self.directory.lock();
        if let Err(lost) = lock.check() {
            // An idle log has not missed it. Once the lock is taken again, it would take the files of the old folder for those
            // of the new one.
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

    /// Whether the oldest is to be kept for its age. One that cannot be read has none, nor has one from the future.
    fn oldest_is_young(&self, kept: &Kept) -> bool {
        let age = |number| {
            let written = Generation::open(self.directory.path(), number).ok()?.summary().written;
            SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_secs(written)).ok()
        };
        let keep_for = self.settings.keep_for;
        let oldest = kept.front().filter(|_| !keep_for.is_zero());
        oldest.and_then(|(number, _)| age(*number)).is_some_and(|age| age < keep_for)
    }

    /// Removes what no kept generation needs; the newest is durable.
    fn prune(&self, files: &Files) -> Result<()> {
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
