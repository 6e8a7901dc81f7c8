//! The contents of a certificate, beyond what the handshake checks.

use fastps_core::error::{Error, Kind, Result};
use std::net::IpAddr;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The contents of a certificate. Times are in seconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Host names and IP addresses.
    pub names: Vec<String>,
    /// URIs among its alternative names.
    pub uris: Vec<String>,
    /// Its subject.
    pub subject: String,
    /// The subject of its issuer.
    pub issuer: String,
    /// Its serial number, in hexadecimal digits.
    pub serial: String,
    /// First moment of its validity.
    pub not_before: i64,
    /// Last moment of its validity.
    pub not_after: i64,
    /// Set if it may sign others.
    pub is_ca: bool,
    /// The bits of its public key.
    pub public_key: Vec<u8>,
}

impl Certificate {
    /// Reads a certificate in DER form.
    pub fn parse(der: &[u8]) -> Result<Self> {
        let unreadable = |error: &dyn std::fmt::Display| {
            Error::new(Kind::Config, format!("a TLS certificate cannot be read: {error}"))
        };
        let (_, found) = X509Certificate::from_der(der).map_err(|error| unreadable(&error))?;
        let (mut names, mut uris) = (Vec::new(), Vec::new());
        let alternatives = found.subject_alternative_name().map_err(|error| unreadable(&error))?;
        for name in alternatives.iter().flat_map(|extension| &extension.value.general_names) {
            match name {
                GeneralName::DNSName(name) => names.push((*name).to_owned()),
                GeneralName::IPAddress(bytes) => names.extend(ip(bytes)),
                GeneralName::URI(uri) => uris.push((*uri).to_owned()),
                _ => {}
            }
        }
        Ok(Self {
            names,
            uris,
            subject: found.subject().to_string(),
            issuer: found.issuer().to_string(),
            serial: found.raw_serial_as_string().replace(':', ""),
            not_before: found.validity().not_before.timestamp(),
            not_after: found.validity().not_after.timestamp(),
            is_ca: found.is_ca(),
            public_key: found.public_key().subject_public_key.data.to_vec(),
        })
    }
}

fn ip(bytes: &[u8]) -> Option<String> {
    let v4 = || <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    let v6 = || <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from);
    v4().or_else(v6).map(|address| address.to_string())
}
