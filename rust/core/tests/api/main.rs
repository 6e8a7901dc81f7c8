//! Tests of the core's public interface, in one program because each program links all of it.
//! `tests/threads.rs` and `tests/loom.rs` are separate, because they are also built with other settings.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests fail by panicking, helpers too"
)]

mod bfloat16;
mod clients;
mod codec;
mod codec_properties;
mod correction;
mod cut;
mod exchange;
mod float64;
mod groups;
mod identities;
mod image;
mod isa;
mod linear;
mod memory;
mod store;
mod vectors;
