//! The native client: the verbs of [`fastps_core::verbs::ParameterServer`] on a cluster of servers.
//!
//! For a push, `calls` checks and encodes it and makes one frame per slice; a `link` queues the frames of
//! one shard, sends them over its connections, and delivers the answers to the waiting call. A push still
//! unanswered when its call ends becomes a doubt, part of the `state` that links and calls share.

mod address;
mod calls;
mod client;
mod connect;
mod inspect;
mod link;
mod listing;
mod options;
mod resolver;
mod signed;
mod state;
mod stranger;

pub use calls::checkpoint::Snapshot;
pub use client::Client;
pub use fastps_transport::TlsFiles;
pub use inspect::{ClusterView, ShardStats, ShardView, inspect};
pub use listing::{ListedTensor, list};
pub use options::{Ack, ConnectOptions, Transport};
pub use resolver::Resolver;
pub use state::waiting::{WaitsFor, on_wait};
