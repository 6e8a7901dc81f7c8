//! Snapshots and logs on real files: everything comes back bit for bit, and no damage to any file yields a
//! wrong value.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod damage;
mod log;
mod recovery;
mod rewind;
mod snapshots;
mod tools;
mod vectors;
mod world;
