//! Why a file cannot be used: damage, which a start may work around, or another failure, which ends it.

use fastps_core::error::{Error, Kind};
use std::path::Path;

/// Why a snapshot, or a part of it, cannot be used.
#[derive(Debug)]
pub(crate) enum Unusable {
    /// The bytes differ from those that were written; the text says where.
    Damaged(String),
    /// Another error.
    Failed(Error),
}

impl Unusable {
    /// A file that another one follows is not there.
    pub(crate) fn missing(path: &Path, next: &Path) -> Self {
        Self::Damaged(format!("{} is missing: {} follows it", path.display(), next.display()))
    }
}

impl From<Error> for Unusable {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<Unusable> for Error {
    fn from(unusable: Unusable) -> Self {
        match unusable {
            Unusable::Damaged(why) => Self::new(Kind::Internal, why),
            Unusable::Failed(error) => error,
        }
    }
}
