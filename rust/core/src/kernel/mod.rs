//! Arithmetic on the elements of one slice: optimizers, codecs, and the loops that run both block by block.

pub(crate) mod apply;
pub mod codec;
pub mod finite;
pub mod litmus;
pub mod local_step;
pub mod optim;
pub mod rows;
