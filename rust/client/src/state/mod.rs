//! State that the links and calls of one client share; it depends on neither.

pub(crate) mod doubt;
pub(crate) mod fence;
pub(crate) mod lost;
pub(crate) mod map;
pub(crate) mod memberships;
pub(crate) mod owners;
pub(crate) mod report;
pub(crate) mod resolution;
pub(crate) mod run;
pub(crate) mod runtime;
pub(crate) mod shared;
pub(crate) mod spaces;
pub(crate) mod stats;
pub(crate) mod time;
pub(crate) mod waiting;
