//! The core of fastps: the work of a parameter server on bytes, without network, clock, async or Python.
//!
//! One push: [`finite`] check -> [`codec`] (with error feedback) -> [`frame`] -> [`shard`] -> [`mod@slice`],
//! under its lock -> `apply`: fused decode + optimizer step, block by block -> version, [`record`] ->
//! receipt. A pull runs it backwards.
//!
//! A folder imports only folders to its left:
//!
//! ```text
//! base <- memory <- kernel <- tensor <- slice <- coordination <- { verbs <- push | shard } <- store
//! base <- memory <- hogwild
//! ```
//!
//! - `base`: errors, locks and atomics, element types, instruction sets, seeded faults
//! - `memory`: the bytes of a slice: plain, copy-on-write, racing, shared by processes; and their meter
//! - `kernel`: optimizers, codecs, and the loops that run both block by block
//! - `tensor`: specs of tensors, their slices and placement, versions, programs for vectors
//! - `slice`: the unit that is placed, locked, versioned and changed whole
//! - `coordination`: groups of workers, portions of data, batches of portions, spaces of vectors
//! - `verbs`: the calls of a parameter server and their values
//! - `push`: a push checked before it leaves, and its answers afterwards
//! - `shard`: the slices of one server
//! - `store`: a parameter server in the caller's memory
//! - `hogwild`: estimators trained by threads without locks
//!
//! Other crates name modules without their folder, by the name of their file: `fastps_core::error`.

mod base;
mod coordination;
#[cfg(not(loom))] // The models end at the shard.
mod hogwild;
mod kernel;
mod memory;
mod push;
pub mod shard;
pub mod slice;
#[cfg(not(loom))]
pub mod store;
pub mod tensor;
pub mod verbs;

pub use base::{barrier, block, correction, dtype, error, failpoint, fault, isa, lock, mode, text};
pub use coordination::{batch, group, portions, spaces};
#[cfg(not(loom))]
pub use hogwild::{factorize, linear};
pub use kernel::{codec, ema, finite, litmus, local_step, optim, rounding, rows};
pub use push::sparse;
#[cfg(not(loom))]
pub use push::{outcome, outgoing, registration, residue};
pub use slice::{asynchrony, frame, identity, policy, record};
pub use tensor::shared_directory;
pub use tensor::{placement, program};
