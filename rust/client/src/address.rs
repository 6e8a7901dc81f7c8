//! Addresses of servers: `host:port`, or `unix:///path`.

use crate::options::Transport;
use fastps_core::error::{Error, Kind, Result};
use fastps_transport::loopback::is_loopback;
use fastps_transport::unix;
use http::uri::Authority;

/// Returns whether two addresses (`host:port`) name the same place, judging by their text.
pub(crate) fn is_same(a: &str, b: &str) -> bool {
    let port = |address: &str| address.rsplit_once(':').map(|(_, port)| port.to_owned());
    a == b || (is_loopback(a) && is_loopback(b) && port(a) == port(b))
}

/// Fails if a Unix socket's address is invalid, or is to be reached over TCP.
pub(crate) fn check_local(address: &str, transport: Transport) -> Result<()> {
    let unusable = |message| Error::new(Kind::Config, message);
    match unix::path(address) {
        None if address.starts_with("unix:") => {
            Err(unusable("not the address of a Unix socket").expected("unix:///path", address))
        }
        None if !has_port(address) => {
            Err(unusable("invalid address").expected("host:port or unix:///path", format!("{address:?}")))
        }
        None => Ok(()),
        Some(_) if transport == Transport::Tcp => {
            Err(unusable("a Unix socket is not reached over TCP").expected("host:port", address))
        }
        Some(path) if !path.is_absolute() => {
            Err(unusable("not the address of a Unix socket").expected("unix:///path", address))
        }
        Some(path) => unix::check_path(path),
    }
}

/// Returns whether the address has a valid port: otherwise HTTP's default would be used.
fn has_port(address: &str) -> bool {
    let authority = address.parse::<Authority>();
    authority.is_ok_and(|a| a.port_u16().is_some_and(|port| port != 0) && !address.contains('@'))
}

#[cfg(test)]
mod tests {
    use super::{has_port, is_same};
    use fastps_transport::loopback::is_loopback;

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for good in ["host-a:7070", "127.0.0.1:1", "[::1]:65535"] {
            assert!(has_port(good), "{good}");
        }
        for bad in
            ["", "host-a", "host-a:", "host-a:0", "host-a:65536", "http://host-a:7070", "me@host-a:1", "::1"]
        {
            assert!(!has_port(bad), "{bad}");
        }
    }

    #[test]
    fn one_place_may_have_two_names() {
        assert!(is_same("host-a:7070", "host-a:7070"));
        assert!(is_same("localhost:7070", "127.0.0.1:7070"));
        assert!(!is_same("127.0.0.1:7070", "127.0.0.1:7071"));
        assert!(!is_same("host-a:7070", "127.0.0.1:7070"));
    }

    #[test]
    fn loopback_and_network_differ() {
        for (address, expected) in [
            ("127.0.0.1:7070", true),
            ("127.3.2.1:7070", true),
            ("localhost:7070", true),
            ("[::1]:7070", true),
            ("192.168.0.7:7070", false),
            ("[fe80::1]:7070", false),
            ("unix:///run/fastps", true),
            ("host-a:7070", false),
        ] {
            assert_eq!(is_loopback(address), expected, "{address}");
        }
    }
}
