//! The contents of the PEM files of one end, and what is wrong with them.

use super::TlsFiles;
use super::certificate::Certificate;
use crate::regular_file;
use fastps_core::error::{Error, Kind, Result};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use std::fmt::Display;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest PEM file, in bytes.
const MAX_BYTES: u64 = 4 << 20;
/// Times that files are read again while they change, and the pause before each.
const MAX_REREADS: usize = 5;
const REREAD_PAUSE: Duration = Duration::from_millis(200);

/// A certificate, its issuers behind it, and its private key.
pub(super) type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// The bytes of files, which tell whether one has changed. Debug output omits them.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Contents {
    cert: Option<Vec<u8>>,
    key: Option<Vec<u8>>,
    ca: Option<Vec<u8>>,
    crl: Option<Vec<u8>>,
}

impl Contents {
    pub(super) fn read(files: &TlsFiles, crl: Option<&Path>) -> Result<Self> {
        let read = |file: Option<&Path>, what| file.map(|file| read(file, what)).transpose();
        Ok(Self {
            cert: read(files.cert.as_deref(), "the TLS certificates of")?,
            key: read(files.key.as_deref(), "the TLS private key")?,
            ca: read(files.ca.as_deref(), "the TLS certificates of")?,
            crl: read(crl, "the list of revoked certificates")?,
        })
    }

    /// Makes a value of the files at a start. A certificate and its key are replaced one after the other: on
    /// failure the files are read again as long as they change.
    pub(super) fn settled<T>(
        files: &TlsFiles,
        crl: Option<&Path>,
        make: impl Fn(Self) -> Result<T>,
    ) -> Result<T> {
        let mut contents = Self::read(files, crl)?;
        for _ in 0..MAX_REREADS {
            let made = make(contents.clone());
            if made.is_ok() {
                return made;
            }
            std::thread::sleep(REREAD_PAUSE);
            let again = Self::read(files, crl)?;
            if again == contents {
                return made;
            }
            contents = again;
        }
        make(contents)
    }

    /// The certificate and key, if the files have them.
    pub(super) fn identity(&self, files: &TlsFiles) -> Result<Option<Identity>> {
        match (&self.cert, &self.key, &files.cert, &files.key) {
            (Some(cert), Some(key), Some(cert_file), Some(key_file)) => {
                Ok(Some((certificates(cert_file, cert)?, private_key(key_file, key)?)))
            }
            (None, None, ..) => Ok(None),
            (cert, ..) => Err(config("a TLS certificate and its private key go together").expected(
                "tls_cert and tls_key",
                if cert.is_some() { "only tls_cert" } else { "only tls_key" },
            )),
        }
    }

    /// The CAs, if there is a file of them.
    pub(super) fn roots(&self, files: &TlsFiles) -> Result<Option<RootCertStore>> {
        let (Some(file), Some(bytes)) = (&files.ca, &self.ca) else { return Ok(None) };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(file, bytes)? {
            roots.add(certificate).map_err(|error| {
                config(format!("a TLS certificate of {} cannot be a CA: {error}", file.display()))
            })?;
        }
        Ok(Some(roots))
    }

    /// The lists of revoked certificates.
    pub(super) fn revoked(&self, file: Option<&Path>) -> Result<Vec<CertificateRevocationListDer<'static>>> {
        let (Some(file), Some(bytes)) = (file, &self.crl) else { return Ok(Vec::new()) };
        let lists = CertificateRevocationListDer::pem_slice_iter(bytes).collect::<Result<Vec<_>, _>>();
        let failed = |why: &dyn Display| {
            config(format!("cannot read the list of revoked certificates {}: {why}", file.display()))
        };
        match lists {
            Ok(lists) if lists.is_empty() => Err(failed(&"it holds none in PEM form")),
            lists => lists.map_err(|error| failed(&error)),
        }
    }
}

/// Fails unless a server can show this certificate now: clients would refuse it, each with an error of its
/// own.
pub(super) fn check_server(file: &Path, chain: &[CertificateDer<'_>]) -> Result<()> {
    let Some(first) = chain.first() else { return Ok(()) };
    let (first, name) = (Certificate::parse(first)?, file.display());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
    if first.is_ca {
        return Err(config(format!("the first certificate of {name} is that of a CA, which clients refuse"))
            .expected("the server's own certificate, its issuers behind it", first.subject));
    }
    if first.not_after < now {
        let days = (now - first.not_after) / 86_400;
        return Err(config(format!("the certificate of {name} has expired"))
            .expected("a valid one", format!("one that ended {days} days ago")));
    }
    if first.not_before > now {
        let seconds = first.not_before - now;
        return Err(config(format!("the certificate of {name} is not valid yet: is the clock right?"))
            .expected("a valid one", format!("one that begins in {seconds} s")));
    }
    Ok(())
}

fn config(message: impl Into<String>) -> Error {
    Error::new(Kind::Config, message)
}

fn read(file: &Path, what: &str) -> Result<Vec<u8>> {
    let name = file.display();
    let failed = |error: &dyn Display| config(format!("cannot read {what} {name}: {error}"));
    let (open, _) = regular_file::open(file).map_err(|error| failed(&error))?;
    let mut bytes = Vec::new();
    open.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| failed(&error))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(failed(&format!("it has more than {MAX_BYTES} bytes")));
    }
    let dos = |line: &[u8]| line.ends_with(b"\r");
    if let Some(line) = bytes.split(|byte| *byte == b'\n').position(dos) {
        let message = format!("{name}: line {} ends as on Windows", line + 1);
        return Err(config(message).expected("LF (run dos2unix)", "CR LF"));
    }
    Ok(bytes)
}

fn certificates(file: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let failed = |error: &dyn Display| {
        config(format!("cannot read the TLS certificates of {}: {error}", file.display()))
    };
    let found = CertificateDer::pem_slice_iter(bytes);
    let found: Vec<_> = found.collect::<Result<_, _>>().map_err(|error| failed(&error))?;
    if found.is_empty() { Err(failed(&"it holds none in PEM form")) } else { Ok(found) }
}

fn private_key(file: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>> {
    warn_if_others_can_read(file);
    // The contents of the file must not get into an error.
    PrivateKeyDer::from_pem_slice(bytes).map_err(|_| {
        config(format!(
            "cannot read the TLS private key {}: it holds no private key in PEM form",
            file.display()
        ))
    })
}

/// Warns if a key is readable by others than its owner.
fn warn_if_others_can_read(file: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(file).map_or(0, |file| file.permissions().mode());
    if mode & 0o077 != 0 {
        let (file, mode) = (file.display(), format_args!("{:03o}", mode & 0o777));
        tracing::warn!(%file, %mode, "others than its owner can read or change the TLS private key: chmod 600");
    }
}
