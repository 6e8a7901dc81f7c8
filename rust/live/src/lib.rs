//! Many workers on the core of fastps under a virtual clock, in one thread: the live page runs them as
//! WebAssembly. `README.md` describes the calls and their memory.
//!
//! - `exports`: the C ABI, in safe Rust except the names
//! - `settings`, `describe`: settings of a caller, and their bounds
//! - `problems`: functions to minimize, with gradients
//! - `random`, `durations`: draws that are functions of seed, worker and step
//! - `server`, `worker`, `member`: a shard, its clients, and the state of each in virtual time
//! - `run`, `log`, `read`: the event loop, its record, and its state as numbers
//! - `simulation`: a run that can go back
//! - `fit`: the momentum of a path

mod describe;
mod durations;
mod exports;
mod fit;
mod log;
mod member;
mod problems;
mod random;
mod read;
mod run;
mod server;
mod settings;
mod simulation;
#[cfg(test)]
mod vectors;
mod worker;

pub use exports::*;
