//! fastps over gRPC: the server, the client, and what both agree on.
//!
//! A frame's way through the server: `incoming` (a connection, its principal and its pins) -> `native` (our own clients)
//! or tonic (all others) -> `data` (one task per stream; `convert` validates once) -> `node` (session, epoch, reservation) -> `fastps_core::shard` -> `answers`.
//! `control` serves the unary calls; on shard 0 they reach `map` and `portions`. `settle` asks
//! shard 0 (`first`) about reservations that clients left behind. `durable` has what a shard keeps on disk, `bucket` copies of it elsewhere.

mod allowance;
mod answers;
mod bucket;
mod checkpoint;
#[cfg(feature = "cli")]
pub mod cli;
pub mod client;
pub mod config;
mod control;
pub mod convert;
mod data;
mod deadline;
mod durable;
mod first;
mod gate;
mod incoming;
mod local;
mod map;
mod native;
mod node;
mod open_files;
mod openings;
mod portions;
mod rate;
mod recovering;
mod reservation;
mod room;
mod secret;
pub mod server;
mod session;
mod settle;
mod socket_file;
mod tls;
mod trim;
mod turn_away;
mod wire;

pub use client::{Client, ConnectOptions, Transport};
pub use config::ServerConfig;
pub use server::Server;
pub use tls::TlsFiles;
