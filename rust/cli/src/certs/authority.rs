//! The CA in a folder: it signs certificates of servers and clients.

use super::issue::{Issued, Request};
use super::{read, write_pair};
use crate::files::private_folder;
use fastps_core::error::{Error, Kind, Result};
use fastps_server::human::now;
use fastps_transport::private_file;
use fastps_transport::tls::certificate::Certificate;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::path::{Path, PathBuf};
use time::{Duration, OffsetDateTime};

/// Longest private key, in bytes of PEM.
const MAX_KEY: u64 = 64 << 10;
/// Backdating of certificates, for machines whose clocks are behind.
const CLOCK_SKEW: Duration = Duration::hours(1);
/// Bytes of the serial number in a CA's name, which distinguishes CAs.
const NUMBER_BYTES: usize = 4;

/// A CA: a certificate and its private key, in a folder.
pub(crate) struct Authority {
    folder: PathBuf,
    /// The certificate, in PEM form.
    certificate: String,
    not_after: i64,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Makes a CA in a folder that has none.
    pub(crate) fn create(folder: &Path, days: u32) -> Result<Self> {
        private_folder(folder)?;
        let key = KeyPair::generate().map_err(|error| internal(&error))?;
        let mut params = CertificateParams::default();
        params.not_before = start()?;
        params.not_after = params.not_before + CLOCK_SKEW + Duration::days(days.into());
        let serial = serial()?;
        let number = serial.to_string().replace(':', "");
        let number = &number[..number.len().min(2 * NUMBER_BYTES)];
        params.serial_number = Some(serial);
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("fastps CA {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).map_err(|error| internal(&error))?.pem();
        write_pair(
            (&folder.join("ca.pem"), &certificate),
            Some((&folder.join("ca-key.pem"), &key.serialize_pem())),
        )?;
        let not_after = params.not_after.unix_timestamp();
        Ok(Self { folder: folder.to_owned(), certificate, not_after, issuer: Issuer::new(params, key) })
    }

    /// Reads the CA of a folder.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let (file, key_file) = (folder.join("ca.pem"), folder.join("ca-key.pem"));
        if !file.exists() {
            let message = format!("{} has no CA", folder.display());
            return Err(Error::new(Kind::Config, message)
                .expected(format!("fastps certs init {} before", folder.display()), "no ca.pem"));
        }
        let bad = |error: &dyn std::fmt::Display| {
            Error::new(Kind::Config, format!("cannot use the CA {}: {error}", file.display()))
        };
        let certificate = read(&file)?;
        let key = KeyPair::from_pem(&private_file::read(&key_file, MAX_KEY)?).map_err(|_| {
            Error::new(Kind::Config, format!("{} holds no private key in PEM form", key_file.display()))
        })?;
        let der = CertificateDer::from_pem_slice(certificate.as_bytes()).map_err(|error| bad(&error))?;
        let about = Certificate::parse(&der)?;
        if !about.is_ca {
            return Err(bad(&"it is not the certificate of a CA"));
        }
        if about.public_key != key.public_key_raw() {
            return Err(bad(&format!("{} is the key of another certificate", key_file.display())));
        }
        let issuer = Issuer::from_ca_cert_der(&der, key).map_err(|error| bad(&error))?;
        Ok(Self { folder: folder.to_owned(), certificate, not_after: about.not_after, issuer })
    }

    pub(crate) fn certificate_file(&self) -> PathBuf {
        self.folder.join("ca.pem")
    }

    pub(crate) fn key_file(&self) -> PathBuf {
        self.folder.join("ca-key.pem")
    }

    /// The certificate in PEM form.
    pub(crate) fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Issues a certificate into the CA's folder.
    pub(crate) fn issue(&self, request: &Request) -> Result<Issued> {
        let name = request.file_name()?;
        self.issue_as(
            request,
            self.folder.join(format!("{name}.pem")),
            self.folder.join(format!("{name}-key.pem")),
        )
    }

    /// Issues a certificate into these files: the certificate and the CA behind it, and the private key,
    /// unless the request has its own public key.
    pub(crate) fn issue_as(&self, request: &Request, certificate: PathBuf, key: PathBuf) -> Result<Issued> {
        let mut params = request.params()?;
        params.not_before = start()?;
        params.not_after = params.not_before + CLOCK_SKEW + Duration::days(request.days.into());
        if params.not_after.unix_timestamp() > self.not_after {
            let left = (self.not_after - now() as i64) / 86_400;
            return Err(Error::new(Kind::Config, "the certificate would outlive its CA")
                .expected(format!("at most {left} days"), format!("{} days", request.days)));
        }
        if let Some(text) = &request.csr {
            let mut wanted = CertificateSigningRequestParams::from_pem(text).map_err(|error| {
                Error::new(Kind::Config, format!("cannot use the certificate request: {error}"))
            })?;
            params.serial_number = Some(serial()?);
            wanted.params = params;
            let signed = wanted.signed_by(&self.issuer).map_err(|error| internal(&error))?;
            write_pair((&certificate, &(signed.pem() + &self.certificate)), None)?;
            return Ok(Issued { certificate, key: None });
        }
        let pair = KeyPair::generate().map_err(|error| internal(&error))?;
        params.serial_number = Some(serial()?);
        let signed = params.signed_by(&pair, &self.issuer).map_err(|error| internal(&error))?;
        write_pair((&certificate, &(signed.pem() + &self.certificate)), Some((&key, &pair.serialize_pem())))?;
        Ok(Issued { certificate, key: Some(key) })
    }
}

/// A random serial number: one of a renewed key differs from the one before, so that a CRL tells them apart.
fn serial() -> Result<SerialNumber> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| internal(&error))?;
    // Positive, and of full length.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

fn start() -> Result<OffsetDateTime> {
    let now = OffsetDateTime::from_unix_timestamp(now() as i64);
    now.map(|now| now - CLOCK_SKEW).map_err(|error| internal(&error))
}

fn internal(error: &dyn std::fmt::Display) -> Error {
    Error::new(Kind::Internal, format!("cannot make a certificate: {error}"))
}
