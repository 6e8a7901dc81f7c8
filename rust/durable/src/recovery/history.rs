//! Which servers wrote the files of a directory. Each names the one whose files it went on from, so one history is a chain; two
//! servers that wrote there at once, or files that were mixed, make two.

use crate::files::directory::Directory;
use crate::frame::{Author, Origin};
use crate::log::read::{Beginning, beginning};
use crate::snapshot::generation::Generation;
use crate::snapshot::manifest::Manifest;
use fastps_core::error::{Error, Kind, Result};
use std::collections::{BTreeMap, BTreeSet};

/// A file, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Name {
    Generation(u64),
    Segment(u64),
}

/// What a file says of where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    origin: Origin,
    author: Author,
}

/// The whole files of a directory, as far as they tell where they come from.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    segments: BTreeMap<u64, Mark>,
    /// Segments that do not tell: a start that needs them finds the damage.
    unreadable: BTreeSet<u64>,
    /// With the first segment that each needs.
    generations: BTreeMap<u64, (u64, Mark)>,
}

/// Servers whose files one may go on from: the one that does, and those before it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lineage {
    id: u64,
    incarnations: BTreeSet<u64>,
}

/// The files that a start goes on from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Used {
    /// The snapshot that was loaded.
    pub(crate) generation: Option<u64>,
    /// Segments that were repeated.
    pub(crate) segments: BTreeSet<u64>,
}

impl History {
    /// Of the segments in a directory, and of these generations.
    pub(crate) fn read<'a>(
        directory: &Directory,
        generations: impl Iterator<Item = &'a Manifest>,
    ) -> Result<Self> {
        let mut history = Self::default();
        for number in directory.segments()? {
            match mark_of(directory, number)? {
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
            let mark = Mark { origin: manifest.origin(), author: manifest.author() };
            history.generations.insert(manifest.generation, (manifest.log, mark));
        }
        Ok(history)
    }

    /// The same with all generations whose manifests are whole.
    pub(crate) fn of(directory: &Directory) -> Result<Self> {
        let listed = Generation::list(directory.path())?;
        Self::read(directory, listed.iter().flatten().map(|generation| &generation.manifest))
    }

    fn marks(&self) -> impl Iterator<Item = (Name, Mark)> {
        let segments = self.segments.iter().map(|(number, mark)| (Name::Segment(*number), *mark));
        let generations = self.generations.iter();
        segments.chain(generations.map(|(number, (_, mark))| (Name::Generation(*number), *mark)))
    }

    /// Two files that are not of one history, if there are any.
    pub(crate) fn fork(&self) -> Option<(Name, Name)> {
        let mut segments = self.segments.iter();
        let follow = segments.clone().skip(1);
        for ((a, before), (b, after)) in segments.by_ref().zip(follow) {
            let known = [after.author.incarnation, after.author.predecessor];
            // The server that links them may have written what cannot be read.
            let is_linked =
                self.unreadable.range(a..b).next().is_some() || known.contains(&before.author.incarnation);
            if before.origin != after.origin || !is_linked {
                return Some((Name::Segment(*a), Name::Segment(*b)));
            }
        }
        let (first, _) = self.segments.first_key_value()?;
        let all = Used { generation: None, segments: self.segments.keys().copied().collect() };
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
                return Some((Name::Generation(*number), Name::Segment(*segment)));
            }
        }
        None
    }

    /// The files that do not belong to what is used, or that may not.
    pub(crate) fn others(&self, used: &Used) -> Vec<Name> {
        let lineage = self.lineage(used);
        let anchor = used.generation.and_then(|number| self.generations.get(&number)).map(|(log, _)| *log);
        let first = anchor.or_else(|| used.segments.first().copied()).unwrap_or(0);
        let is_other = |(name, mark): &(Name, Mark)| match name {
            Name::Segment(number) if *number >= first => !used.segments.contains(number),
            Name::Generation(number) if Some(*number) == used.generation => false,
            Name::Generation(number) if used.generation.is_none_or(|used| *number > used) => true,
            _ => !lineage.has(*mark),
        };
        self.marks().filter(is_other).map(|(name, _)| name).collect()
    }

    /// Without these files.
    pub(crate) fn without(mut self, names: &[Name]) -> Self {
        self.segments.retain(|number, _| !names.contains(&Name::Segment(*number)));
        self.generations.retain(|number, _| !names.contains(&Name::Generation(*number)));
        self
    }

    /// What the files say of the directory, as far as they agree.
    pub(crate) fn origin(&self) -> Option<Origin> {
        self.marks().next().map(|(_, mark)| mark.origin)
    }

    /// The server that wrote the newest file.
    pub(crate) fn newest(&self) -> u64 {
        let segment = self.segments.last_key_value().map(|(_, mark)| mark);
        let generation = self.generations.last_key_value().map(|(_, (_, mark))| mark);
        segment.or(generation).map_or(0, |mark| mark.author.incarnation)
    }

    /// Who wrote what is used, and whose files those had gone on from; without anything that is, of all files.
    pub(crate) fn lineage(&self, used: &Used) -> Lineage {
        let is_used = |name: Name| match name {
            Name::Generation(number) => used.generation == Some(number),
            Name::Segment(number) => used.segments.contains(&number),
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

    fn has(&self, mark: Mark) -> bool {
        mark.origin.id == self.id && self.incarnations.contains(&mark.author.incarnation)
    }

    /// With a server that goes on from there, in a directory of this identifier.
    pub(crate) fn followed_by(mut self, id: u64, author: Author) -> Self {
        self.id = id;
        self.add(author);
        self
    }

    /// Fails where a directory has a segment of another server: every server begins with one.
    pub(crate) fn check(&self, directory: &Directory) -> Result<()> {
        for number in directory.segments()? {
            if let Some(mark) = mark_of(directory, number)?.filter(|mark| !self.has(*mark)) {
                let path = directory.segment(number);
                let why = format!(
                    "another server (incarnation {:016x}) wrote {}: nothing of this one is durable while that is there. Stop \
                     the other server and move its files elsewhere, or stop this one",
                    mark.author.incarnation,
                    path.display()
                );
                return Err(Error::new(Kind::Config, why));
            }
        }
        Ok(())
    }
}

/// What a segment says; `None`: nothing that can be believed.
fn mark_of(directory: &Directory, number: u64) -> Result<Option<Mark>> {
    let path = directory.segment(number);
    let begun = match beginning(&path) {
        // A server removes it.
        Err(_) if !path.exists() => return Ok(None),
        begun => begun?,
    };
    let begun = begun.filter(|begun| begun.number == number);
    Ok(begun.map(|Beginning { origin, author, .. }| Mark { origin, author }))
}

/// A file as people look for it.
pub(crate) fn shown(directory: &Directory, name: Name) -> String {
    let path = match name {
        Name::Generation(number) => directory.generation(number),
        Name::Segment(number) => directory.segment(number),
    };
    path.display().to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ORIGIN: Origin = Origin { id: 1, shard: 0, shards: 1 };

    /// Segments `number: (incarnation, predecessor)`, and generations with the segment that each begins with.
    fn history(segments: &[(u64, u64, u64)], generations: &[(u64, u64, u64)]) -> History {
        let mark =
            |incarnation, predecessor| Mark { origin: ORIGIN, author: Author { incarnation, predecessor } };
        let segments = segments.iter().map(|(number, by, after)| (*number, mark(*by, *after)));
        let mut history = History { segments: segments.collect(), ..History::default() };
        for (number, log, by) in generations.iter().copied() {
            let author = history.segments.get(&log).map(|mark| mark.author);
            let author = author.filter(|author| author.incarnation == by);
            let author = author.unwrap_or(Author { incarnation: by, predecessor: 0 });
            let mark = Mark { origin: ORIGIN, author };
            history.generations.insert(number, (log, mark));
        }
        history
    }

    #[test]
    fn servers_that_go_on_from_one_another_are_one_history() {
        for (segments, generations) in [
            (&[][..], &[][..]),
            (&[(1, 5, 0)], &[]),
            // One that only began its segment, and files of format 1.
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
    fn files_of_two_servers_are_found_and_told_apart() {
        // 8 began where 7's folder had been removed, and 7 went on in it.
        let mixed = history(&[(3, 8, 0), (8, 7, 6), (9, 7, 6)], &[(2, 3, 8), (4, 8, 7)]);
        assert_eq!(mixed.fork(), Some((Name::Segment(3), Name::Segment(8))));
        let used = Used { generation: Some(4), segments: [8, 9].into() };
        let others = mixed.others(&used);
        assert_eq!(others, [Name::Segment(3), Name::Generation(2)]);
        let left = mixed.without(&others);
        assert_eq!((left.fork(), left.newest()), (None, 7));
        // 8 went on from 7's files, while 7 did, too.
        let forked = history(&[(7, 7, 6), (8, 8, 7), (9, 7, 6)], &[(1, 7, 7)]);
        assert_eq!(forked.fork(), Some((Name::Segment(8), Name::Segment(9))));
        let used = Used { generation: Some(1), segments: [7, 8].into() };
        assert_eq!(forked.others(&used), [Name::Segment(9)]);
        // A snapshot whose segment is another's, or not there.
        let swapped = history(&[(7, 7, 6), (8, 7, 6)], &[(1, 7, 8)]);
        assert_eq!(swapped.fork(), Some((Name::Generation(1), Name::Segment(7))));
        let alone = history(&[(7, 7, 6), (8, 7, 6)], &[(1, 3, 8)]);
        assert_eq!(alone.fork(), Some((Name::Generation(1), Name::Segment(7))));
    }

    #[test]
    fn another_directory_is_another_history() {
        let mut mixed = history(&[(1, 7, 0), (2, 7, 0)], &[]);
        mixed.segments.get_mut(&1).unwrap().origin.id = 2;
        assert!(mixed.fork().is_some());
        mixed = history(&[(1, 7, 0), (3, 7, 0)], &[]);
        mixed.segments.get_mut(&1).unwrap().origin.id = 2;
        mixed.unreadable.insert(2);
        assert!(mixed.fork().is_some(), "what lies between cannot link them");
    }

    #[test]
    fn a_segment_that_cannot_be_read_may_have_linked_its_neighbours() {
        for (segments, generations, unreadable) in [
            (&[(1, 7, 0), (3, 9, 8)][..], &[][..], 2),
            // A snapshot is of the server that wrote its segment.
            (&[(3, 7, 0), (4, 7, 0)], &[(2, 5, 8)], 5),
        ] {
            let mut history = history(segments, generations);
            assert!(history.fork().is_some());
            history.unreadable.insert(unreadable);
            assert_eq!(history.fork(), None);
        }
        // It says nothing of segments that follow one another elsewhere.
        let mut forked = history(&[(1, 7, 0), (2, 9, 8)], &[]);
        forked.unreadable.insert(3);
        assert!(forked.fork().is_some());
    }
}
