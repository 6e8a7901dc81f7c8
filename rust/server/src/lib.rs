//! The server of fastps: each shard on a thread of its own.
//!
//! A frame's way through it: `connection` (accepts it, knows the peer) -> `data` (one task per stream; the
//! transport's `convert` validates once) -> `cluster` (session, epoch, reservation) -> `fastps_core::shard`
//! -> `answers`. `control` serves the unary calls. `persistence` has what a shard keeps on disk, `backup` its
//! snapshots and their copies elsewhere.

mod answers;
mod auth;
pub mod backup;
mod cluster;
pub mod config;
mod connection;
mod control;
mod data;
pub mod human;
mod persistence;
pub mod server;

pub use config::ServerConfig;
pub use fastps_transport::TlsFiles;
pub use server::Server;
