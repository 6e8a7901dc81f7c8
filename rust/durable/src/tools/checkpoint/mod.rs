//! Lists and verifies the content of a data directory. Takes no lock and changes nothing, so a server may be
//! running.

mod complete;
mod list;
mod verify;

pub use list::{Listed, Snapshot, list};
pub use verify::{Verified, verify};
