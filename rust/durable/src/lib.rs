//! What a shard keeps on disk, and how it becomes itself again: snapshots of its slices, and a log of every change since.
//!
//! One push: `fastps_core::record` -> [`Journal`] (a sink) -> `log` (a queue and a thread that writes it, many records
//! at a time) -> `segment` (a file). A start: `recovery` loads the newest whole `generation` and repeats the
//! records behind it. The bytes are described in `README.md`.

mod catalog;
mod checksum;
mod directory;
mod frame;
mod generation;
mod journal;
mod log;
mod recovery;
mod safetensors;
mod segment;
mod snapshot;

pub use catalog::{Catalog, Event, Holding, Reservation, Stage};
pub use generation::{Generation, Summary};
pub use journal::{Journal, Settings};
pub use recovery::Report;
