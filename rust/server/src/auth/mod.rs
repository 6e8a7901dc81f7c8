//! Who is at the other end of a connection, and what that peer may do.

pub(crate) mod peer;
pub(crate) mod principal;
pub(crate) mod rate;
pub(crate) mod secret;
