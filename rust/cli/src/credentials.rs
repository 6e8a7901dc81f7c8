//! Options of commands that reach running servers: how to know these, and what to show them.

use clap::Args;
use fastps_client::TlsFiles;
use std::path::PathBuf;

/// Files of TLS, and of a token.
#[derive(Debug, Args)]
pub(crate) struct Credentials {
    /// The CA that signed the servers' certificates (PEM).
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// The client certificate, for servers that require one (PEM).
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert (PEM).
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// The file of the token to show, for servers that require one.
    #[arg(long, value_name = "FILE", env = "FASTPS_TOKEN_FILE")]
    pub(crate) token_file: Option<PathBuf>,
}

impl Credentials {
    pub(crate) fn tls(&self) -> TlsFiles {
        TlsFiles { cert: self.tls_cert.clone(), key: self.tls_key.clone(), ca: self.tls_ca.clone() }
    }
}
