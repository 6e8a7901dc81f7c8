//! Hashes the secret that a client shows; a session knows its client by that hash.

use fastps_core::error::{Error, Kind, Result};
use fastps_durable::SecretHash;
use fastps_transport::secret::{SECRET_BYTES, in_headers};
use tonic::metadata::MetadataMap;

/// The hash of the secret in a Hello.
pub(crate) fn of_hello(secret: &[u8]) -> Result<SecretHash> {
    if secret.len() == SECRET_BYTES {
        return Ok(SecretHash::of(secret));
    }
    let error = Error::new(Kind::Config, "Hello has no client secret");
    Err(error.expected(format!("{SECRET_BYTES} random bytes"), format!("{} bytes", secret.len())))
}

/// The hash of the secret in the headers of a call or stream; `None` without a valid secret.
pub(crate) fn of_headers(metadata: &MetadataMap) -> Option<SecretHash> {
    in_headers(metadata).map(|secret| SecretHash::of(&secret))
}
