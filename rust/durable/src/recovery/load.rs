//! Loading the newest whole snapshot, and looking whose files are there.

use crate::files::damage::Unusable;
use crate::frame::Origin;
use crate::log::scan::count_pushes;
use crate::recovery::history::{self, History, Name};
use crate::recovery::report::Kept;
use crate::recovery::settings::Settings;
use crate::recovery::{Recovery, fork};
use crate::snapshot::generation::Generation;
use crate::snapshot::manifest::Manifest;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::identity::Remembered;
use fastps_core::tensor::SliceId;
use std::sync::atomic::Ordering;

impl Recovery<'_> {
    /// Loads the newest generation that is whole. Gives the whole ones: it and older ones.
    pub(super) fn load(&mut self, numbers: &[u64]) -> Result<Kept> {
        let (mut kept, mut damaged, mut manifests) = (Kept::new(), Vec::new(), Vec::new());
        for number in numbers.iter().rev() {
            let opened = Generation::open(self.directory.path(), *number);
            // Older ones are opened, too, and read when they are needed.
            let whole = match opened {
                Ok(generation) if kept.is_empty() => self.take(&generation).map(|()| generation),
                opened => opened,
            };
            match whole {
                Ok(generation) => {
                    kept.push_front((*number, generation.manifest.log));
                    manifests.push(generation.manifest);
                }
                Err(Unusable::Failed(error)) => return Err(error),
                Err(Unusable::Damaged(why)) => damaged.push((*number, why)),
            }
        }
        let beginning = self.segments.first().map_or(numbers.is_empty(), |first| *first == 1);
        if kept.is_empty() && !beginning {
            let mut why = format!(
                "no snapshot in {} is whole, and the log does not reach back to the beginning: restore the directory from a backup",
                self.directory.path().display()
            );
            for (_, damage) in damaged {
                why = format!("{why}; {damage}");
            }
            return Err(Error::new(Kind::Config, why));
        }
        self.renew = !damaged.is_empty();
        self.damaged = damaged;
        self.report.generation = kept.back().map(|(number, _)| *number);
        self.used.generation = self.report.generation;
        self.history = History::read(self.directory, manifests.iter())?;
        self.note_promises(manifests.iter());
        Ok(kept)
    }

    pub(super) fn note_promises<'m>(&mut self, manifests: impl Iterator<Item = &'m Manifest>) {
        for (number, bytes) in manifests.filter_map(|manifest| manifest.durable) {
            let promised = self.promised.entry(number).or_default();
            *promised = bytes.max(*promised);
        }
    }

    /// Files of two servers that wrote at once are not gone on from: either has what the other lacks.
    pub(super) fn check_history(&self) -> Result<()> {
        match fork(&self.history, self.directory) {
            Some(why) if !self.settings.accept_loss => Err(Error::new(
                Kind::Config,
                format!(
                    "{why}. Move the files of one of them elsewhere, or go on with the newest snapshot and the log behind it, \
                     without what only the other has, by --accept-loss"
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Files that are not used since another server wrote them, and what is lost with them.
    pub(super) fn note_others(&mut self) -> Result<Vec<Name>> {
        if self.history.fork().is_none() {
            return Ok(Vec::new());
        }
        let others = self.history.others(&self.used);
        for name in &others {
            let shown = history::shown(self.directory, *name);
            let what = match name {
                Name::Segment(number) => {
                    let pushes = count_pushes(&self.directory.segment(*number), 0)?;
                    format!("{pushes} pushes")
                }
                Name::Generation(number) => {
                    let generation = Generation::open(self.directory.path(), *number)?;
                    let (versions, _) = generation.changes()?;
                    format!("{} slices with {versions} changes in all", generation.summary().slices)
                }
            };
            self.report.lost.push(format!("{shown} is of another server and is not used: {what} in it"));
        }
        self.renew |= !others.is_empty();
        Ok(others)
    }

    /// Where nothing was read to its end, the files still tell which directory this is.
    pub(super) fn find_origin(&mut self) -> Result<()> {
        if self.origin.is_none()
            && let Some(origin) = self.history.origin()
        {
            self.check_origin(origin)?;
            self.origin = Some(origin);
        }
        Ok(())
    }

    fn take(&mut self, generation: &Generation) -> Result<(), Unusable> {
        self.check_origin(generation.manifest.origin())?;
        let Some(shard) = self.shard else { return Ok(()) };
        let catalog = &generation.manifest.catalog;
        let log =
            self.segments.range(generation.manifest.log..).map(|number| self.directory.segment(*number));
        let log: u64 = log.filter_map(|path| std::fs::metadata(path).ok()).map(|found| found.len()).sum();
        self.progress.done.store(0, Ordering::Relaxed);
        self.progress.total.store(generation.summary().bytes + log, Ordering::Relaxed);
        let loaded = generation.load(shard, |standing, bytes| {
            self.progress.done.fetch_add(bytes, Ordering::Relaxed);
            self.clients.extend(standing.clients.iter().map(|Remembered { client, .. }| *client));
        });
        if let Err(unusable) = loaded {
            let all: Vec<_> = catalog.slices().map(|(id, ..)| SliceId(id)).collect();
            shard.remove(&all);
            self.clients.clear();
            return Err(unusable);
        }
        self.growth.state = Some(generation.summary().bytes);
        self.catalog = catalog.clone();
        self.gone.clone_from(&generation.manifest.gone);
        self.origin = Some(generation.manifest.origin());
        Ok(())
    }

    pub(super) fn check_origin(&self, origin: Origin) -> Result<()> {
        let Settings { shard, shards, path, .. } = self.settings;
        if (origin.shard, origin.shards) == (*shard, *shards) {
            return Ok(());
        }
        let mut why = format!("{} belongs to another shard", path.display());
        if origin.shards != *shards {
            let all = path.parent().unwrap_or(path).display();
            why = format!(
                "{} belongs to a cluster of another size; for {shards}: fastps checkpoint restore {all} {all}-{shards} --shards {shards}",
                path.display()
            );
        }
        let say = |shard, shards| format!("shard {shard} of {shards}");
        Err(Error::new(Kind::Config, why).expected(say(*shard, *shards), say(origin.shard, origin.shards)))
    }
}
