//! A server's end of TLS: that of its shards, and that of its web listener.

use super::contents::{Contents, Identity, check_server};
use super::{ClientTls, HTTP2, READ_AHEAD_BYTES, Secure, TlsFiles, config, provider};
use fastps_core::error::{Error, Kind, Result};
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, ServerConfig};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

/// Name of HTTP/1 in the handshake.
const HTTP1: &[u8] = b"http/1.1";
/// Bytes read at a time by the web listener, whose requests are short.
const WEB_READ_AHEAD_BYTES: usize = 8 << 10;

/// A server's side. Its clones share the files' contents, which [`ServerTls::reload`] replaces.
#[derive(Clone)]
pub struct ServerTls {
    files: TlsFiles,
    /// Certificates of clients that are revoked.
    crl: Option<PathBuf>,
    present: Arc<RwLock<Present>>,
    /// Set if clients must show a certificate.
    pub asks: bool,
    /// TLS settings for calls to the other servers of its cluster.
    pub others: ClientTls,
}

/// Configuration of new connections.
struct Present {
    contents: Contents,
    /// The server's own certificate.
    own: CertificateDer<'static>,
    shards: TlsAcceptor,
    web: TlsAcceptor,
    /// Checks the certificates of clients of the shards.
    verifier: Option<Verifier>,
}

type Verifier = Arc<dyn ClientCertVerifier>;

/// The listener that shakes hands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Listener {
    /// A shard's. Where there are CAs, clients must show a certificate.
    Shard,
    /// The web listener. Clients may lack a certificate, since probes of health have none.
    Web,
}

impl ServerTls {
    /// Reads the files; `None` without files. `crl` lists revoked certificates of clients.
    pub fn load(files: &TlsFiles, crl: Option<&Path>) -> Result<Option<Self>> {
        if crl.is_some() && files.ca.is_none() {
            return Err(config("a list of revoked certificates is for servers that ask for certificates")
                .expected("tls_crl and tls_ca", "only tls_crl"));
        }
        if files.are_none() {
            return Ok(None);
        }
        let present = Contents::settled(files, crl, |contents| Present::new(files, crl, contents))?;
        let (files, crl) = (files.clone(), crl.map(Path::to_owned));
        let others = ClientTls::of_server(&files)?;
        let present = Arc::new(RwLock::new(present));
        Ok(Some(Self { asks: files.ca.is_some(), files, crl, present, others }))
    }

    /// Reads the files again. Returns whether new connections use others from now on; after an error they use
    /// the same as before.
    pub fn reload(&self) -> Result<bool> {
        let contents = Contents::read(&self.files, self.crl.as_deref())?;
        if contents == self.present().contents {
            return Ok(false);
        }
        let present = Present::new(&self.files, self.crl.as_deref(), contents)?;
        *self.present.write().unwrap_or_else(PoisonError::into_inner) = present;
        Ok(true)
    }

    fn present(&self) -> RwLockReadGuard<'_, Present> {
        self.present.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails if a client's certificate, which was valid at its handshake, has been revoked or has expired
    /// since. Its issuers come behind it.
    pub fn check_client(&self, chain: &[CertificateDer<'_>]) -> Result<()> {
        let verifier = self.present().verifier.clone();
        let (Some(verifier), Some((own, issuers))) = (verifier, chain.split_first()) else { return Ok(()) };
        let ended =
            |how: &str| Err(Error::new(Kind::Unauthenticated, format!("the client's certificate {how}")));
        match verifier.verify_client_cert(own, issuers, UnixTime::now()) {
            Err(rustls::Error::InvalidCertificate(CertificateError::Revoked)) => ended("was revoked"),
            Err(rustls::Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            )) => ended("has expired"),
            _ => Ok(()),
        }
    }

    /// Shakes hands with a client of a shard. On failure the client was informed, and the socket waits for it
    /// to read that.
    pub async fn accept(&self, tcp: TcpStream) -> Result<Secure, (io::Error, TcpStream)> {
        let acceptor = self.present().shards.clone();
        shake_hands(&acceptor, READ_AHEAD_BYTES, tcp).await
    }

    /// Shakes hands with a client of the web listener, as [`ServerTls::accept`] does; it speaks HTTP/1, and
    /// may lack a certificate.
    pub async fn accept_web(&self, tcp: TcpStream) -> Result<Secure, (io::Error, TcpStream)> {
        let acceptor = self.present().web.clone();
        shake_hands(&acceptor, WEB_READ_AHEAD_BYTES, tcp).await
    }

    /// Returns whether the server's certificate is for this host.
    pub fn is_for(&self, host: &str) -> bool {
        let present = self.present();
        let (own, name) = (ParsedCertificate::try_from(&present.own), ServerName::try_from(host));
        matches!((own, name), (Ok(own), Ok(name)) if verify_server_name(&own, &name).is_ok())
    }
}

impl Present {
    fn new(files: &TlsFiles, crl: Option<&Path>, contents: Contents) -> Result<Self> {
        let (Some(identity), Some(cert)) = (contents.identity(files)?, &files.cert) else {
            return Err(config("a server with TLS needs a certificate and its private key")
                .expected("tls_cert and tls_key", "only tls_ca"));
        };
        let chain = &identity.0;
        check_server(cert, chain)?;
        let own = chain.first().cloned().ok_or_else(|| config("a server with TLS needs a certificate"))?;
        let verifier = |listener| verifier((files, crl), &contents, listener);
        let acceptor = |verifier, listener| acceptor(files, &identity, verifier, listener);
        let shards = verifier(Listener::Shard)?;
        let web = acceptor(verifier(Listener::Web)?, Listener::Web)?;
        Ok(Self { own, shards: acceptor(shards.clone(), Listener::Shard)?, web, verifier: shards, contents })
    }
}

/// The check of clients' certificates, if the server asks for them.
fn verifier(
    (files, crl): (&TlsFiles, Option<&Path>),
    contents: &Contents,
    listener: Listener,
) -> Result<Option<Verifier>> {
    let Some(roots) = contents.roots(files)? else { return Ok(None) };
    let file = files.ca.as_deref().unwrap_or(Path::new(""));
    let unusable =
        |error| config(format!("the TLS certificates of {} are unusable: {error}", file.display()));
    // CAs without a list have revoked nothing.
    let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
        .with_crls(contents.revoked(crl)?)
        .allow_unknown_revocation_status();
    if listener == Listener::Web {
        verifier = verifier.allow_unauthenticated();
    }
    Ok(Some(verifier.build().map_err(unusable)?))
}

/// The end of a listener with this identity.
fn acceptor(
    files: &TlsFiles,
    (chain, key): &Identity,
    verifier: Option<Verifier>,
    listener: Listener,
) -> Result<TlsAcceptor> {
    let internal = |error| Error::new(Kind::Internal, format!("TLS: {error}"));
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(internal)?;
    let builder = match verifier {
        None => builder.with_no_client_auth(),
        Some(verifier) => builder.with_client_cert_verifier(verifier),
    };
    let mut server = builder
        .with_single_cert(chain.clone(), key.clone_key())
        .map_err(|error| files.wrong("a server cannot use the TLS certificate and key", error))?;
    let protocol = if listener == Listener::Web { HTTP1 } else { HTTP2 };
    server.alpn_protocols = vec![protocol.to_vec()];
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    Ok(TlsAcceptor::from(Arc::new(server)))
}

async fn shake_hands(
    acceptor: &TlsAcceptor,
    read_ahead: usize,
    tcp: TcpStream,
) -> Result<Secure, (io::Error, TcpStream)> {
    match acceptor.accept(BufReader::with_capacity(read_ahead, tcp)).into_fallible().await {
        Ok(stream) => Ok(Secure::from(stream)),
        Err((error, tcp)) => Err((error, tcp.into_inner())),
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls").field("asks", &self.asks).finish_non_exhaustive()
    }
}
