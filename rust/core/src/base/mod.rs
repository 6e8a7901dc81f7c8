//! The base of all other folders: errors, the only import of atomics and locks, element types, instruction
//! sets, seeded faults, and small values that belong to no other folder.

pub mod barrier;
pub mod block;
pub mod correction;
pub(crate) mod cut;
pub mod dtype;
pub mod error;
pub mod failpoint;
pub mod fault;
pub mod isa;
pub mod lock;
pub mod mode;
pub(crate) mod sync;
pub mod text;
