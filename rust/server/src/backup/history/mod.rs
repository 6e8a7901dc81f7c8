//! Copies of the history that servers keep: snapshots and sealed segments of the log as objects that never change,
//! in a folder of their own. What `latest` and a take-over need lies elsewhere.

mod copy;
mod fetch;
mod listing;
mod prune;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;

pub(crate) use copy::copy_history;
pub use fetch::fetch_past;
