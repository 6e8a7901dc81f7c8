//! Coordination of workers: the groups that train a set of tensors together, the leases on portions of the
//! samples, the portions of a batch that replicas compute together, and the spaces where these
//! meet their coordinator.

pub mod batch;
pub mod group;
pub mod portions;
pub mod spaces;
