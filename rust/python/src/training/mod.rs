//! Training on the caller's own arrays: a worker's local steps, and the estimators of `fastps.hogwild`.

pub(crate) mod estimators;
pub(crate) mod local_steps;
