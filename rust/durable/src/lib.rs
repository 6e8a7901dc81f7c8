//! What a shard keeps on disk, and how it becomes itself again: snapshots of its slices, and a log of every change since.
//!
//! One push: `fastps_core::record` -> [`Journal`] (a sink) -> `log` (a queue and a thread that writes it, many records
//! at a time) -> `segment` (a file). A start: `recovery` loads the newest whole `generation` and repeats the
//! records behind it. The bytes are described in `README.md`.
//!
//! Without a server: `checkpoint` tells what a data directory has, and whether it is whole; `reshape` and `export` read all
//! of it (`source`) and write it anew, for another number of shards or for others. `copy`: snapshots that go to another place, and
//! come back.

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
pub use files::directory::shard_folder;
pub use journal::{Journal, Settings};
pub use recovery::Report;
pub use snapshot::generation::{Cut, Generation, Summary};
pub use tools::export::{Exported, export};
pub use tools::reshape::{Restored, restore};
pub use tools::source::Reading;
pub use tools::{checkpoint, copy};
