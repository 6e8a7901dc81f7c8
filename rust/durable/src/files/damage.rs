//! Why a file cannot be used: damage, which a start may work around, or another failure, which ends it.

use fastps_core::error::{Error, Kind};

/// Why a snapshot, or a part of it, cannot be used.
#[derive(Debug)]
pub(crate) enum Unusable {
    /// The bytes differ from those that were written; the text says where.
    Damaged(String),
    /// Another error.
    Failed(Error),
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
