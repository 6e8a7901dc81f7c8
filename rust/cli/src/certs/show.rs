//! The contents of certificates, and what is wrong with them.

use super::read;
use fastps_core::error::{Error, Kind, Result};
use fastps_server::{Role, principal_uri, time_text};
use fastps_transport::tls::certificate::Certificate;
use rcgen::KeyPair;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Serialize;
use std::path::{Path, PathBuf};

const DAY: i64 = 86_400;
/// Ending of the file of a private key, as `fastps certs issue` writes it.
const KEY_ENDING: &str = "-key.pem";

/// Contents of the files.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    /// Set if nothing is wrong.
    pub(super) ok: bool,
    certificates: Vec<Shown>,
    pub(super) problems: Vec<String>,
}

/// A certificate. Times are RFC 3339.
#[derive(Debug, Serialize)]
struct Shown {
    file: PathBuf,
    /// Place in its file, from 1.
    number: usize,
    subject: String,
    issuer: String,
    names: Vec<String>,
    /// The principal of a client or server certificate: name, role and scope.
    principal: Option<ShownPrincipal>,
    is_ca: bool,
    not_before: String,
    not_after: String,
    days_left: i64,
    serial: String,
    /// The file of its private key; `None`: not among the files.
    key: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct ShownPrincipal {
    name: String,
    role: &'static str,
    scope: String,
}

/// A private key, and the bits of its public key.
struct Key {
    file: PathBuf,
    public: Vec<u8>,
}

/// Reads the files. `now` is in seconds since 1970.
pub(super) fn look(files: &[PathBuf], warn_days: u32, now: i64) -> Result<Found> {
    let (mut certificates, mut keys, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    for file in files {
        let (found, key) = contents(file)?;
        keys.extend(key.map(|public| Key { file: file.clone(), public }));
        if let Some(beside) = key_beside(file).filter(|key| key.exists() && !files.contains(key)) {
            keys.extend(contents(&beside)?.1.map(|public| Key { file: beside, public }));
        }
        problems.extend(order(file, &found));
        certificates.extend(found.into_iter().enumerate().map(|(k, one)| (file.clone(), k + 1, one)));
    }
    let fits = |key: &Key| certificates.iter().any(|(_, _, one)| one.public_key == key.public);
    if !certificates.is_empty() {
        let others = keys.iter().filter(|key| !fits(key));
        problems
            .extend(others.map(|key| format!("{} is the key of another certificate", key.file.display())));
    }
    for (file, number, one) in &certificates {
        problems.extend(
            time_problem(one, warn_days, now)
                .map(|what| format!("{}: certificate {number} {what}", file.display())),
        );
    }
    let certificates: Vec<_> = certificates
        .iter()
        .map(|(file, number, one)| shown(file, *number, one, &keys, now))
        .collect::<Result<_>>()?;
    Ok(Found { ok: problems.is_empty(), certificates, problems })
}

/// The certificates of a file, and the public key of the private key in it.
fn contents(file: &Path) -> Result<(Vec<Certificate>, Option<Vec<u8>>)> {
    let text = read(file)?;
    let bad =
        |error: &dyn std::fmt::Display| Error::new(Kind::Config, format!("{}: {error}", file.display()));
    let found = CertificateDer::pem_slice_iter(text.as_bytes())
        .map(|der| der.map_err(|error| bad(&error)).and_then(|der| Certificate::parse(&der)))
        .collect::<Result<Vec<_>>>()?;
    let key = match PrivateKeyDer::from_pem_slice(text.as_bytes()) {
        Ok(der) => {
            // The text of the error must not contain the key.
            let pair =
                KeyPair::try_from(&der).map_err(|_| bad(&"a private key of a kind that is not known"))?;
            Some(pair.public_key_raw().to_vec())
        }
        Err(_) => None,
    };
    if found.is_empty() && key.is_none() {
        return Err(bad(&"it holds neither a certificate nor a private key in PEM form"));
    }
    Ok((found, key))
}

fn key_beside(file: &Path) -> Option<PathBuf> {
    let stem = file.file_name()?.to_str()?.strip_suffix(".pem")?;
    Some(file.with_file_name(format!("{stem}{KEY_ENDING}")))
}

/// Problem with the order of a chain: each certificate is followed by its issuer. A bundle of CAs has none.
fn order(file: &Path, chain: &[Certificate]) -> Option<String> {
    if chain.iter().all(|one| one.is_ca) {
        return None;
    }
    let wrong = chain.windows(2).position(|pair| pair[0].issuer != pair[1].subject)?;
    let (after, expected) = (wrong + 1, &chain[wrong].issuer);
    Some(format!("{}: certificate {after} is not followed by its issuer, {expected}", file.display()))
}

fn time_problem(one: &Certificate, warn_days: u32, now: i64) -> Option<String> {
    let left = one.not_after - now;
    if left < 0 {
        Some(format!("expired on {}", time(one.not_after)))
    } else if one.not_before > now {
        Some(format!("is not valid before {}", time(one.not_before)))
    } else if left < i64::from(warn_days) * DAY {
        Some(format!("expires in {} days, on {}", left / DAY, time(one.not_after)))
    } else {
        None
    }
}

fn time(seconds: i64) -> String {
    time_text(seconds.max(0) as u64)
}

fn shown(file: &Path, number: usize, one: &Certificate, keys: &[Key], now: i64) -> Result<Shown> {
    let ours = one.uris.iter().find(|uri| uri.starts_with(principal_uri::SCHEME));
    let principal = ours.map(|uri| principal_uri::parse(uri)).transpose()?.map(|found| ShownPrincipal {
        name: found.name.as_deref().unwrap_or_default().to_owned(),
        role: Role::name(found.role),
        scope: found.scope.to_string(),
    });
    Ok(Shown {
        file: file.to_owned(),
        number,
        subject: one.subject.clone(),
        issuer: one.issuer.clone(),
        names: one.names.clone(),
        principal,
        is_ca: one.is_ca,
        not_before: time(one.not_before),
        not_after: time(one.not_after),
        days_left: (one.not_after - now).div_euclid(DAY),
        serial: one.serial.clone(),
        key: keys.iter().find(|key| key.public == one.public_key).map(|key| key.file.clone()),
    })
}

impl Found {
    /// The certificates for people.
    pub(super) fn lines(&self) -> Vec<String> {
        self.certificates.iter().flat_map(Shown::lines).collect()
    }
}

impl Shown {
    fn lines(&self) -> Vec<String> {
        let kind = if self.is_ca { " (CA)" } else { "" };
        let mut lines = vec![format!("{} {}: {}{kind}", self.file.display(), self.number, self.subject)];
        if !self.names.is_empty() {
            lines.push(format!("  names:   {}", self.names.join(", ")));
        }
        if let Some(ShownPrincipal { name, role, scope }) = &self.principal {
            lines.push(format!("  role:    {role}, as {name}, for {scope}"));
        }
        lines.push(format!("  issuer:  {}", self.issuer));
        lines.push(format!(
            "  valid:   {} to {}, {} days left",
            self.not_before, self.not_after, self.days_left
        ));
        lines.push(format!("  serial:  {}", self.serial));
        let key =
            self.key.as_ref().map_or("not among these files".to_owned(), |key| key.display().to_string());
        lines.push(format!("  key:     {key}"));
        lines
    }
}
