//! The addresses of running servers that a command was given, or those of the environment.

use fastps_core::error::{Error, Result};

/// Help of addresses: clippy would take the variable for an item of the code.
pub(crate) const ADDRESSES: &str = "Addresses of some or all shards: host:port, or unix:// and a path [default: those in FASTPS_ADDRESSES, else 127.0.0.1:7070]";

/// Calls with these addresses, or those of the environment, or the default one, which an error then names.
pub(crate) fn with_addresses<T>(given: Vec<String>, call: impl FnOnce(&[String]) -> Result<T>) -> Result<T> {
    if !given.is_empty() {
        return call(&given);
    }
    let set = std::env::var("FASTPS_ADDRESSES").unwrap_or_default();
    let (text, source) = match set.trim() {
        "" => ("127.0.0.1:7070", "the default address, since none is given and FASTPS_ADDRESSES is not set"),
        set => (set, "the value of FASTPS_ADDRESSES, since no address is given"),
    };
    let addresses: Vec<_> = text.split(',').map(|one| one.trim().to_owned()).collect();
    call(&addresses).map_err(|mut error: Error| {
        error.message = format!("{} ({text} is {source})", error.message);
        error
    })
}
