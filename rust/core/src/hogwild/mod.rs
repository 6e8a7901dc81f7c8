//! The estimators: models that threads train in one memory without locks, and how the threads share out the
//! examples.

pub mod factorize;
pub mod linear;
pub(crate) mod work_queue;
