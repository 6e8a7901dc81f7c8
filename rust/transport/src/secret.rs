//! A client's secret proves that a call, a stream or a Hello comes from the client of its session. A client
//! draws it at random; a server keeps only its hash.

use bytes::Bytes;
use fastps_core::error::{Error, Kind, Result};
use http::HeaderMap;
use std::fmt;
use tonic::metadata::{BinaryMetadataValue, MetadataMap};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// The metadata that carries it, in the form of all binary metadata of gRPC.
const METADATA: &str = "fastps-secret-bin";
/// Its length in bytes.
pub const SECRET_BYTES: usize = 16;

/// A client's secret. Debug output omits it, and HTTP/2 keeps it in no table.
#[derive(Clone)]
pub struct Secret([u8; SECRET_BYTES]);

impl Secret {
    /// Draws a new secret from the system's random numbers.
    pub fn draw() -> Result<Self> {
        let mut bytes = [0; SECRET_BYTES];
        getrandom::fill(&mut bytes)
            .map_err(|error| Error::new(Kind::Internal, format!("no random numbers: {error}")))?;
        Ok(Self(bytes))
    }

    /// The bytes, for a Hello.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.to_vec()
    }

    fn metadata(&self) -> BinaryMetadataValue {
        let mut value = BinaryMetadataValue::from_bytes(&self.0);
        value.set_sensitive(true);
        value
    }

    /// Puts it into the headers of a stream.
    pub fn sign(&self, headers: &mut HeaderMap) {
        let mut metadata = MetadataMap::new();
        metadata.insert_bin(METADATA, self.metadata());
        headers.extend(metadata.into_headers());
    }
}

impl Interceptor for Secret {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert_bin(METADATA, self.metadata());
        Ok(request)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The secret in the headers of a call or stream, if there is one.
pub fn in_headers(metadata: &MetadataMap) -> Option<Bytes> {
    metadata.get_bin(METADATA)?.to_bytes().ok()
}
