//! Addresses of this machine.

use crate::unix;

/// Returns whether an address is this machine's loopback or a Unix socket. A name that must be resolved is
/// not.
pub fn is_loopback(address: &str) -> bool {
    unix::path(address).is_some() || is_loopback_tcp(address)
}

/// Returns whether an address is this machine's loopback.
pub fn is_loopback_tcp(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let ip = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
}
