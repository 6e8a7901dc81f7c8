//! Copies of the log in a bucket, piece by piece, beside the copies of snapshots.

mod copier;
mod prune;
mod store;
mod take;

#[cfg(test)]
pub(super) use copier::Copier;
pub(crate) use copier::LogCopies;
pub(crate) use prune::snapshot_is_copied;
pub(crate) use take::take;
