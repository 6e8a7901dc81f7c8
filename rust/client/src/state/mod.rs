//! What the links and the calls of one client share; it knows neither.

pub(crate) mod doubt;
pub(crate) mod fence;
pub(crate) mod lost;
pub(crate) mod map;
pub(crate) mod places;
pub(crate) mod run;
pub(crate) mod runtime;
pub(crate) mod shared;
pub(crate) mod spaces;
pub(crate) mod stats;
pub(crate) mod time;
pub(crate) mod waiting;
