//! TLS 1.3 by rustls: reads the PEM files, shakes hands at both ends, and explains failures.
//!
//! AWS-LC provides the cryptography: like ring it needs a C compiler and nothing else, and its AES-GCM is
//! faster (11.4 against 9.6 GB/s a core with VAES; 7.0 against 6.3 through rustls). Sessions are not
//! resumed, so a certificate that has lost trust is not revived by a ticket.

pub mod certificate;
mod contents;
mod server;

use crate::loopback::host;
use contents::{Contents, Identity};
use fastps_core::error::{Error, Kind, Result};
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite};
pub use rustls::pki_types::CertificateDer;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription as Alert, CertificateError, ClientConfig, RootCertStore};
pub use server::ServerTls;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// A connection with TLS.
pub type Secure = tokio_rustls::TlsStream<BufReader<TcpStream>>;

/// Bytes read at a time: rustls itself reads 4 KiB.
const READ_AHEAD_BYTES: usize = 256 << 10;
/// Memory of one connection: read-ahead, encrypted bytes not written yet, and rustls's state.
pub const TLS_CONNECTION_BYTES: u64 = READ_AHEAD_BYTES as u64 + (128 << 10);
/// Name of HTTP/2 in the handshake.
const HTTP2: &[u8] = b"h2";
/// First byte of every TLS connection: a handshake record.
pub const HANDSHAKE_RECORD: u8 = 0x16;

/// The PEM files of one end; without files there is no TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate that this end shows, its issuers behind it.
    pub cert: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
    /// The CAs that must have signed the other end's certificate. A server with CAs asks clients for
    /// certificates.
    pub ca: Option<PathBuf>,
}

impl TlsFiles {
    /// Returns whether no file is given.
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// Error about the contents of the files.
    fn wrong(&self, what: &str, error: rustls::Error) -> Error {
        let name = |file: &Option<PathBuf>| file.as_deref().unwrap_or(Path::new("")).display().to_string();
        let (cert, key) = (name(&self.cert), name(&self.key));
        match error {
            rustls::Error::InconsistentKeys(_) => {
                config(format!("{key} is the private key of another certificate than that of {cert}"))
            }
            error => config(format!("{what} of {cert} and {key}: {error}")),
        }
    }
}

fn config(message: impl Into<String>) -> Error {
    Error::new(Kind::Config, message)
}

/// AES-128-GCM first: the fastest, and beyond doubt.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..aws_lc_rs::default_provider()
    })
}

/// A client's side. It looks at its files again before each handshake.
#[derive(Clone)]
pub struct ClientTls {
    files: TlsFiles,
    /// Set for a server, which trusts its own issuers where it has no CAs.
    is_server: bool,
    latest: Arc<Mutex<Latest>>,
    /// Required name of servers' certificates; `None`: the host of their address.
    name: Option<ServerName<'static>>,
}

/// Contents at the last reading.
struct Latest {
    contents: Contents,
    connector: TlsConnector,
    /// The last error of the files, already logged; `None`: they are good.
    trouble: Option<String>,
}

impl ClientTls {
    /// Reads the files; `None` without files.
    pub fn load(files: &TlsFiles, name: Option<&str>) -> Result<Option<Self>> {
        if files.ca.is_none() {
            if files.are_none() && name.is_none() {
                return Ok(None);
            }
            return Err(config("a client with TLS needs the CA that has signed the servers' certificates")
                .expected("tls_ca", "only other TLS options"));
        }
        Self::of(files, false, name.map(server_name).transpose()?).map(Some)
    }

    /// A server as a client of the others: they have the same CA, or a certificate of the same issuers.
    fn of_server(files: &TlsFiles) -> Result<Self> {
        Self::of(files, true, None)
    }

    fn of(files: &TlsFiles, is_server: bool, name: Option<ServerName<'static>>) -> Result<Self> {
        let latest = Contents::settled(files, None, |contents| {
            let connector = connector(files, is_server, &contents)?;
            Ok(Latest { contents, connector, trouble: None })
        })?;
        let latest = Arc::new(Mutex::new(latest));
        Ok(Self { files: files.clone(), is_server, latest, name })
    }

    /// The end with the present contents of the files, or with the last good ones.
    fn connector(&self) -> TlsConnector {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let read = Contents::read(&self.files, None).and_then(|contents| {
            if contents == latest.contents {
                return Ok(None);
            }
            connector(&self.files, self.is_server, &contents).map(|connector| Some((contents, connector)))
        });
        match read {
            Ok(changed) => {
                latest.trouble = None;
                if let Some((contents, connector)) = changed {
                    (latest.contents, latest.connector) = (contents, connector);
                    tracing::info!("TLS files were read again");
                }
            }
            Err(error) => {
                let text = error.to_string();
                if latest.trouble.as_ref() != Some(&text) {
                    tracing::error!(%error, "the last good TLS files stay in force");
                    latest.trouble = Some(text);
                }
            }
        }
        latest.connector.clone()
    }

    pub(crate) async fn handshake(&self, address: &str, tcp: TcpStream) -> io::Result<Secure> {
        let name = match &self.name {
            Some(name) => name.clone(),
            None => server_name(host(address)).map_err(|error| denied(error.to_string()))?,
        };
        let stream = self.connector().connect(name, BufReader::with_capacity(READ_AHEAD_BYTES, tcp)).await;
        stream.map(Secure::from).map_err(|error| match of_rustls(&error) {
            Some(rustls::Error::InvalidMessage(_)) => denied("the server does not speak TLS here".to_owned()),
            None if error.kind() == io::ErrorKind::UnexpectedEof => {
                io::Error::new(error.kind(), "the server closed the connection within the TLS handshake")
            }
            _ => client_error(error),
        })
    }
}

/// A client's end with these contents of its files.
fn connector(files: &TlsFiles, is_server: bool, contents: &Contents) -> Result<TlsConnector> {
    let identity = contents.identity(files)?;
    let (roots, identity) = match (contents.roots(files)?, identity) {
        (Some(roots), identity) => (roots, identity),
        (None, Some(identity)) if is_server => (own_issuers(&identity), None),
        (None, _) => (RootCertStore::empty(), None),
    };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(Kind::Internal, format!("TLS: {error}")))?
        .with_root_certificates(roots);
    let mut client = match identity {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => builder
            .with_client_auth_cert(chain, key)
            .map_err(|error| files.wrong("a client cannot use the TLS certificate and key", error))?,
    };
    client.alpn_protocols = vec![HTTP2.to_vec()];
    client.resumption = Resumption::disabled();
    Ok(Arc::new(client).into())
}

fn own_issuers((chain, _): &Identity) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    // A chain without issuers is a self-signed certificate.
    let issuers = chain.len().min(2) - 1;
    roots.add_parsable_certificates(chain.iter().skip(issuers).cloned());
    roots
}

/// Scheme of an address in a request.
pub fn scheme(tls: Option<&ClientTls>) -> &'static str {
    if tls.is_some() { "https" } else { "http" }
}

fn server_name(name: &str) -> Result<ServerName<'static>> {
    ServerName::try_from(name.to_owned()).map_err(|_| {
        config("not a name that a certificate can have").expected("a host name or an IP address", name)
    })
}

/// The name of a TLS alert.
fn named(alert: Alert) -> &'static str {
    alert.as_str().unwrap_or("an unknown alert")
}

/// A name such as `NoCipherSuitesInCommon` in words, without the text in brackets.
fn words(name: &str) -> String {
    let mut words = String::new();
    for letter in name.chars().take_while(char::is_ascii_alphanumeric) {
        if letter.is_ascii_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.push(letter.to_ascii_lowercase());
    }
    words
}

fn denied(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, message)
}

fn of_rustls(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// A client's error when TLS fails; `PermissionDenied` if a retry cannot help.
pub fn client_error(error: io::Error) -> io::Error {
    use rustls::Error as Tls;
    let Some(tls) = of_rustls(&error) else {
        return error;
    };
    denied(match tls {
        Tls::InvalidCertificate(reason) => format!("TLS: the server's certificate {}", distrust(reason)),
        Tls::AlertReceived(Alert::CertificateRequired) => {
            "TLS: the server asks for a client's certificate (tls_cert and tls_key)".to_owned()
        }
        Tls::AlertReceived(
            alert @ (Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::DecryptError),
        ) => format!("TLS: the server does not accept the client's certificate ({})", named(*alert)),
        Tls::AlertReceived(
            alert @ (Alert::ProtocolVersion | Alert::HandshakeFailure | Alert::NoApplicationProtocol),
        ) => format!("TLS: client and server have nothing in common ({})", named(*alert)),
        Tls::PeerIncompatible(reason) => {
            format!("TLS: client and server have nothing in common ({})", words(&format!("{reason:?}")))
        }
        _ => return io::Error::new(error.kind(), format!("TLS: {tls}")),
    })
}

/// Reason for not trusting a certificate.
fn distrust(reason: &CertificateError) -> String {
    use CertificateError as Bad;
    match reason {
        Bad::UnknownIssuer | Bad::BadSignature => "was not signed by a CA of tls_ca".to_owned(),
        Bad::Expired | Bad::ExpiredContext { .. } => "has expired".to_owned(),
        Bad::NotValidYet | Bad::NotValidYetContext { .. } => "is not valid yet".to_owned(),
        Bad::NotValidForName => "has another name".to_owned(),
        Bad::NotValidForNameContext { expected, presented } => {
            // As `DnsName("host-a")`, `IpAddress(127.0.0.1)`.
            let name = |text: &String| match text.split_once('(') {
                Some((_, name)) => name.trim_matches(['"', ')']).to_owned(),
                None => text.clone(),
            };
            let presented: Vec<_> = presented.iter().map(name).collect();
            format!("is for {}, not for {}", presented.join(", "), expected.to_str())
        }
        other => format!("is not accepted: {other}"),
    }
}

// Neither keys nor values derived from them may be printed.
impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientTls").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn an_incompatibility_reads_as_words() {
        assert_eq!(words("NoCipherSuitesInCommon"), "no cipher suites in common");
        assert_eq!(words("ServerDoesNotSupportTls12Or13"), "server does not support tls12 or13");
        assert_eq!(
            words("ServerRejectedEncryptedClientHello(None)"),
            "server rejected encrypted client hello"
        );
    }
}
