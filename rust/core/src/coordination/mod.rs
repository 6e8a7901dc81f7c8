//! Coordination of workers: the groups that train a set of tensors together, and the leases on portions of
//! the samples.

pub mod group;
pub mod portions;
