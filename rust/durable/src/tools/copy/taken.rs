//! Building the directory of a shard that is taken over from a bucket: the newest snapshot and the log after it,
//! under the identifiers that they have. So the next server continues the history of the last one.

use crate::files::directory::Directory;
use crate::files::io::{failed, sync_directory};
use crate::files::output::Output;
use crate::files::removal::remove;
use crate::frame::{self, Author, Content, Origin};
use crate::log::read::beginning;
use crate::log::segment::Segment;
use crate::owner::{LogPosition, Piece, cut};
use crate::snapshot::generation::Generation;
use crate::snapshot::manifest::{MANIFEST, Manifest};
use crate::tools::copy::described::Described;
use crate::tools::copy::{note_copied, replace, served};
use fastps_core::error::{Error, Kind, Result};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A file in a shard's directory while that is incomplete.
const TAKING_FILE: &str = "taking-over";

/// How a shard's directory may be used for a shard that is taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vacancy {
    /// It has nothing, or what an interrupted take-over left.
    Empty,
    /// A server that owned the shard has used it: a start continues there.
    Served,
    /// It has files that no owner of the shard has used.
    Taken,
}

/// Returns how a shard's directory may be used, which need not exist.
pub fn vacancy(path: &Path) -> Result<Vacancy> {
    let directory = Directory::unlocked(path);
    if !path.exists() || path.join(TAKING_FILE).exists() {
        return Ok(Vacancy::Empty);
    }
    if served(path)?.is_some() {
        return Ok(Vacancy::Served);
    }
    let is_empty = directory.generations()?.is_empty() && directory.segments()?.is_empty();
    Ok(if is_empty { Vacancy::Empty } else { Vacancy::Taken })
}

/// A shard's directory that is being built. Until it is finished, the next take-over begins anew.
#[derive(Debug)]
pub struct Taken {
    directory: Directory,
    /// The snapshot.
    manifest: Option<Manifest>,
    /// The segment that is being written, and where its next piece begins.
    segment: Option<(File, PathBuf)>,
    next: LogPosition,
}

impl Taken {
    /// Begins in a directory whose lock the caller holds. Removes what an interrupted take-over left there.
    pub fn begin(path: &Path) -> Result<Self> {
        if vacancy(path)? != Vacancy::Empty {
            let message = format!("{} has files of a shard that nobody takes over there", path.display());
            return Err(Error::new(Kind::Config, message).expected("an empty directory", path.display()));
        }
        let directory = Directory::unlocked(path);
        if !path.join(TAKING_FILE).exists() {
            replace(path, TAKING_FILE, "")?;
        }
        for number in directory.generations()? {
            remove(&directory.generation(number))?;
        }
        for number in directory.segments()? {
            remove(&directory.segment(number))?;
        }
        Ok(Self { directory, manifest: None, segment: None, next: LogPosition { segment: 1, offset: 0 } })
    }

    /// An empty folder for the files of the snapshot, except the manifest.
    pub fn folder(&self, described: &Described) -> Result<PathBuf> {
        let folder = self.directory.generation(described.manifest.generation);
        let made = DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(|error| failed("create", &folder, &error))?;
        Ok(folder)
    }

    /// Completes the snapshot, whose files must be durable, and remembers the folder that it was copied from.
    pub fn complete(&mut self, described: &Described, folder: &str) -> Result<()> {
        let mut manifest = described.manifest.clone();
        // What the lost machine had of the log need not be in the bucket.
        manifest.durable = None;
        let generation = self.directory.generation(manifest.generation);
        let mut output = Output::create(&generation.join(MANIFEST))?;
        output.write(&manifest.text()?)?;
        output.finish()?;
        sync_directory(&generation)?;
        note_copied(self.directory.path(), folder)?;
        Generation::open(self.directory.path(), manifest.generation)?;
        self.next = described.log();
        self.manifest = Some(manifest);
        Ok(())
    }

    /// Adds the next piece of the log. Fails if its bytes are not what its name says.
    pub fn add(&mut self, piece: Piece, bytes: &[u8]) -> Result<()> {
        let found = cut(bytes, usize::MAX);
        let end = match found.next {
            Some(segment) => LogPosition { segment, offset: 0 },
            None => LogPosition { offset: piece.begin.offset + found.bytes as u64, ..piece.begin },
        };
        let is_first = piece.begin.offset == 0;
        let begins_well = !is_first || is_beginning(bytes, piece.begin.segment);
        if piece.begin != self.next || found.bytes != bytes.len() || end != piece.end || !begins_well {
            let message = format!("the piece {} of the log in the bucket is damaged", piece.name());
            return Err(Error::new(Kind::Internal, message).expected(
                format!("{:?} to {:?}", self.next, piece.end),
                format!("{:?} to {end:?}", piece.begin),
            ));
        }
        let (file, path) = match self.segment.take() {
            Some(open) => open,
            None => self.create(piece.begin)?,
        };
        (&file).write_all(bytes).map_err(|error| failed("write", &path, &error))?;
        self.next = end;
        self.segment = Some((file, path));
        if end.segment != piece.begin.segment {
            self.close()?;
        }
        Ok(())
    }

    /// Creates the file of a segment, which begins with its first piece.
    fn create(&self, place: LogPosition) -> Result<(File, PathBuf)> {
        let path = self.directory.segment(place.segment);
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        Ok((file.map_err(|error| failed("create", &path, &error))?, path))
    }

    fn close(&mut self) -> Result<()> {
        let Some((file, path)) = self.segment.take() else { return Ok(()) };
        file.sync_all().map_err(|error| failed("sync", &path, &error))
    }

    /// Makes all of it durable. A segment that no piece begins is begun as the last server began it.
    pub fn finish(mut self) -> Result<()> {
        self.close()?;
        if self.next.offset == 0 {
            let (origin, author) = self.last()?;
            Segment::create(&self.directory, self.next.segment, false, origin, author)?;
        }
        let path = self.directory.path();
        sync_directory(path)?;
        remove(&path.join(TAKING_FILE))?;
        sync_directory(path)
    }

    /// Who wrote the last of the files, and of which directory they are.
    fn last(&self) -> Result<(Origin, Author)> {
        if let Some(number) = self.directory.segments()?.last()
            && let Some(begun) = beginning(&self.directory.segment(*number))?
        {
            return Ok((begun.origin, begun.author));
        }
        let nothing = || Error::new(Kind::Config, "nothing of the shard is in the bucket");
        let manifest = self.manifest.as_ref().ok_or_else(nothing)?;
        Ok((manifest.origin(), manifest.author()))
    }
}

/// Returns whether bytes begin with the first frame of a segment.
fn is_beginning(bytes: &[u8], segment: u64) -> bool {
    let first = frame::split(bytes).and_then(|(content, _)| frame::read(content));
    matches!(first, Some(Content::Segment { number, .. }) if number == segment)
}
