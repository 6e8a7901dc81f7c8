//! The estimators: models that several threads train in shared memory without locks, and the queue from which
//! the threads take examples.

pub mod factorize;
pub mod linear;
pub(crate) mod work_queue;
