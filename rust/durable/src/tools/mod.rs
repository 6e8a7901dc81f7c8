//! Tools that work on data directories without a server. `fastps checkpoint` and the servers' copies call
//! them.

pub mod checkpoint;
pub mod copy;
pub(crate) mod export;
pub(crate) mod history;
pub(crate) mod located;
pub(crate) mod reshape;
pub(crate) mod rewound;
pub(crate) mod shards;
pub(crate) mod source;
mod target;
