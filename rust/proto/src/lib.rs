//! The messages and services of `protos/fastps/v1/fastps.proto`, as generated code.
//!
//! The code is checked in, so that nobody needs protoc to build; `tests/generated.rs` proves it fresh and, with
//! `FASTPS_REGENERATE=1`, rewrites it.

/// Protocol version 1.
#[allow(clippy::all, clippy::pedantic, missing_docs, unreachable_pub, rustdoc::all)]
#[rustfmt::skip]
pub mod v1 {
    include!("generated/fastps.v1.rs");
}

/// The encoded `FileDescriptorSet` of the service definition, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/fastps.v1.bin");

/// Minor version of the protocol that this code speaks.
pub const PROTOCOL_MINOR: u32 = 0;

/// Largest message that anybody may send, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;
