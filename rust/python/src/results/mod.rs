//! Results of calls: receipts, versions, and the errors of failed pushes.

pub(crate) mod failure;
pub(crate) mod in_doubt;
pub(crate) mod receipts;
pub(crate) mod versions;

pub(crate) use receipts::{Names, Receipts};
pub(crate) use versions::Versions;
