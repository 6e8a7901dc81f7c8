//! Coordination of workers: the groups that train a set of tensors together, the leases on portions of the
//! samples, and the portions of a batch that replicas compute together.

pub mod batch;
pub mod group;
pub mod portions;
