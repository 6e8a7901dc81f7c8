//! Python's arrays, whose memory is borrowed without a copy, and views of a shared store's memory.

pub(crate) mod buffer;
pub(crate) mod encoded;
pub(crate) mod gradient;
pub(crate) mod shared_view;
pub(crate) mod sparse;
