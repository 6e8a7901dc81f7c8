//! A CA and certificates of all kinds, as PEM files in a temporary folder.

use fastps_server::TlsFiles;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

/// A CA; dropping it removes its files.
pub(crate) struct Ca {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("fastps-tls-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, format!("CA {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(folder.join("ca.pem"), certificate.pem()).unwrap();
        Self { folder, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Files of a client that trusts this CA and has no certificate.
    pub(crate) fn trust(&self) -> TlsFiles {
        TlsFiles { ca: Some(self.folder.join("ca.pem")), ..TlsFiles::default() }
    }

    /// Files of a server for this machine; clients need no certificate.
    pub(crate) fn server(&self) -> TlsFiles {
        self.issue("server", &["127.0.0.1", "localhost"], |_| ())
    }

    /// As `server`, followed by the CA's certificate.
    pub(crate) fn chained(&self) -> TlsFiles {
        let files = self.server();
        let read = |file: &Option<PathBuf>| std::fs::read_to_string(file.as_deref().unwrap()).unwrap();
        let chain = self.folder.join("chain.pem");
        std::fs::write(&chain, read(&files.cert) + &read(&self.trust().ca)).unwrap();
        TlsFiles { cert: Some(chain), ..files }
    }

    /// As `server`, and clients without a certificate of this CA are rejected.
    pub(crate) fn mutual(&self) -> TlsFiles {
        TlsFiles { ca: self.trust().ca, ..self.server() }
    }

    /// A client's certificate and trust in this CA.
    pub(crate) fn client(&self) -> TlsFiles {
        TlsFiles { ca: self.trust().ca, ..self.issue("client", &["worker"], |_| ()) }
    }

    pub(crate) fn expired(&self) -> TlsFiles {
        self.issue("expired", &["127.0.0.1"], |params| params.not_after = date_time_ymd(2020, 1, 1))
    }

    pub(crate) fn issue(
        &self,
        file: &str,
        names: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> TlsFiles {
        let mut params =
            CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let write = |kind: &str, text: String| {
            let path = self.folder.join(format!("{file}{kind}.pem"));
            std::fs::write(&path, text).unwrap();
            Some(path)
        };
        TlsFiles { cert: write("", certificate.pem()), key: write("-key", key.serialize_pem()), ca: None }
    }
}

/// A channel for generated stubs with these files.
pub(crate) async fn channel(address: &str, files: &TlsFiles) -> Channel {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(files.ca.as_ref().unwrap()).unwrap()).unwrap();
    let chain = vec![CertificateDer::from_pem_file(files.cert.as_ref().unwrap()).unwrap()];
    let key = PrivateKeyDer::from_pem_file(files.key.as_ref().unwrap()).unwrap();
    let config = ClientConfig::builder().with_root_certificates(roots).with_client_auth_cert(chain, key);
    let connector = TlsConnector::from(Arc::new(config.unwrap()));
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
    let address = address.to_owned();
    let connect = move |_| {
        let (connector, address) = (connector.clone(), address.clone());
        async move {
            let name = ServerName::try_from("127.0.0.1").unwrap();
            let tcp = TcpStream::connect(address).await?;
            tcp.set_nodelay(true)?;
            connector.connect(name, tcp).await.map(TokioIo::new)
        }
    };
    endpoint.connect_with_connector(tower::service_fn(connect)).await.unwrap()
}

impl Drop for Ca {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
