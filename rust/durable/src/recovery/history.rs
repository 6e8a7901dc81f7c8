//! The history of a directory: which server wrote each file. Each server names its predecessor, so the
//! servers of one history form a chain. Two servers that wrote at once, or mixed-up files, break the chain.

use crate::files::directory::Directory;
use crate::frame::{Author, Origin};
use crate::log::read::{SegmentHeader, beginning};
use crate::snapshot::generation::Generation;
use crate::snapshot::manifest::Manifest;
use fastps_core::error::{Error, Kind, Result};
use std::collections::{BTreeMap, BTreeSet};

/// A file, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FileId {
    Generation(u64),
    Segment(u64),
}

/// The writer of a file, and its directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Provenance {
    origin: Origin,
    author: Author,
}

/// The provenance of all intact files in a directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    segments: BTreeMap<u64, Provenance>,
    /// Segments whose first frame is unreadable. A start that needs them reports the damage.
    unreadable: BTreeSet<u64>,
    /// Snapshots by number, each with the first segment it needs.
    generations: BTreeMap<u64, (u64, Provenance)>,
}

/// The servers of one history, up to some server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lineage {
    id: u64,
    incarnations: BTreeSet<u64>,
}

/// The files that a start uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct UsedFiles {
    /// The snapshot that was loaded.
    pub(crate) generation: Option<u64>,
    /// Segments that were replayed.
    pub(crate) segments: BTreeSet<u64>,
}

impl History {
    /// Reads the history of a directory's segments and of the given snapshots.
    pub(crate) fn read<'a>(
        directory: &Directory,
        generations: impl Iterator<Item = &'a Manifest>,
    ) -> Result<Self> {
        let mut history = Self::default();
        for number in directory.segments()? {
            match provenance_of(directory, number)? {
                Some(mark) => {
                    history.segments.insert(number, mark);
                }
                None if directory.segment(number).exists() => {
                    history.unreadable.insert(number);
                }
                None => {}
            }
        }
        for manifest in generations {
            let mark = Provenance { origin: manifest.origin(), author: manifest.author() };
            history.generations.insert(manifest.generation, (manifest.log, mark));
        }
        Ok(history)
    }

    /// Reads the history of a directory, with all snapshots whose manifests are intact.
    pub(crate) fn of(directory: &Directory) -> Result<Self> {
        let listed = Generation::list(directory.path())?;
        Self::read(directory, listed.iter().flatten().map(|generation| &generation.manifest))
    }

    fn marks(&self) -> impl Iterator<Item = (FileId, Provenance)> {
        let segments = self.segments.iter().map(|(number, mark)| (FileId::Segment(*number), *mark));
        let generations = self.generations.iter();
        segments.chain(generations.map(|(number, (_, mark))| (FileId::Generation(*number), *mark)))
    }

    /// Two files of different histories, if there are any.
    pub(crate) fn fork(&self) -> Option<(FileId, FileId)> {
        let mut segments = self.segments.iter();
        let follow = segments.clone().skip(1);
        for ((a, before), (b, after)) in segments.by_ref().zip(follow) {
            let known = [after.author.incarnation, after.author.predecessor];
            // The server that links them may have written only unreadable files.
            let is_linked =
                self.unreadable.range(a..b).next().is_some() || known.contains(&before.author.incarnation);
            if before.origin != after.origin || !is_linked {
                return Some((FileId::Segment(*a), FileId::Segment(*b)));
            }
        }
        let (first, _) = self.segments.first_key_value()?;
        let all = UsedFiles { generation: None, segments: self.segments.keys().copied().collect() };
        let lineage = self.lineage(&all);
        for (number, (log, mark)) in &self.generations {
            let own = self.segments.get(log);
            let fits = match own {
                Some(own) => own == mark,
                None if self.unreadable.contains(log) => mark.origin.id == lineage.id,
                None => lineage.has(*mark),
            };
            if !fits {
                let segment = if own.is_some() { log } else { first };
                return Some((FileId::Generation(*number), FileId::Segment(*segment)));
            }
        }
        None
    }

    /// Files that do not belong to the history of the used files, or may not.
    pub(crate) fn foreign_files(&self, used: &UsedFiles) -> Vec<FileId> {
        let lineage = self.lineage(used);
        let anchor = used.generation.and_then(|number| self.generations.get(&number)).map(|(log, _)| *log);
        let first = anchor.or_else(|| used.segments.first().copied()).unwrap_or(0);
        let is_other = |(name, mark): &(FileId, Provenance)| match name {
            FileId::Segment(number) if *number >= first => !used.segments.contains(number),
            FileId::Generation(number) if Some(*number) == used.generation => false,
            FileId::Generation(number) if used.generation.is_none_or(|used| *number > used) => true,
            _ => !lineage.has(*mark),
        };
        self.marks().filter(is_other).map(|(name, _)| name).collect()
    }

    /// The history without these files.
    pub(crate) fn without(mut self, names: &[FileId]) -> Self {
        self.segments.retain(|number, _| !names.contains(&FileId::Segment(*number)));
        self.generations.retain(|number, _| !names.contains(&FileId::Generation(*number)));
        self
    }

    /// The directory that the files belong to, as far as they agree.
    pub(crate) fn origin(&self) -> Option<Origin> {
        self.marks().next().map(|(_, mark)| mark.origin)
    }

    /// The server that wrote the newest file.
    pub(crate) fn newest(&self) -> u64 {
        let segment = self.segments.last_key_value().map(|(_, mark)| mark);
        let generation = self.generations.last_key_value().map(|(_, (_, mark))| mark);
        segment.or(generation).map_or(0, |mark| mark.author.incarnation)
    }

    /// The servers that wrote the used files, and their predecessors. If no files are used, those of all
    /// files.
    pub(crate) fn lineage(&self, used: &UsedFiles) -> Lineage {
        let is_used = |name: FileId| match name {
            FileId::Generation(number) => used.generation == Some(number),
            FileId::Segment(number) => used.segments.contains(&number),
        };
        let all = used.generation.is_none() && used.segments.is_empty();
        let used: Vec<_> = self.marks().filter(|(name, _)| all || is_used(*name)).collect();
        let mut lineage =
            Lineage { id: used.first().map_or(0, |(_, mark)| mark.origin.id), ..Lineage::default() };
        for (_, mark) in &used {
            lineage.add(mark.author);
        }
        let mut known = 0;
        while known < lineage.incarnations.len() {
            known = lineage.incarnations.len();
            for (_, mark) in self.marks().filter(|(_, mark)| lineage.has(*mark)).collect::<Vec<_>>() {
                lineage.add(mark.author);
            }
        }
        lineage
    }
}

impl Lineage {
    fn add(&mut self, Author { incarnation, predecessor }: Author) {
        self.incarnations.extend([incarnation, predecessor]);
    }

    fn has(&self, mark: Provenance) -> bool {
        mark.origin.id == self.id && self.incarnations.contains(&mark.author.incarnation)
    }

    /// Adds a server that takes over, in a directory with this identifier.
    pub(crate) fn followed_by(mut self, id: u64, author: Author) -> Self {
        self.id = id;
        self.add(author);
        self
    }

    /// Fails if the directory contains a segment of a server outside this lineage. Every server begins with a
    /// segment.
    pub(crate) fn check(&self, directory: &Directory) -> Result<()> {
        for number in directory.segments()? {
            if let Some(mark) = provenance_of(directory, number)?.filter(|mark| !self.has(*mark)) {
                let path = directory.segment(number);
                let why = format!(
                    "another server (incarnation {:016x}) wrote {}: changes on this server are not durable while that file exists. Stop \
                     the other server and move its files away, or stop this one",
                    mark.author.incarnation,
                    path.display()
                );
                return Err(Error::new(Kind::Config, why));
            }
        }
        Ok(())
    }
}

/// The provenance of a segment. `None`: its first frame is missing or damaged.
fn provenance_of(directory: &Directory, number: u64) -> Result<Option<Provenance>> {
    let path = directory.segment(number);
    let begun = match beginning(&path) {
        // A server removed it meanwhile.
        Err(_) if !path.exists() => return Ok(None),
        begun => begun?,
    };
    let begun = begun.filter(|begun| begun.number == number);
    Ok(begun.map(|SegmentHeader { origin, author, .. }| Provenance { origin, author }))
}

/// The path of a file, for messages.
pub(crate) fn display_path(directory: &Directory, name: FileId) -> String {
    let path = match name {
        FileId::Generation(number) => directory.generation(number),
        FileId::Segment(number) => directory.segment(number),
    };
    path.display().to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ORIGIN: Origin = Origin { id: 1, shard: 0, shards: 1 };

    /// Segments `(number, incarnation, predecessor)`, and snapshots `(number, first segment, incarnation)`.
    fn history(segments: &[(u64, u64, u64)], generations: &[(u64, u64, u64)]) -> History {
        let mark = |incarnation, predecessor| Provenance {
            origin: ORIGIN,
            author: Author { incarnation, predecessor },
        };
        let segments = segments.iter().map(|(number, by, after)| (*number, mark(*by, *after)));
        let mut history = History { segments: segments.collect(), ..History::default() };
        for (number, log, by) in generations.iter().copied() {
            let author = history.segments.get(&log).map(|mark| mark.author);
            let author = author.filter(|author| author.incarnation == by);
            let author = author.unwrap_or(Author { incarnation: by, predecessor: 0 });
            let mark = Provenance { origin: ORIGIN, author };
            history.generations.insert(number, (log, mark));
        }
        history
    }

    #[test]
    fn successive_servers_form_one_history() {
        for (segments, generations) in [
            (&[][..], &[][..]),
            (&[(1, 5, 0)], &[]),
            // One server only began its segment, and the first files are of format 1.
            (&[(3, 0, 0), (4, 5, 0), (5, 6, 5), (6, 7, 6), (7, 7, 6)], &[(1, 3, 0), (2, 7, 7)]),
            // The log before it was removed.
            (&[(6, 7, 6), (9, 9, 7)], &[(2, 6, 7)]),
        ] {
            let history = history(segments, generations);
            assert_eq!(history.fork(), None, "{segments:?}");
            assert_eq!(history.newest(), segments.last().map_or(0, |last| last.1));
        }
    }

    #[test]
    fn files_of_two_servers_are_detected_and_separated() {
        // Server 8 began in a directory that was removed under server 7, which continued in it.
        let mixed = history(&[(3, 8, 0), (8, 7, 6), (9, 7, 6)], &[(2, 3, 8), (4, 8, 7)]);
        assert_eq!(mixed.fork(), Some((FileId::Segment(3), FileId::Segment(8))));
        let used = UsedFiles { generation: Some(4), segments: [8, 9].into() };
        let others = mixed.foreign_files(&used);
        assert_eq!(others, [FileId::Segment(3), FileId::Generation(2)]);
        let left = mixed.without(&others);
        assert_eq!((left.fork(), left.newest()), (None, 7));
        // Server 8 took over 7's files while 7 continued.
        let forked = history(&[(7, 7, 6), (8, 8, 7), (9, 7, 6)], &[(1, 7, 7)]);
        assert_eq!(forked.fork(), Some((FileId::Segment(8), FileId::Segment(9))));
        let used = UsedFiles { generation: Some(1), segments: [7, 8].into() };
        assert_eq!(forked.foreign_files(&used), [FileId::Segment(9)]);
        // A snapshot whose segment belongs to another server, or is missing.
        let swapped = history(&[(7, 7, 6), (8, 7, 6)], &[(1, 7, 8)]);
        assert_eq!(swapped.fork(), Some((FileId::Generation(1), FileId::Segment(7))));
        let alone = history(&[(7, 7, 6), (8, 7, 6)], &[(1, 3, 8)]);
        assert_eq!(alone.fork(), Some((FileId::Generation(1), FileId::Segment(7))));
    }

    #[test]
    fn another_directory_is_another_history() {
        let mut mixed = history(&[(1, 7, 0), (2, 7, 0)], &[]);
        mixed.segments.get_mut(&1).unwrap().origin.id = 2;
        assert!(mixed.fork().is_some());
        mixed = history(&[(1, 7, 0), (3, 7, 0)], &[]);
        mixed.segments.get_mut(&1).unwrap().origin.id = 2;
        mixed.unreadable.insert(2);
        assert!(mixed.fork().is_some(), "the unreadable file cannot link them");
        mixed = history(&[(2, 7, 0)], &[(1, 1, 7)]);
        assert_eq!(mixed.fork(), None);
        mixed.generations.get_mut(&1).unwrap().1.origin.id = 2;
        assert!(mixed.fork().is_some(), "the snapshot of the same server is another directory's");
    }

    #[test]
    fn an_unreadable_segment_may_have_linked_its_neighbours() {
        for (segments, generations, unreadable) in [
            (&[(1, 7, 0), (3, 9, 8)][..], &[][..], 2),
            // A snapshot belongs to the server that wrote its segment.
            (&[(3, 7, 0), (4, 7, 0)], &[(2, 5, 8)], 5),
        ] {
            let mut history = history(segments, generations);
            assert!(history.fork().is_some());
            history.unreadable.insert(unreadable);
            assert_eq!(history.fork(), None);
        }
        // An unreadable segment explains only the gap where it is.
        let mut forked = history(&[(1, 7, 0), (2, 9, 8)], &[]);
        forked.unreadable.insert(3);
        assert!(forked.fork().is_some());
    }
}
