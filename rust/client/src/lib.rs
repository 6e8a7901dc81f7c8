//! The native client: the verbs of [`fastps_core::verbs::ParameterServer`] on a cluster of servers.
//!
//! A push's way: `calls` checks, encodes and makes one frame per slice; a `link` queues them per shard, sends
//! them over its connections and takes what comes back to the call, where the caller waits. What stays
//! unanswered when the caller gives up becomes a doubt, which is part of the `state` that links and calls
//! share.

mod address;
mod calls;
mod client;
mod connect;
mod link;
mod options;
mod state;

pub use calls::checkpoint::Snapshot;
pub use client::Client;
pub use fastps_transport::TlsFiles;
pub use options::{Ack, ConnectOptions, Transport};
pub use state::waiting::{WaitsFor, on_wait};
