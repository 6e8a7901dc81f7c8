//! Training on the caller's own arrays: a worker's local steps and checks, and the estimators of
//! `fastps.hogwild`.

pub(crate) mod check;
pub(crate) mod estimators;
pub(crate) mod local_steps;
