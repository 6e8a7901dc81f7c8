//! Arithmetic on the elements of one slice: optimizers, codecs, and the loops that run both block by block.

pub(crate) mod apply;
pub mod codec;
pub(crate) mod combine;
pub mod ema;
pub mod finite;
pub(crate) mod grid;
pub mod litmus;
pub mod local_step;
pub mod optim;
pub(crate) mod overflow;
pub(crate) mod real;
pub(crate) mod robust;
pub mod rounding;
pub mod rows;
pub(crate) mod sums;
