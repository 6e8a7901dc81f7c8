//! One shard's part of the cluster: its sessions and reservations, and on shard 0 the map and the spaces.
//!
//! [`node::Node`] holds all of it together with the shard itself; every service shares one.

mod ended;
pub(crate) mod loss;
pub(crate) mod map;
pub(crate) mod membership;
pub(crate) mod node;
pub(crate) mod peers;
pub(crate) mod reaper;
pub(crate) mod reservation;
pub(crate) mod session;
pub(crate) mod spaces;
