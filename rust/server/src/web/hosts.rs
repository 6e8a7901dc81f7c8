//! Requests that a browser sends for a foreign page are refused: their `Host` is a name that is not the
//! listener's (DNS rebinding), or they name a foreign `Origin`.

use fastps_transport::tls::ServerTls;
use http::uri::Authority;
use std::net::IpAddr;

/// The names of the listener.
#[derive(Debug)]
pub(super) struct Hosts {
    name: String,
    port: u16,
    /// Set if the listener speaks TLS; the names of the certificate are then its own, too.
    tls: Option<ServerTls>,
}

impl Hosts {
    /// The host that was asked for, and the actual port.
    pub(super) fn new(asked: &str, port: u16, tls: Option<ServerTls>) -> Self {
        let name = asked.rsplit_once(':').map_or(asked, |(host, _)| host);
        Self { name: name.trim_matches(['[', ']']).to_owned(), port, tls }
    }

    /// Returns whether a `Host` header, such as `localhost:7069`, names this listener. An address does, since
    /// a foreign page cannot make a browser send another one than its own.
    pub(super) fn knows(&self, host: &str) -> bool {
        let Ok(authority) = host.parse::<Authority>() else { return false };
        if host.contains('@') || authority.port_u16().is_some_and(|port| port != self.port) {
            return false;
        }
        let name = authority.host().trim_matches(['[', ']']);
        name.eq_ignore_ascii_case("localhost")
            || name.eq_ignore_ascii_case(&self.name)
            || name.parse::<IpAddr>().is_ok()
            || self.tls.as_ref().is_some_and(|tls| tls.is_for(name))
    }

    /// Returns whether an `Origin` header, such as `http://localhost:7069`, is of this listener.
    pub(super) fn is_own(&self, origin: &str) -> bool {
        let host = origin.strip_prefix(self.scheme()).and_then(|rest| rest.strip_prefix("://"));
        host.is_some_and(|host| host.contains(':') && self.knows(host))
    }

    pub(super) fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_names_and_addresses_are_known() {
        let hosts = Hosts::new("monitor.example:0", 7069, None);
        for own in ["localhost", "localhost:7069", "127.0.0.1:7069", "[::1]:7069", "Monitor.example:7069"] {
            assert!(hosts.knows(own), "{own}");
        }
        for other in [
            "",
            "evil.example",
            "evil.example:7069",
            "localhost:80",
            "a@localhost:7069",
            "local host",
            "127.0.0.1.evil:7069",
        ] {
            assert!(!hosts.knows(other), "{other}");
        }
        assert!(hosts.is_own("http://localhost:7069"));
        for origin in [
            "null",
            "http://evil.example",
            "https://localhost:7069",
            "http://localhost",
            "http://localhost:80",
        ] {
            assert!(!hosts.is_own(origin), "{origin}");
        }
    }
}
