//! Whether this server owns its shard at present: what all its answers depend on.

mod clock;
mod ownership;

pub(crate) use clock::since_boot;
pub(crate) use ownership::Ownership;
