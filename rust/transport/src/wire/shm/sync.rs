//! The atomics of the ring, which a model checker replaces (`rust/transport/loom/ring.rs`).

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
