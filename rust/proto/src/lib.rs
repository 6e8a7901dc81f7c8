//! The messages and services of `protos/fastps/v1/fastps.proto`, as generated code.
//!
//! The code is checked in, so building needs no protoc; `tests/generated.rs` proves it fresh and, with
//! `FASTPS_REGENERATE=1`, rewrites it.

/// Protocol version 1.
#[allow(clippy::all, clippy::pedantic, missing_docs, unreachable_pub, rustdoc::all)]
#[rustfmt::skip]
pub mod v1 {
    include!("generated/fastps.v1.rs");
}

/// The least role of each call and frame kind.
#[allow(clippy::match_same_arms)]
#[rustfmt::skip]
mod roles {
    include!("generated/roles.rs");
}

pub use roles::{NeedsRole, role_of};

/// Leaves out the incarnation and the secret, which only the client may know.
impl std::fmt::Debug for v1::HelloRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { protocol_minor, client: _, name, renew, ack, secret: _, close, report, cluster_digest: _ } =
            self;
        let mut fields = f.debug_struct("HelloRequest");
        fields
            .field("protocol_minor", protocol_minor)
            .field("name", name)
            .field("renew", renew)
            .field("ack", ack)
            .field("close", close)
            .field("report", report)
            .finish_non_exhaustive()
    }
}

impl v1::Header {
    /// Returns whether it is of a program, a pull of a vector, or a portion.
    pub fn is_of_vectors(&self) -> bool {
        self.vector.is_some() || self.portion.is_some()
    }
}

/// The encoded `FileDescriptorSet` of the service definition, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/fastps.v1.bin");

/// Minor version of the protocol that this code speaks.
pub const PROTOCOL_MINOR: u32 = 1;

/// Largest message that anybody may send, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;
