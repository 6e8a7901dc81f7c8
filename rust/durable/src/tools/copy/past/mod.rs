//! Copies of a history: the names of its objects in a bucket, and a data directory for reading that is built from
//! them.

mod chain;
mod folder;
mod names;
mod sealed;

pub use chain::chain;
pub use folder::{PastFolder, Unfinished};
pub(crate) use folder::{copied_until, source};
pub use names::{CopiedSnapshot, Sealed};
