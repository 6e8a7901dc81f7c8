//! Durable storage of one shard: snapshots of its slices, and a log of every later change. `README.md`
//! describes the file formats.
//!
//! A push goes from `fastps_core::record` to [`Journal`] (a sink), `log::queue`, `log::writer` (a thread that
//! writes many records at once) and `log::segment` (a file). A start goes through `recovery`: it loads the
//! newest intact snapshot and replays the log after it.
//!
//! - `files`: a shard's directory: names, lock, checksummed output
//! - `catalog`: what a shard stores besides its slices
//! - `frame`: the encoding of records, events and slices
//! - `log`: writing and reading log segments
//! - `snapshot`: writing and reading snapshots
//! - `recovery`: from files to a shard
//! - `owner`: which server owns the shard, and the copies of its log in a bucket
//! - `journal`: the files of a running shard
//! - `tools`: data directories without a server
//!
//! Folders import only folders above them in this list; `log` and `snapshot` do not import each other.

mod catalog;
mod files;
mod frame;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod journal;
mod log;
pub mod owner;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod properties;
mod recovery;
mod snapshot;
mod tools;

pub use catalog::secret::SecretHash;
pub use catalog::{
    Catalog, CoordinatorState, Ended, Event, Holding, ListedSpace, Member, Reservation, Stage,
};
pub use files::names::shard_folder;
pub use journal::{Journal, KeptHistory};
pub use recovery::moment::Moment;
pub use recovery::{Report, Settings};
pub use snapshot::generation::{Generation, Summary};
pub use snapshot::manifest::Cut;
pub use tools::export::{ExportPart, Exported, Exports, check_is_new, export, without_view, write_parts};
pub use tools::history::{Change, ChangeKind, Past, PastMark, ShardSpan, past};
pub use tools::located::bases;
pub use tools::reshape::{Restored, restore};
pub use tools::rewound::Rewound;
pub use tools::source::{Reading, store_of};
pub use tools::{checkpoint, copy};
