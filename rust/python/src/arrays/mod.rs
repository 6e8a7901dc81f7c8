//! Python's arrays: their memory borrowed without a copy, and memory of a shared store given to Python.

pub(crate) mod buffer;
pub(crate) mod gradient;
pub(crate) mod shared_view;
pub(crate) mod sparse;
