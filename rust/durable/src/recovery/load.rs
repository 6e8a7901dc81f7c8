//! Loading the newest intact snapshot, and checking that all files are of one history.

use crate::catalog::Catalog;
use crate::files::damage::Unusable;
use crate::frame::Origin;
use crate::log::scan::count_pushes;
use crate::recovery::history::{self, FileId, History};
use crate::recovery::report::KeptSnapshots;
use crate::recovery::settings::Settings;
use crate::recovery::{Recovery, fork};
use crate::snapshot::generation::Generation;
use crate::snapshot::manifest::Manifest;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::identity::Remembered;
use fastps_core::tensor::SliceId;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Recovery<'_> {
    /// Loads the newest intact snapshot. Returns all intact snapshots.
    pub(super) fn load(&mut self, numbers: &[u64]) -> Result<KeptSnapshots> {
        let (mut kept, mut damaged, mut manifests) = (KeptSnapshots::new(), Vec::new(), Vec::new());
        for number in numbers.iter().rev() {
            // Older snapshots are opened, and read only if needed.
            let open = if kept.is_empty() { Generation::open } else { Generation::open_head };
            let opened = open(self.directory.path(), *number);
            let whole = match opened {
                Ok(generation) if kept.is_empty() => self.load_generation(&generation).map(|()| generation),
                opened => opened,
            };
            match whole {
                Ok(Generation { mut manifest, .. }) => {
                    // Catalogs are large, and only that of the newest snapshot is used.
                    let catalog = std::mem::take(&mut manifest.catalog);
                    if kept.is_empty() && self.shard.is_some() {
                        self.catalog = Arc::unwrap_or_clone(catalog);
                    }
                    kept.push_front((*number, manifest.log));
                    manifests.push(manifest);
                }
                Err(Unusable::Failed(error)) => return Err(error),
                Err(Unusable::Damaged(why)) => damaged.push((*number, why)),
            }
        }
        let beginning = self.segments.first().map_or(numbers.is_empty(), |first| *first == 1);
        if kept.is_empty() && !beginning {
            let mut why = format!(
                "no snapshot in {} is intact, and the log does not go back to the beginning: restore the directory from a backup",
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
        self.note_durable_lengths(manifests.iter());
        Ok(kept)
    }

    pub(super) fn note_durable_lengths<'m>(&mut self, manifests: impl Iterator<Item = &'m Manifest>) {
        for (number, bytes) in manifests.filter_map(|manifest| manifest.durable) {
            let known_durable = self.known_durable.entry(number).or_default();
            *known_durable = bytes.max(*known_durable);
        }
    }

    /// Refuses files of two servers that wrote at once: each has changes that the other lacks.
    pub(super) fn check_history(&self) -> Result<()> {
        match fork(&self.history, self.directory) {
            Some(why) if !self.settings.accept_loss => Err(Error::new(
                Kind::Config,
                format!(
                    "{why}. Move the files of one server away, or start with --accept-loss to use the newest snapshot and \
                     the log after it, and drop the other server's changes"
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Reports files of other servers that are not used, and what is lost with them.
    pub(super) fn report_foreign_files(&mut self) -> Result<Vec<FileId>> {
        if self.history.fork().is_none() {
            return Ok(Vec::new());
        }
        let others = self.history.foreign_files(&self.used);
        for name in &others {
            let shown = history::display_path(self.directory, *name);
            let what = match name {
                FileId::Segment(number) => {
                    let pushes = count_pushes(&self.directory.segment(*number), 0)?;
                    format!("{pushes} pushes")
                }
                FileId::Generation(number) => {
                    let generation = Generation::open(self.directory.path(), *number)?;
                    let (versions, _) = generation.changes()?;
                    format!("{} slices with {versions} changes", generation.summary().slices)
                }
            };
            self.report
                .lost
                .push(format!("{shown} belongs to another server and is not used; it contains {what}"));
        }
        self.renew |= !others.is_empty();
        Ok(others)
    }

    /// Even if no file was read to its end, the files may say which directory this is.
    pub(super) fn find_origin(&mut self) -> Result<()> {
        if self.origin.is_none()
            && let Some(origin) = self.history.origin()
        {
            self.check_origin(origin)?;
            self.origin = Some(origin);
        }
        Ok(())
    }

    fn load_generation(&mut self, generation: &Generation) -> Result<(), Unusable> {
        self.check_origin(generation.manifest.origin())?;
        let catalog = &generation.manifest.catalog;
        let Some(shard) = self.shard else {
            self.catalog = Catalog::clone(catalog);
            self.gone.clone_from(&generation.manifest.gone);
            return Ok(());
        };
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
                "{} belongs to a cluster of another size: to change it, run fastps checkpoint restore {all} {all}-{shards} --shards {shards}",
                path.display()
            );
        }
        let say = |shard, shards| format!("shard {shard} of {shards}");
        Err(Error::new(Kind::Config, why).expected(say(*shard, *shards), say(origin.shard, origin.shards)))
    }
}
