//! The server of fastps: each shard runs on a separate thread.
//!
//! A frame passes through `connection` (accepts it, knows the peer), `data` (one task per stream; the
//! transport's `convert` validates once), `cluster` (session, epoch, reservation) and `fastps_core::shard`
//! to `answers`. `control` serves the unary calls, `persistence` holds what a shard keeps on disk, and
//! `backup` its snapshots and their copies elsewhere. `web` shows metrics, health and state over HTTP.

mod admission;
mod answers;
mod auth;
pub mod backup;
mod cluster;
pub mod config;
mod connection;
mod control;
mod data;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod human;
pub mod json;
mod listeners;
mod machine_memory;
mod measures;
mod owner;
mod persistence;
pub mod server;
mod web;

pub use auth::principal::{Limits, Principal};
pub use auth::principal_uri;
pub use auth::role::Role;
pub use auth::scope::Scope;
pub use auth::token_file::{Entry as TokenEntry, TokenFile, hash as token_hash, time_text};
pub use config::{DEFAULT_WEB, ServerConfig, WebAddress};
pub use fastps_transport::TlsFiles;
pub use server::Server;
