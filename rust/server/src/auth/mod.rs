//! The peer of a connection, and its permissions.

pub(crate) mod access;
pub(crate) mod audit;
pub(crate) mod budget;
pub(crate) mod caller;
pub(crate) mod peer;
pub(crate) mod principal;
pub mod principal_uri;
pub(crate) mod rate;
pub(crate) mod reload;
pub(crate) mod role;
pub(crate) mod scope;
pub(crate) mod secret;
pub(crate) mod tls_watch;
pub(crate) mod token_file;
