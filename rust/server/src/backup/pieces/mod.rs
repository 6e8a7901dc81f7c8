//! Copies of the log in a bucket, piece by piece, beside the copies of snapshots.

mod copier;
mod pace;
mod prune;
mod store;
mod take;

#[cfg(test)]
pub(super) use copier::Copier;
pub(crate) use copier::LogCopies;
#[cfg(test)]
pub(super) use pace::Pace;
pub(crate) use prune::snapshot_is_copied;
pub(crate) use take::take;
