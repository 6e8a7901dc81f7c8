//! Durable storage of one shard: snapshots of its slices, and a log of every change since. `README.md` describes the bytes.
//!
//! A push: `fastps_core::record` -> [`Journal`] (a sink) -> `log::queue` -> `log::writer` (a thread that writes many records at a
//! time) -> `log::segment` (a file). A start: `recovery` loads the newest whole snapshot and replays the log behind it.
//!
//! - `files`: the directory of a shard: names, lock, checksummed output
//! - `catalog`: what a shard knows beside its slices
//! - `frame`: how records, events and slices are encoded
//! - `log`: writing and reading segments
//! - `snapshot`: writing and reading snapshots
//! - `recovery`: from files to a shard
//! - `journal`: the files of a running shard
//! - `tools`: data directories without a server

mod catalog;
mod files;
mod frame;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod journal;
mod log;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod properties;
mod recovery;
mod snapshot;
mod tools;

pub use catalog::secret::SecretHash;
pub use catalog::{Catalog, Event, Holding, Member, Reservation, Stage};
pub use files::names::shard_folder;
pub use journal::Journal;
pub use recovery::{Report, Settings};
pub use snapshot::generation::{Generation, Summary};
pub use snapshot::manifest::Cut;
pub use tools::export::{Exported, export};
pub use tools::reshape::{Restored, restore};
pub use tools::source::Reading;
pub use tools::{checkpoint, copy};
