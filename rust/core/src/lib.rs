//! The core of fastps: what a parameter server does with bytes, without network, clock, async or Python.
//!
//! One push: [`finite`] check -> [`codec`] (with error feedback) -> [`frame`] -> [`shard`] -> [`mod@slice`], in its turn ->
//! `apply`: fused decode + optimizer step, block by block -> version, [`record`] -> receipt. A pull runs it backwards.
//!
//! Who may import whom: `error, sync, dtype, block <- isa <- {params | codec | optim} <- apply <- policy <- shard <-
//! store`; the modules in braces never import each other.

mod apply;
pub mod barrier;
pub mod block;
mod clients;
pub mod codec;
pub mod correction;
mod cut;
pub mod directory;
pub mod dtype;
pub mod error;
#[cfg(not(loom))]
pub mod factorize;
pub mod failpoint;
pub mod fault;
pub mod finite;
pub mod frame;
pub mod group;
mod held;
pub mod identity;
pub mod isa;
#[cfg(not(loom))]
pub mod linear;
pub mod litmus;
pub mod lock;
pub mod mode;
pub mod optim;
#[cfg(not(loom))] // The models end at the shard.
pub mod outcome;
#[cfg(not(loom))]
pub mod outgoing;
mod params;
#[cfg(not(loom))]
mod passes;
pub mod placement;
pub mod policy;
pub mod portions;
pub mod record;
pub mod rows;
pub mod shard;
pub mod slice;
pub mod sparse;
#[cfg(not(loom))]
pub mod store;
mod sync;
pub mod tensor;
pub mod verbs;
