//! The caller's side of a push, shared by the in-process store and the network client: checks before anything
//! is sent or changed, and receipts or an error from the slices' answers.

#[cfg(not(loom))]
pub(crate) mod held;
#[cfg(not(loom))]
pub mod outcome;
#[cfg(not(loom))]
pub mod outgoing;
#[cfg(not(loom))]
pub mod registration;
#[cfg(not(loom))]
pub mod residue;
pub mod sparse;
