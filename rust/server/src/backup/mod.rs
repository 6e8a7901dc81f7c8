//! Copies of snapshots in a bucket.

pub(crate) mod bucket;
pub(crate) mod copies;
mod fetch;
pub(crate) mod history;
pub(crate) mod owners;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod piece_tests;
pub(crate) mod pieces;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod upload;

pub use bucket::{Bucket, is_url};
pub use fetch::{Got, Stored, Verified, Which, fetch, list, verify};
pub use history::fetch_past;
pub use owners::{Owned, owners, release};
pub use upload::{Uploaded, upload_all};
