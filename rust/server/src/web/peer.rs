//! Evidence of who asks, from a connection of the web listener.

use super::Subject;
use crate::auth::principal::Principal;
use crate::connection::accept::principal;
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;
use fastps_transport::Socket;
use http::HeaderMap;
use std::net::IpAddr;
use std::sync::Arc;

/// The other end of a connection.
#[derive(Debug)]
pub(super) struct WebPeer {
    address: Option<IpAddr>,
    /// The principal that its certificate names.
    certificate: Option<Arc<Principal>>,
    /// Set if the server asks for a certificate, and it has shown none.
    lacks_certificate: bool,
}

impl WebPeer {
    /// Without TLS.
    pub(super) fn plain(address: Option<IpAddr>) -> Self {
        Self { address, certificate: None, lacks_certificate: false }
    }

    /// After a handshake in which the server `asks` for a certificate. Fails if that names no valid
    /// principal.
    pub(super) fn secure(io: &Socket, asks: bool) -> Result<Self> {
        let lacks_certificate = asks && io.peer_certificate().is_none();
        Ok(Self { address: io.peer_address(), certificate: principal(io)?, lacks_certificate })
    }

    /// Fails unless it may read everything, by its certificate and the headers of its request.
    pub(super) fn check(&self, headers: &HeaderMap, subject: &Subject) -> Result<()> {
        if self.lacks_certificate {
            let error = Error::new(Kind::Denied, "the server asks for a client's certificate")
                .expected("one of its CAs (--tls-ca)", "none");
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
}
