//! The records in a bucket that say which server owns each shard.

mod keeper;
mod list;
mod records;
mod release;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub(crate) use keeper::{Claiming, Owners, check_take_over};
pub use list::{Owned, owners};
pub use release::release;
