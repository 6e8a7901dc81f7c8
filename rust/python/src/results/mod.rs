//! What calls give back: receipts, versions, and what became of a push that failed.

pub(crate) mod failure;
pub(crate) mod in_doubt;
pub(crate) mod receipts;
pub(crate) mod versions;

pub(crate) use receipts::{Names, Receipts};
pub(crate) use versions::Versions;
