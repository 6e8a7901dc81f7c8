//! Addresses of this machine.

use crate::unix;

/// Returns whether an address is this machine's loopback or a Unix socket. A name that must be resolved is
/// not.
pub fn is_loopback(address: &str) -> bool {
    unix::path(address).is_some() || is_loopback_tcp(address)
}

/// Returns whether an address is this machine's loopback.
pub fn is_loopback_tcp(address: &str) -> bool {
    let host = host(address);
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// `host` of `host:port`.
pub(crate) fn host(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']'])
}
