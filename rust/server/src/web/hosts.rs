//! Requests that a browser sends for a foreign page are refused: their `Host` is a name that is not the
//! listener's (DNS rebinding), or they name a foreign `Origin`.

use crate::config::ServerConfig;
use fastps_core::error::{Error, Kind, Result};
use fastps_transport::tls::ServerTls;
use http::uri::Authority;
use std::net::IpAddr;

/// The names of the listener.
#[derive(Debug)]
pub(super) struct Hosts {
    /// Names that are valid with the listener's port: those of this machine and of the cluster.
    own: Vec<String>,
    /// Names that are valid with every port, which a port forward or a proxy may have chosen.
    forwarded: Vec<String>,
    port: u16,
    /// Set if the listener speaks TLS; the names of the certificate are then its own, too.
    tls: Option<ServerTls>,
}

/// The host of `HOST:PORT` or `HOST`, without the full stop and the brackets that it may have.
fn host(address: &str) -> String {
    let host = address.parse::<Authority>().map_or_else(|_| address.to_owned(), |a| a.host().to_owned());
    host.trim_end_matches('.').trim_matches(['[', ']']).to_ascii_lowercase()
}

/// Fails if this is no name of a host.
fn check_name(name: &str) -> Result<()> {
    let is_host = name.parse::<Authority>().is_ok_and(|a| a.port().is_none() && !name.contains('@'));
    if is_host {
        return Ok(());
    }
    Err(Error::new(Kind::Config, "invalid name of the web listener")
        .expected("--web-host NAME, a host name without a port", format!("{name:?}")))
}

impl Hosts {
    /// The host that was asked for, the actual port, and the names in the settings. Fails if one of
    /// `--web-host` is none.
    pub(super) fn new(asked: &str, port: u16, config: &ServerConfig, tls: Option<ServerTls>) -> Result<Self> {
        config.web_hosts.iter().try_for_each(|name| check_name(name))?;
        let machine = rustix::system::uname();
        let machine = machine.nodename().to_str().unwrap_or_default();
        let cluster = config.cluster.iter().chain(&config.listen).chain(&config.advertise);
        let own = cluster.map(String::as_str).chain([asked, machine]).map(host).collect();
        let forwarded = config.web_hosts.iter().map(String::as_str).chain(["localhost"]).map(host).collect();
        Ok(Self { own, forwarded, port, tls })
    }

    /// Returns whether a `Host` header, such as `localhost:7069`, names this listener. An address does, since
    /// a foreign page cannot make a browser send another one than its own.
    pub(super) fn knows(&self, header: &str) -> bool {
        let Ok(authority) = header.parse::<Authority>() else { return false };
        if header.contains('@') {
            return false;
        }
        let name = host(authority.host());
        if name.parse::<IpAddr>().is_ok() || self.forwarded.contains(&name) {
            return true;
        }
        authority.port_u16().is_none_or(|port| port == self.port)
            && (self.own.contains(&name) || self.tls.as_ref().is_some_and(|tls| tls.is_for(&name)))
    }

    /// Returns whether an `Origin` header, such as `http://localhost:7069`, is of this listener, which was
    /// asked by this `Host` header.
    pub(super) fn is_own(&self, origin: &str, asked: Option<&str>) -> bool {
        let from = origin.strip_prefix(self.scheme()).and_then(|rest| rest.strip_prefix("://"));
        from.is_some_and(|from| {
            asked.is_some_and(|asked| asked.eq_ignore_ascii_case(from))
                || self.knows(from) && from.ends_with(&format!(":{}", self.port))
        })
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
        let config = ServerConfig {
            advertise: Some("fastps-0.models.svc".to_owned()),
            cluster: vec!["host-a:7070".to_owned(), "[2001:db8::1]:7070".to_owned()],
            web_hosts: vec!["Metrics.example".to_owned()],
            ..ServerConfig::default()
        };
        let hosts = Hosts::new("monitor.example:0", 7069, &config, None).unwrap();
        let machine = rustix::system::uname().nodename().to_str().unwrap().to_owned();
        for own in [
            "localhost",
            "localhost:7069",
            "localhost:9999",
            "127.0.0.1:9999",
            "[::1]:7069",
            "10.1.2.3:30069",
            "Monitor.example:7069",
            "fastps-0.models.svc:7069",
            "fastps-0.models.svc.",
            "host-a:7069",
            "metrics.example:443",
            &machine,
        ] {
            assert!(hosts.knows(own), "{own}");
        }
        for wrong in ["", "a:1", "a b", "a@b"] {
            let config = ServerConfig { web_hosts: vec![wrong.to_owned()], ..ServerConfig::default() };
            let error = Hosts::new("localhost:0", 7069, &config, None).unwrap_err().to_string();
            assert!(error.contains("--web-host NAME") && error.contains(&format!("{wrong:?}")), "{error}");
        }
        for other in [
            "",
            "evil.example",
            "evil.example:7069",
            "host-a:7070",
            "a@localhost:7069",
            "local host",
            "127.0.0.1.evil:7069",
        ] {
            assert!(!hosts.knows(other), "{other}");
        }
        assert!(hosts.is_own("http://localhost:7069", Some("127.0.0.1:7069")));
        assert!(hosts.is_own("http://localhost:9999", Some("localhost:9999")));
        for origin in [
            "null",
            "http://evil.example",
            "https://localhost:7069",
            "http://localhost",
            "http://localhost:80",
        ] {
            assert!(!hosts.is_own(origin, Some("localhost:7069")), "{origin}");
        }
    }
}
