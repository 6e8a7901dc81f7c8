//! Why a file cannot be used: it is damaged, or something else went wrong.

use fastps_core::error::{Error, Kind};

/// Why a generation, or a part of it, cannot be used.
#[derive(Debug)]
pub(crate) enum Unusable {
    /// Its bytes are not those that were written; says which.
    Damaged(String),
    /// Something else went wrong.
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
