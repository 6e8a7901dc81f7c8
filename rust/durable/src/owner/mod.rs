//! One owner of a shard: the record that says which server it is, and a server's claim to it.

mod claim;
mod cutter;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod model;
mod pieces;
mod record;

pub use claim::{Answer, Candidate, Claim, Phase, Request, Timing};
pub use cutter::Cutter;
pub use pieces::{Cut, History, Piece, Progress, cut, history, is_needless};
pub use record::{Base, LockedFile, LogPosition, MAX_RECORD_BYTES, Record, Stage, Tip};
