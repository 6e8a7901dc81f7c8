//! Purpose of a certificate.

use fastps_core::error::{Error, Kind, Result};
use fastps_server::{Role, Scope, principal_uri};
use rcgen::string::Ia5String;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyUsagePurpose, SanType,
};
use std::path::PathBuf;

/// Holder of a certificate.
#[derive(Clone, Debug)]
pub(crate) enum Holder {
    /// A server that is reached at these host names and IP addresses. It proves itself with the same
    /// certificate to the other servers.
    Server {
        /// At least one.
        hosts: Vec<String>,
    },
    /// A client, which proves who it is and what it may do.
    Client {
        /// Name of its principal.
        name: String,
        /// Its role.
        role: Role,
        /// Its groups and namespaces.
        scope: Scope,
    },
}

/// A certificate that is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) holder: Holder,
    pub(crate) days: u32,
    /// A certificate request in PEM form, whose public key is signed; `None`: a new key.
    pub(crate) csr: Option<String>,
    /// Name of the files; `None`: that of the holder.
    pub(crate) file_name: Option<String>,
}

/// Files that were written.
#[derive(Debug)]
pub(crate) struct Issued {
    pub(crate) certificate: PathBuf,
    /// `None`: the holder has its key.
    pub(crate) key: Option<PathBuf>,
}

impl Request {
    /// The name of the holder: of a server, its first host. Fails for hosts that no certificate has.
    fn name(&self) -> Result<&str> {
        let name = match &self.holder {
            Holder::Client { name, .. } => Some(name),
            Holder::Server { hosts } => {
                hosts.iter().try_for_each(|host| check_host(host))?;
                hosts.first()
            }
        };
        name.map(String::as_str).ok_or_else(|| Error::new(Kind::Config, "a server has at least one host"))
    }

    /// The name of the files, without their ending.
    pub(crate) fn file_name(&self) -> Result<String> {
        let name = match &self.file_name {
            Some(name) => name,
            None => self.name()?,
        };
        let name = plain(name);
        if name == "ca" || name.ends_with("-key") {
            return Err(Error::new(Kind::Config, "the file name is reserved")
                .expected("--name OTHER", format!("{name:?}")));
        }
        principal_uri::check_name(&name)?;
        Ok(name)
    }

    /// The contents of the certificate, without its time.
    pub(crate) fn params(&self) -> Result<CertificateParams> {
        let wrong = |error: rcgen::Error| {
            Error::new(Kind::Config, format!("a certificate cannot have these names: {error}"))
                .expected("host names and IP addresses", format!("{:?}", self.holder))
        };
        let (hosts, role, scope) = match &self.holder {
            Holder::Server { hosts } => (hosts.as_slice(), Role::Server, &Scope::Everything),
            Holder::Client { role, scope, .. } => (&[][..], *role, scope),
        };
        let name = self.name()?;
        let uri = principal_uri::text(&plain(name), role, scope)?;
        let mut params = CertificateParams::new(hosts).map_err(wrong)?;
        params.subject_alt_names.push(SanType::URI(Ia5String::try_from(uri).map_err(wrong)?));
        params.distinguished_name = DistinguishedName::new();
        // RFC 5280 limits it to 64 characters; nothing reads it.
        params.distinguished_name.push(DnType::CommonName, name.chars().take(64).collect::<String>());
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if matches!(self.holder, Holder::Server { .. }) {
            params.extended_key_usages.insert(0, ExtendedKeyUsagePurpose::ServerAuth);
        }
        params.use_authority_key_identifier_extension = true;
        Ok(params)
    }
}

/// A name that fits into a file name and a URI: without the colons of IPv6 and the star of any host.
pub(crate) fn plain(name: &str) -> String {
    name.replace(':', "-").replace('*', "any")
}

/// Fails for a host with a port, a scheme or other parts that no certificate has.
fn check_host(host: &str) -> Result<()> {
    let label = |label: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        !label.is_empty() && label.len() <= 63 && label.chars().all(fits)
    };
    let name = host.strip_prefix("*.").unwrap_or(host);
    if host.parse::<std::net::IpAddr>().is_ok() || host.len() <= 253 && name.split('.').all(label) {
        return Ok(());
    }
    Err(Error::new(Kind::Config, "not a name that a certificate can have")
        .expected("host names and IP addresses, without ports", format!("{host:?}")))
}
