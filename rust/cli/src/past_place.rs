//! Where a past is read: in a data directory, or in a temporary folder with what a bucket has of it.

use fastps_core::error::{Error, Kind, Result};
use fastps_durable::checkpoint::{self, Listed};
use fastps_durable::{Change, Moment, Past, past};
use fastps_server::backup::{Bucket, fetch_past, is_url};
use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A data directory, or a bucket with the history of one.
pub(crate) enum PastPlace {
    Directory(PathBuf),
    Bucket(Bucket, Temporary),
}

/// A folder that goes with its owner.
pub(crate) struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Result<Self> {
        let folder = std::env::temp_dir();
        let mut k = 0_u64;
        loop {
            let path = folder.join(format!("fastps-past-{}-{k}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => k += 1,
                Err(error) => {
                    let message = format!("cannot create {}: {error}", path.display());
                    return Err(Error::new(Kind::Config, message)
                        .expected("a folder for temporary files (TMPDIR)", folder.display()));
                }
            }
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl PastPlace {
    /// The place that a user names, by the path of a directory or the URL of a bucket. Reads nothing yet.
    pub(crate) fn open(place: &Path) -> Result<Self> {
        match place.to_str().filter(|text| is_url(text)) {
            None => Ok(Self::Directory(place.to_owned())),
            Some(url) => Ok(Self::Bucket(Bucket::open(url)?, Temporary::new()?)),
        }
    }

    /// The directory to read.
    pub(crate) fn directory(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::Bucket(_, Temporary(path)) => path,
        }
    }

    /// The place, for people.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Directory(path) => path.display().to_string(),
            Self::Bucket(bucket, _) => bucket.url().to_owned(),
        }
    }

    /// Fetches what a moment needs, if it is a bucket; `None`: all of the log.
    fn fetch(&self, moment: Option<&Moment>) -> Result<()> {
        match self {
            Self::Directory(_) => Ok(()),
            Self::Bucket(bucket, folder) => fetch_past(bucket, &folder.0, moment),
        }
    }

    /// Reads the whole log, as [`past`] does.
    pub(crate) fn past(&self, each: impl FnMut(&Change<'_>)) -> Result<Past> {
        self.named(|| {
            self.fetch(None)?;
            let mut found = past(self.directory(), each)?;
            if let Self::Bucket(bucket, _) = self {
                for span in &mut found.shards {
                    span.path = PathBuf::from(format!("{}/history-{}", bucket.url(), span.shard));
                }
            }
            Ok(found)
        })
    }

    /// The snapshots of each shard.
    pub(crate) fn snapshots(&self) -> Result<Vec<Listed>> {
        self.named(|| {
            self.fetch(None)?;
            checkpoint::list(self.directory())
        })
    }

    /// Calls `read` with a directory that has a moment.
    pub(crate) fn at<T>(&self, moment: &Moment, read: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        self.named(|| {
            self.fetch(Some(moment))?;
            read(self.directory())
        })
    }

    /// Errors name the bucket, not the temporary folder.
    fn named<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let Self::Bucket(bucket, folder) = self else { return run() };
        let folder = folder.0.display().to_string();
        run().map_err(|mut error| {
            error.message = error.message.replace(&folder, bucket.url());
            error
        })
    }
}
