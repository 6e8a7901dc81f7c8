//! What workers agree on: who trains a set of tensors together, and who works on which portion of the data.

pub mod group;
pub mod portions;
