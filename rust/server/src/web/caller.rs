//! The caller of a request to the web listener: its address and its certificate.

use super::site::Site;
use crate::auth::access::Access;
use crate::auth::principal::Principal;
use crate::connection::accept::principal;
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;
use fastps_transport::Socket;
use fastps_transport::tls::CertificateDer;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use std::net::IpAddr;
use std::sync::Arc;

/// The other end of a connection.
#[derive(Debug)]
pub(super) struct WebCaller {
    address: Option<IpAddr>,
    /// The principal that its certificate names.
    certificate: Option<Arc<Principal>>,
    /// The certificate that it has shown, its issuers behind it.
    chain: Vec<CertificateDer<'static>>,
    /// Set if the server asks for a certificate, and it has shown none.
    lacks_certificate: bool,
}

impl WebCaller {
    /// Without TLS.
    pub(super) fn plain(address: Option<IpAddr>) -> Self {
        Self { address, certificate: None, chain: Vec::new(), lacks_certificate: false }
    }

    /// After a handshake in which the server `asks` for a certificate. Fails if that names no valid
    /// principal.
    pub(super) fn secure(io: &Socket, asks: bool, access: &Access) -> Result<Self> {
        let chain = io.peer_certificates().unwrap_or_default().to_vec();
        let lacks_certificate = asks && chain.is_empty();
        Ok(Self { address: io.peer_address(), certificate: principal(io, access)?, chain, lacks_certificate })
    }

    /// Returns whether a request comes without the credentials that the server asks for, as probes of health
    /// do.
    pub(super) fn is_bare(&self, headers: &HeaderMap, site: &Site) -> bool {
        let shows = self.certificate.is_some() || headers.contains_key(AUTHORIZATION);
        self.lacks_certificate || site.subject.access.asks() && !shows
    }

    /// Fails unless it may read everything, by its certificate, which may be revoked by now, and the headers
    /// of its request.
    pub(super) fn check(&self, headers: &HeaderMap, site: &Site) -> Result<()> {
        let subject = &site.subject;
        if let Err(error) = self.check_certificate(site) {
            subject.access.refused_by_tls(self.address, &error);
            return Err(error);
        }
        let origin = (self.certificate.as_ref(), self.address);
        let known = subject.access.admit(origin, headers, pb::Role::Reader)?;
        if known.principal.scope.is_everything() {
            return Ok(());
        }
        Err(Error::new(Kind::Denied, "the page shows all groups and namespaces"))
    }
    /// Fails without the certificate that the server asks for, whatever token is shown.
    fn check_certificate(&self, site: &Site) -> Result<()> {
        if self.lacks_certificate {
            let error = Error::new(Kind::Denied, "the server asks for a client's certificate");
            return Err(error.expected("one of its CAs (--tls-ca)", "none"));
        }
        let Some(tls) = &site.tls else { return Ok(()) };
        tls.check_client(&self.chain).map_err(|error| Error::new(Kind::Denied, error.message.clone()))
    }
}
